"""TRL's trainers: the functions that they call by name and that assume whole weights, or a batch for every process.

Read and run with TRL 1.16. Nothing here imports TRL: whoever has one of its trainers has loaded it.
"""

import copy
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

_RECORDS = ("_metrics", "_total_train_tokens", "_logs", "_step")
"""What a trainer keeps of the losses that it has computed."""


class DataHooks:
    """What TRL's trainers call as they make their data sets: put in front of one."""

    def arguments_of_data(self, arguments: Any) -> Any:
        """The config that rows are prepared by."""
        return arguments

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, *rest: Any) -> Any:
        prepare = super()._prepare_dataset  # type: ignore[misc]
        return prepare(dataset, processing_class, self.arguments_of_data(args), *rest)

    def check_cached(self, dataset: Any) -> None:
        """Look at rows that the first rank is about to cache a reference's scores beside, for all ranks to read."""

    def _precompute_ref_logps(self, dataset: Any, *rest: Any) -> Any:
        self.check_cached(dataset)
        return super()._precompute_ref_logps(dataset, *rest)  # type: ignore[misc]


def pairs_rows_of_a_batch(trainer: Any) -> bool:
    """Whether rows are paired with others of their batch, by its size, before they are dealt: KTO's."""
    return bool(getattr(trainer, "calculate_KL", False))


def is_trl(kind: type) -> bool:
    """Whether a trainer is one of TRL's."""
    return bool(_modules(kind))


def _modules(kind: type) -> list[ModuleType]:
    names = dict.fromkeys(each.__module__ for each in kind.__mro__ if each.__module__.startswith("trl."))
    return [sys.modules[name] for name in names]


@contextmanager
def replaced(kind: type, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Within: the modules of a trainer and its bases call these functions in the place of those of the same names.

    Each is given the stock one before its arguments.
    """
    with ExitStack() as stack:
        for module in _modules(kind):
            for name, function in functions.items():
                stock = getattr(module, name, None)
                if stock is not None:
                    setattr(module, name, partial(function, stock))
                    stack.callback(setattr, module, name, stock)
        yield


def fused_output(**fields: Any) -> Any:
    """What a model with a fused head answers."""
    return importlib.import_module("trl.trainer.utils").FusedCausalLMOutput(**fields)


@contextmanager
def unrecorded(trainer: Any) -> Iterator[None]:
    """Within: losses are computed that are none of the run's."""
    kept = {name: copy.deepcopy(vars(trainer)[name]) for name in _RECORDS if name in vars(trainer)}
    try:
        yield
    finally:
        vars(trainer).update(kept)


def loss_is_scaled(trainer: Any, num_items_in_batch: Any) -> bool:
    """Whether ``compute_loss`` has divided its loss by what the whole step has, and not by what its microbatch has."""
    told = getattr(trainer, "loss_is_scaled_for_ga", None)
    if told is not None:
        return bool(told)
    by_items = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
    return bool(by_items or trainer.compute_loss_func is not None)
