"""Prepare data sets for TRL's trainers before a step, in several processes."""

import copy
from typing import Any

from ..._compat.trl import DataHooks, pairs_rows_of_a_batch
from ...config.environment import started_processes
from .refusals import check_cached
from .seams import Seams


class DataSets(DataHooks):
    """Hooks for rows that are paired, or scored, once before training."""

    _seams: Seams

    def arguments_of_data(self, arguments: Any) -> Any:
        """Return the config for TRL's preparation of rows: pairs form within the global batch, as in one process."""
        if not pairs_rows_of_a_batch(self):
            return arguments
        own = copy.copy(arguments)
        own.per_device_train_batch_size *= 1 if self._seams.layout is None else self._seams.layout.batch_world
        return own

    def check_cached(self, dataset: Any) -> None:
        """Refuse rows whose cached scores the other ranks could not read."""
        check_cached(dataset, started_processes())
