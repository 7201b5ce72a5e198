"""TRL's trainers: functions that they call by name, and that assume full weights, or one batch per process.

Read and run with TRL 1.16. Nothing here imports TRL: a script with one of its trainers has imported it.
"""

import copy
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch

from .replaced import attribute_replaced

_RECORDS = ("_metrics", "_total_train_tokens", "_logs", "_step")
"""Attributes in which a trainer records metrics of its losses."""


_GENERATED = (
    *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "num_items_in_batch", "tool_mask"),
    *("num_images", "num_tiles"),
)
"""What a generated batch has that no model takes."""

_Mixin: Any = object  # so that type checkers take what a trainer has


class DataHooks(_Mixin):
    """Define the methods that TRL's trainers call as they prepare their data sets. A subclass has
    ``arguments_of_data(arguments)``, the config by which rows are prepared, and ``check_cached(dataset)``, for rows
    beside which the first rank is about to cache a reference's scores.
    """

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, *rest: Any) -> Any:
        return super()._prepare_dataset(dataset, processing_class, self.arguments_of_data(args), *rest)

    def _precompute_ref_logps(self, dataset: Any, *rest: Any) -> Any:
        self.check_cached(dataset)
        return super()._precompute_ref_logps(dataset, *rest)


class DistillationHooks(_Mixin):
    """Compute the loss of TRL's DistillationTrainer, which reads full hidden states and heads. A subclass has
    ``distilled(batch, divisor)``: the loss of labelled tokens, the sum of the student's entropies, and their number.
    """

    @property
    def _forward_redirection(self) -> Any:
        return lambda wrapper, model, method, *args, **kwargs: method(*args, **kwargs)

    @_forward_redirection.setter
    def _forward_redirection(self, _: Any) -> None:
        """Ignore TRL's, which runs the loss as the forward pass of a wrapper."""

    def _compute_loss(self, student: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        batch = {name: value for name, value in inputs.items() if name not in _GENERATED}
        ids, mask = ([inputs[f"{part}_{kind}"] for part in ("prompt", "completion")] for kind in ("ids", "mask"))
        trained = mask[1] * inputs.get("tool_mask", 1)
        labels = torch.cat((torch.full_like(ids[0], -100), ids[1].masked_fill(trained == 0, -100)), 1)
        batch |= {"input_ids": torch.cat(ids, 1), "attention_mask": torch.cat(mask, 1), "labels": labels}
        return self.distilled(batch, num_items_in_batch)


def pairs_rows_of_a_batch(trainer: Any) -> bool:
    """Return whether rows are paired within batches before batches are distributed, as in KTO."""
    return bool(getattr(trainer, "calculate_KL", False))


def is_trl(kind: type) -> bool:
    """Return whether a trainer is one of TRL's."""
    return bool(_modules(kind))


def _modules(kind: type) -> list[ModuleType]:
    names = dict.fromkeys(each.__module__ for each in kind.__mro__ if each.__module__.startswith("trl."))
    return [sys.modules[name] for name in names]


@contextmanager
def replaced(kind: type, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Patch functions by name in the modules of a trainer and its bases inside the ``with`` block; each gets the stock
    function before its arguments.
    """
    with ExitStack() as stack:
        for module in _modules(kind):
            for name, function in functions.items():
                stock = getattr(module, name, None)
                if stock is not None:
                    stack.enter_context(attribute_replaced(module, name, partial(function, stock)))
        yield


def fused_output(**fields: Any) -> Any:
    """Return the output of a model with a fused head."""
    return importlib.import_module("trl.trainer.utils").FusedCausalLMOutput(**fields)


@contextmanager
def unrecorded(trainer: Any) -> Iterator[None]:
    """Restore the trainer's records of metrics after the ``with`` block."""
    kept = {name: copy.deepcopy(vars(trainer)[name]) for name in _RECORDS if name in vars(trainer)}
    try:
        yield
    finally:
        vars(trainer).update(kept)


def loss_is_scaled(trainer: Any, num_items_in_batch: Any) -> bool:
    """Return whether ``compute_loss`` divides its loss by the number of items in the step instead of the microbatch."""
    told = getattr(trainer, "loss_is_scaled_for_ga", None)
    if told is not None:
        return bool(told)
    by_items = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
    return bool(by_items or trainer.compute_loss_func is not None)
