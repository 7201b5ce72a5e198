"""Find weights of other trainers: DeepSpeed's ZeRO partitions, and weights with torchtitan's names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...checkpoint.foreign_optimizer import OptimizerSource
from ...distributed.files.reader import TensorOnDisk
from ...distributed.files.sources import AddedSource, Source
from .titan_names import as_transformers, is_torchtitans
from .zero import LATEST, OPTIMIZER_STATES, ZeroCheckpoint, open_partitions


class _Zero(AddedSource):
    def find(self, path: Path) -> Source | None:
        for pattern in (LATEST, OPTIMIZER_STATES):
            for found in sorted(path.glob(pattern))[:1]:
                return Source("DeepSpeed's ZeRO partitions", found.parent, open_partitions)
        return None

    def find_optimizer(self, directory: Path) -> OptimizerSource | None:
        if not (directory / LATEST).exists() and not any(directory.glob(OPTIMIZER_STATES)):
            return None
        zero = ZeroCheckpoint(directory)
        return OptimizerSource(zero.directory, zero.optimizer(), True, zero.schedule, zero.step)


class _Titan(AddedSource):
    def rename(
        self, tensors: Mapping[str, TensorOnDisk], config: Any
    ) -> dict[str, TensorOnDisk] | None:
        return as_transformers(tensors, config) if is_torchtitans(tensors) else None


ZERO = _Zero()
TITAN = _Titan()
