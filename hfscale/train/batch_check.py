"""Refuse a batch that the model cannot read, by names, types, shapes and devices alone, without a device sync."""

import difflib
import inspect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from numpy import ndarray
from torch import Tensor

from .._compat.transformers.classes import stock_class
from ..errors import ConfigError
from .runtime import Batch, Runtime, StepLoss
from .runtime.batches import BORDERS

_INDICES = ("input_ids", "decoder_input_ids", "position_ids", "token_type_ids")  # indices into embedding tables
_TENSORS = (*_INDICES, "inputs_embeds", "labels", "shift_labels")
_WHOLE = (torch.int64, torch.int32)
_NEAR = 0.93  # similarity from which an unknown name is taken for a misspelt one


def microbatches_of(batch: Batch | Sequence[Batch]) -> list[dict[str, Any]]:
    """Return the microbatches of a step's ``batch`` argument as a list of dictionaries.

    Raises:
        ConfigError: it is neither a mapping nor a list of mappings.
    """
    listed: Any = [batch] if isinstance(batch, Mapping) else batch
    found = list(listed) if hasattr(listed, "__iter__") and not isinstance(listed, str | Tensor) else [listed]
    for each in found:
        if not isinstance(each, Mapping) or not all(isinstance(name, str) for name in each):
            what = "mapping whose keys are no names" if isinstance(each, Mapping) else type(each).__name__
            raise ConfigError(
                f"a step takes a batch, a mapping of tensors by the names of the model's arguments, or a list of such "
                f"microbatches, and found a {what}"
            )
    if not found:
        raise ConfigError("a step got an empty list of microbatches: pass at least one")
    return [dict(each) for each in found]


def check_microbatch(runtime: Runtime, batch: Mapping[str, Any], loss: StepLoss) -> None:
    """Raise :class:`ConfigError`, naming the argument, if the model or the step's loss cannot read a microbatch."""
    names, takes_more = forward_arguments(stock_class(runtime.model))
    if loss.needs_labels and batch.get("labels") is None:
        raise ConfigError(f"a step needs 'labels' in every batch, and found only {', '.join(batch)}")
    _check_names(batch, names, takes_more or not loss.needs_labels)
    for name, value in batch.items():
        _check_value(name, value, runtime.mesh.device)
    if batch.get("logits_to_keep"):
        raise ConfigError(
            "logits_to_keep leaves positions without logits, and the loss is over all of them: leave it out"
        )
    _check_documents(batch)
    _check_types(batch, loss)
    if "input_ids" in names:
        _check_shapes(runtime, batch, loss)


@lru_cache(maxsize=64)
def forward_arguments(kind: type) -> tuple[frozenset[str], bool]:
    """Return the names of the arguments of a class's forward pass, and whether it also takes others."""
    found = inspect.signature(kind.forward).parameters.values()  # type: ignore[attr-defined]
    named = frozenset(each.name for each in found if each.kind != each.VAR_KEYWORD)
    return named, len(named) < len(found)


def _check_documents(batch: Mapping[str, Any]) -> None:
    borders = batch.get(BORDERS[0])
    if isinstance(borders, Tensor) and len(borders) > 2 and batch.get("position_ids") is None:
        raise ConfigError(
            f"{BORDERS[0]} says that a row holds {len(borders) - 1} documents, and without position_ids most models "
            "count positions on from one to the next: give position_ids too (return_position_ids=True)"
        )


def _check_names(batch: Mapping[str, Any], names: frozenset[str], takes_more: bool) -> None:
    for name in batch.keys() - names:
        close = difflib.get_close_matches(name, names, 1, _NEAR)
        if close or not takes_more:
            meant = (
                f"did you mean {close[0]!r}?" if close else f"its arguments are {', '.join(sorted(names - {'self'}))}"
            )
            raise ConfigError(f"the model takes no {name!r}: {meant}")


def _check_value(name: str, value: Any, device: torch.device) -> None:
    if isinstance(value, list | ndarray):
        raise ConfigError(
            f"{name} is a {type(value).__name__}: give tensors, [rows, tokens], as a collator of transformers makes "
            "them of rows (DataCollatorForLanguageModeling, default_data_collator), or torch.tensor(...)"
        )
    if isinstance(value, str | bytes) or (name in _TENSORS and not isinstance(value, Tensor | None)):
        raise ConfigError(f"{name} must be a tensor, got {value!r}: tokenize texts, and make tensors of numbers")
    if not isinstance(value, Tensor):
        return
    empty = value.is_meta and device.type != "meta"
    if empty or value.layout != torch.strided or value.is_complex():
        kind = "on the meta device" if empty else f"of layout {value.layout} and type {value.dtype}"
        raise ConfigError(
            f"{name} must be a dense tensor of real numbers, got one {kind}: make it with torch.tensor(...)"
        )


def _check_types(batch: Mapping[str, Any], loss: StepLoss) -> None:
    labels = ("labels", "shift_labels") if loss.ignores else ()  # others may be regression targets
    for name in (*_INDICES, *labels):
        value = batch.get(name)
        if value is not None and value.dtype not in _WHOLE:
            raise ConfigError(f"{name} must be whole numbers of type int64, got {value.dtype}: use {name}.long()")
    embeds = batch.get("inputs_embeds")
    if embeds is not None and not embeds.is_floating_point():
        raise ConfigError(f"inputs_embeds must be vectors of a floating-point type, got {embeds.dtype}: use .float()")


def _check_shapes(runtime: Runtime, batch: Mapping[str, Any], loss: StepLoss) -> None:
    """Check that tensors with an entry per token agree on rows and tokens; for causal language models, all tensors."""
    causal = runtime.loss is not None and runtime.loss.shift > 0
    ids, embeds = batch.get("input_ids"), batch.get("inputs_embeds")
    if causal and (ids is None) == (embeds is None):
        raise ConfigError(f"a batch needs input_ids or inputs_embeds, one of the two, and found {', '.join(batch)}")
    if ids is not None and (ids.ndim < 2 or (causal and ids.ndim > 2)):
        raise ConfigError(
            f"input_ids is {list(ids.shape)}: give [rows, tokens], one row by input_ids.unsqueeze(0), and labels alike"
        )
    if embeds is not None and causal:
        _check_embeds(runtime, embeds)
    tokens = embeds if ids is None else ids
    if tokens is not None and tokens.ndim >= 2 and (ids is None or ids.ndim == 2):
        _check_beside(batch, tuple(tokens.shape[:2]), causal, loss.shift > 0)


def _check_embeds(runtime: Runtime, embeds: Tensor) -> None:
    table = runtime.plan.lookup_shape
    if table is not None and (embeds.ndim, embeds.shape[-1]) != (3, table[1]):
        raise ConfigError(f"inputs_embeds is {list(embeds.shape)}: give [rows, tokens, {table[1]}]")


def _check_tokens(rows: int, tokens: int) -> None:
    if rows and not tokens:
        raise ConfigError(f"a batch of {rows} rows has no tokens: pass rows of at least one token")


def _check_beside(batch: Mapping[str, Any], place: tuple[int, int], causal: bool, labelled: bool) -> None:
    """Check the shapes of labels, mask and positions against ``place``: rows and tokens."""
    _check_tokens(*place)
    beside = f"beside {place[0]} rows of {place[1]} tokens"
    for name in ("labels", "shift_labels") if labelled else ():
        value = batch.get(name)
        if value is not None and value.shape != place:
            raise ConfigError(
                f"{name} are {list(value.shape)} {beside}: every token has a label, -100 where it does not count"
            )
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if isinstance(mask, Tensor) and mask.shape != place and (mask.ndim == 2 or (causal and mask.ndim != 4)):
        raise ConfigError(
            f"attention_mask is {list(mask.shape)} {beside}: give [rows, tokens], or [rows, heads, tokens, tokens]"
        )
    if positions is None or not causal:
        return
    if positions.ndim < 2 or positions.shape[-1] != place[1] or positions.shape[-2] not in (1, place[0]):
        raise ConfigError(f"position_ids is {list(positions.shape)} {beside}: give [rows, tokens]")
