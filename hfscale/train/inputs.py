"""Prepare a step: check its microbatches, compare them between the ranks that must get the same batch, count the
labels, and copy microbatches to the device.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from numpy import ndarray
from torch import Tensor, nn

from .._compat.transformers.classes import class_name
from .._compat.transformers.packed_rows import uses_flash_attention
from ..errors import ConfigError
from ..plan.feature_plans import ROUTES
from .guards.part import before_step, check_model
from .packed_rows.facts import (
    LENGTHS,
    refuse_lengths_alone,
    tell_of_numbers,
    with_document_lengths,
)
from .packed_rows.guard import check_packed_rows
from .runtime import Batch, Part, Runtime, StepLoss
from .runtime.batches import (
    Counts,
    Microbatch,
    agree,
    look_at,
    tell_of_no_labels,
    to_device,
    total_of,
)

# Indices into embedding tables.
_INDICES = (
    "input_ids",
    "decoder_input_ids",
    "position_ids",
    "token_type_ids",
)
_TENSORS = (*_INDICES, "inputs_embeds", "labels", "shift_labels", ROUTES)
_WHOLE = (torch.int64, torch.int32)
_FILLERS = {"labels": -100, "shift_labels": -100, ROUTES: -1}  # padding values other than 0
_NEAR = 0.93  # similarity from which an unknown name counts as misspelled


def microbatches_of(batch: Batch | Sequence[Batch], routes: Any = None) -> list[dict[str, Any]]:
    """Return the ``batch`` of a step, a mapping or a list of mappings, as a list of dictionaries. If ``routes`` (the
    experts that each token is sent to, one tensor per batch) are given, add them to the dictionaries.
    """
    listed: Any = [batch] if isinstance(batch, Mapping) else batch
    batches = (
        list(listed)
        if hasattr(listed, "__iter__") and not isinstance(listed, str | Tensor)
        else [listed]
    )
    for each in batches:
        if not isinstance(each, Mapping):
            raise ConfigError(
                "a step takes a batch (a mapping of tensors, by the names of the model's arguments) or a list of such "
                f"microbatches, but found a {type(each).__name__}"
            )
    if not batches:
        raise ConfigError("a step got an empty list of microbatches: pass at least one")
    if routes is None:
        return list(map(dict, batches))
    given = [routes] if isinstance(routes, Tensor) else list(routes)
    if len(given) != len(batches):
        raise ConfigError(
            f"routes= must have one tensor, the experts of its tokens, for each batch, got {len(given)} tensors for "
            f"{len(batches)} batches: pass one tensor for each batch"
        )
    return [
        {
            **each,
            ROUTES: experts,
        }
        for each, experts in zip(batches, given, strict=True)
    ]


def check_microbatch(runtime: Runtime, batch: Mapping[str, Any], loss: StepLoss) -> None:
    """Check the arguments in a microbatch: their names, types, dtypes and shapes. Raise :class:`ConfigError`, which
    names the argument, if the model or the step's loss does not accept it.
    """
    names, takes_more = runtime.forward_arguments
    if unknown := batch.keys() - names - {ROUTES}:
        _check_names(unknown, names, takes_more or not loss.needs_labels)
    if loss.needs_labels and batch.get("labels") is None:
        raise ConfigError(
            f"a step needs 'labels' in every batch, but found only {', '.join(batch)}: add labels, or pass a loss_fn"
        )
    if batch.get(ROUTES) is not None and not runtime.plan.mixtures:
        raise ConfigError(
            f"{class_name(runtime.model)} has no mixture of experts, so routes= (the experts of each token) cannot be "
            "used: leave routes out"
        )
    for name, value in batch.items():
        _check_value(name, value, runtime.mesh.device)
    if batch.get("logits_to_keep"):
        raise ConfigError(
            "logits_to_keep leaves positions without logits, but the loss covers all positions: leave logits_to_keep "
            "out"
        )
    if LENGTHS[0] in batch:
        refuse_lengths_alone(batch)
    labels = (
        ("labels", "shift_labels") if loss.ignores else ()
    )  # labels of other losses may be regression targets
    for name in (*_INDICES, *labels, ROUTES):
        value = batch.get(name)
        if value is not None and value.dtype not in _WHOLE:
            raise ConfigError(
                f"{name} must be whole numbers of type int64, got {value.dtype}: use {name}.long()"
            )
    if "input_ids" in names:
        _check_shapes(runtime, batch, loss)


def _check_names(unknown: Iterable[Any], names: frozenset[str], takes_more: bool) -> None:
    """Refuse arguments that the model's forward pass does not list, if it takes no more or if they are misspelled."""
    for name in unknown:
        if not isinstance(name, str):
            raise ConfigError(
                f"the keys of a batch must be names of the model's arguments, got {name!r}: use a collator of "
                "transformers, which makes them"
            )
        close = difflib.get_close_matches(name, names, 1, _NEAR)
        if close or not takes_more:
            known = f"its arguments are {', '.join(sorted(names - {'self'}))}"
            meant = f"did you mean {close[0]!r}?" if close else known
            raise ConfigError(f"the model takes no {name!r}: {meant}")


def _check_value(name: str, value: Any, device: torch.device) -> None:
    if isinstance(value, list | ndarray):
        raise ConfigError(
            f"{name} is a {type(value).__name__}: give tensors, [rows, tokens], made by a collator of "
            "transformers (DataCollatorForLanguageModeling, default_data_collator) or by torch.tensor(...)"
        )
    if isinstance(value, str | bytes) or (
        name in _TENSORS and not isinstance(value, Tensor | None)
    ):
        raise ConfigError(
            f"{name} must be a tensor, got {value!r}: tokenize texts, and make tensors of numbers"
        )
    if not isinstance(value, Tensor):
        return
    empty = value.is_meta and device.type != "meta"
    if empty or value.layout != torch.strided or value.is_complex():
        kind = "on the meta device" if empty else f"of layout {value.layout} and type {value.dtype}"
        raise ConfigError(
            f"{name} must be a dense tensor of real numbers, got one {kind}: make it with torch.tensor(...)"
        )
    if name == "inputs_embeds" and not value.is_floating_point():
        raise ConfigError(
            f"inputs_embeds must be vectors of a floating-point dtype, got {value.dtype}: use .float()"
        )


def _check_shapes(runtime: Runtime, batch: Mapping[str, Any], loss: StepLoss) -> None:
    """Raise :class:`ConfigError` unless labels, mask and positions in a microbatch have the same numbers of rows and
    tokens as its token ids or embeddings.
    """
    causal = runtime.loss is not None and runtime.loss.shift > 0
    ids = batch.get("input_ids")
    embeds = batch.get("inputs_embeds")
    if causal and (ids is None) == (embeds is None):
        raise ConfigError(
            f"a batch needs exactly one of input_ids and inputs_embeds, got {', '.join(batch)}: pass only one of the "
            "two"
        )
    if ids is not None and (ids.ndim < 2 or (causal and ids.ndim > 2)):
        raise ConfigError(
            f"input_ids must have the shape [rows, tokens], got {list(ids.shape)}: for one row, pass "
            "input_ids.unsqueeze(0), and labels of the same shape"
        )
    if embeds is not None and causal:
        _check_embeds(runtime, embeds)
    tokens = embeds if ids is None else ids
    if tokens is not None and tokens.ndim >= 2 and (ids is None or ids.ndim == 2):
        _check_beside(batch, tuple(tokens.shape[:2]), causal, loss.shift > 0)


def _check_embeds(runtime: Runtime, embeds: Tensor) -> None:
    table = runtime.plan.lookup_shape
    if table is not None and (embeds.ndim, embeds.shape[-1]) != (3, table[1]):
        raise ConfigError(
            f"inputs_embeds must have the shape [rows, tokens, hidden size], got {list(embeds.shape)}: give [rows, "
            f"tokens, {table[1]}]"
        )


def _check_beside(
    batch: Mapping[str, Any], place: tuple[int, int], causal: bool, labelled: bool
) -> None:
    """Raise :class:`ConfigError` unless labels, mask and positions in a microbatch have the shape ``place``, which is
    (rows, tokens). Labels are checked if ``labelled``, positions if ``causal`` (the model is a causal language model).
    """
    rows, tokens = place
    if tokens == 0 < rows:
        raise ConfigError(f"a batch of {rows} rows has no tokens: pass rows of at least one token")
    beside = f"for {rows} rows of {tokens} tokens"
    for name in ("labels", "shift_labels") if labelled else ():
        value = batch.get(name)
        if value is not None and value.shape != place:
            raise ConfigError(
                f"{name} must have the shape [rows, tokens], got {list(value.shape)} {beside}: give every token a "
                "label, -100 where it does not count"
            )
    mask = batch.get("attention_mask")
    positions = batch.get("position_ids")
    if (
        isinstance(mask, Tensor)
        and mask.shape != place
        and (mask.ndim == 2 or (causal and mask.ndim != 4))
    ):
        raise ConfigError(
            "attention_mask must have the shape [rows, tokens] or [rows, heads, tokens, tokens], got "
            f"{list(mask.shape)} {beside}: give a mask of one of these shapes"
        )
    if positions is None or not causal:
        return
    if (
        positions.ndim < 2
        or positions.shape[-1] != place[1]
        or positions.shape[-2] not in (1, place[0])
    ):
        raise ConfigError(
            f"position_ids must have the shape [rows, tokens], got {list(positions.shape)} {beside}: give every token "
            "a position"
        )


def prepare(
    runtime: Runtime,
    batch: Batch | Sequence[Batch],
    train: bool,
    loss: StepLoss | None = None,
    routes: Any = None,
) -> tuple[list[Microbatch], Tensor]:
    """Return the microbatches of a step on this rank's device, and the number of labels in the whole step, over all
    ranks, that count for ``loss`` (by default the model's loss); at least 1.

    ``train`` is whether it is a training step; ``routes`` holds the experts that tokens are sent to, if they are given.

    Raises:
        ConfigError: on every rank, if a check of the batch fails on any rank, or if the model cannot run this step.
    """
    mesh = runtime.mesh
    counts = Counts()
    refused = None
    microbatches = list[Microbatch]()
    runtime.data.release()  # the checks read FSDP2's shards, not gathered parameters
    with runtime.contents.fixed():
        before_step(runtime) if train else check_model(runtime)
        loss = loss or runtime.loss
        if loss is None:
            raise _no_loss(runtime.model)
        try:
            given, rows = _agreed(runtime, loss, batch, train, routes)
            counts = Counts(*map(sum, zip(*rows, strict=True)))
            if counts.outside:
                _refuse_outside(runtime, counts.outside)
            for microbatch, row in zip(given, rows, strict=True):
                microbatch.learn(row)
            if counts.packed:
                check_packed_rows(runtime.model, [each for each in given if each.holds_several])
            microbatches = list(map(runtime.context.shard_batch, given))
        except ConfigError as error:
            if mesh.data_world == 1:
                raise
            refused = error  # ranks with other batches must not wait for this one
    total = counts.valid
    if mesh.data_world > 1:
        own = total if mesh.speaks_for_batch else 0  # of ranks that share a batch, one counts
        passes = runtime.executor.passes_together(len(microbatches))
        total = total_of(own, refused, mesh.control, passes)
    if counts.numbered or total == 0:
        _warn_of_mistakes(runtime, loss, counts, total)
    microbatches = _as_the_model_takes(runtime, microbatches, packed=counts.packed > 0)
    return microbatches, torch.full(
        (),
        max(total, 1),
        dtype=torch.int64,
        device=mesh.device,
    )


def _warn_of_mistakes(runtime: Runtime, loss: StepLoss, counts: Counts, total: int) -> None:
    """Warn, on one rank, of probable mistakes in a batch that stock code accepts silently."""
    if counts.numbered and runtime.mesh.speaks_for_batch:
        tell_of_numbers()
    counts_labels = loss.needs_labels and loss.ignores
    if counts_labels and total == 0 and runtime.mesh.rank == 0:
        tell_of_no_labels()


def _as_the_model_takes(
    runtime: Runtime, microbatches: list[Microbatch], packed: bool
) -> list[Microbatch]:
    """Copy the microbatches to the device, and add the arguments that the model needs: boundaries of packed documents
    for flash attention, and ``use_cache=False``.
    """
    if packed and uses_flash_attention(runtime.model):
        microbatches = [
            each.like(with_document_lengths(each, runtime.model)) if each.by_positions else each
            for each in microbatches
        ]
    to_device(microbatches, runtime.mesh.device)
    if "use_cache" in runtime.forward_arguments[0]:
        for microbatch in microbatches:
            # A cache of keys and values is needed only for generation.
            microbatch.setdefault("use_cache", False)
    return microbatches


def _agreed(
    runtime: Runtime, loss: StepLoss, batch: Batch | Sequence[Batch], train: bool, routes: Any
) -> tuple[list[Microbatch], list[Counts]]:
    """Check the microbatches of a step, and compare them with the ranks that must get the same batch. Return the
    microbatches, and the counts (labels and others) of each.
    """
    executor = runtime.executor
    # Not with microbatches in flight: then stages are in different steps.
    compares = not (train and executor.under_way)
    sharing = runtime.mesh.sharing if compares else None
    reports = executor.reports if compares else None
    given = list[Microbatch]()
    seen = None
    refused = None
    told: tuple[list[int], list[Tensor]] = [], []
    try:
        given = _microbatches(runtime, microbatches_of(batch, routes), loss)
        told = told if reports is None else reports.numbers_to_compare(train)
        seen = look_at(
            given, loss.count_labels, hashed=sharing is not None, tokens=_vocabulary(runtime, given)
        )
    except ConfigError as error:  # the other ranks must not wait for this rank
        refused = error
        told = told if reports is None else reports.numbers_to_compare(False)
    rows, ranks = agree(given, seen, train, sharing, *told)
    if refused is not None:
        raise refused
    if reports is not None:
        reports.compare_numbers(ranks)
    return given, rows


def _no_loss(model: nn.Module) -> ConfigError:
    return ConfigError(
        f"train_step normalizes a causal language model's loss, but {class_name(model)} has another loss (loss_type "
        f"{getattr(model, 'loss_type', None)!r}): pass train_step a loss_fn, or loop over loss = model(**batch).loss "
        "and loss.backward() instead"
    )


def _vocabulary(runtime: Runtime, batches: Sequence[Batch]) -> int | None:
    """Return the size of the vocabulary if a step must check that input ids are in it (a sharded embedding would not
    fail for other ids); ``None`` if the check is not needed.
    """
    shape = runtime.plan.lookup_shape
    if shape is None:
        return None
    if runtime.plan.embedding is None:  # a stock embedding fails by itself
        ids = [batch.get("input_ids") for batch in batches]
        on_host = all(each is None or each.device.type == "cpu" for each in ids)
        if not on_host or runtime.mesh.control is None:
            return None
    return shape[0] + (0 if runtime.prompt is None else runtime.prompt.tokens)


def _refuse_outside(runtime: Runtime, outside: int) -> None:
    head = runtime.plan.by_name.get(f"{runtime.plan.head}.weight")
    known = (runtime.plan.lookup_shape or (0,))[0] if head is None else head.shape[0]
    raise ConfigError(
        f"{outside} labels or input tokens are outside of the vocabulary of {known} tokens: mask labels with -100, "
        "and resize the embeddings for a tokenizer with more tokens before the model is parallelized"
    )


def _microbatches(runtime: Runtime, given: Sequence[Batch], loss: StepLoss) -> list[Microbatch]:
    """Check the batches that a step was given, and return the microbatches that go through the model, into which a
    pipeline may split the batches.
    """
    filled = list[Batch]()
    for microbatch in given:
        check_microbatch(runtime, microbatch, loss)
        filled.append(microbatch if has_rows(microbatch) else _rows_of_padding(runtime, microbatch))
    asks = "" if loss.needs_labels else "loss_fn"
    if runtime.model.training and torch.is_grad_enabled():
        asks = runtime.observer.needs_rows or asks
    if asks and any(new is not old for new, old in zip(filled, given, strict=True)):
        raise ConfigError(
            f"a batch must have at least one row on every rank for {asks}, got none on this rank: pass at least one "
            "row"
        )
    if runtime.prompt is not None:
        filled = list(map(runtime.prompt.in_front, filled))
    shared = list(map(Microbatch, runtime.executor.share_out(filled)))
    for microbatch in shared:
        microbatch.parts = len(shared) // len(given)
    for part in runtime.parts_with(Part.check_step):
        part.check_step(runtime, shared, user_loss=not loss.needs_labels)
    return shared


def has_rows(batch: Mapping[str, Any]) -> bool:
    """Return whether a batch has rows; assume it of a batch of neither token ids nor embeddings."""
    tokens = batch.get("input_ids")
    tokens = batch.get("inputs_embeds") if tokens is None else tokens
    return not isinstance(tokens, Tensor) or tokens.ndim < 2 or tokens.shape[0] > 0


def _rows_of_padding(runtime: Runtime, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return rows of padding with ignored labels in place of a ``batch`` that has no rows, because a rank without rows
    must still join all collectives.
    """
    tokens = batch["inputs_embeds" if batch.get("input_ids") is None else "input_ids"]
    rows = runtime.executor.fewest_rows()
    length = max(2, tokens.shape[1])
    filled = {name: _padding_rows(name, value, rows, length) for name, value in batch.items()}
    # Expert balance ignores masked tokens, so mask all of them; other models should attend to some token.
    mask = torch.full(
        (rows, length),
        int(not any(part.masks_padding for part in runtime.parts)),
        device=tokens.device,
    )
    given = batch.get("attention_mask")
    if given is None or given.ndim == 2:
        filled["attention_mask"] = mask if given is None else mask.to(given.dtype)
    return filled


def _padding_rows(name: str, value: Any, rows: int, length: int) -> Any:
    """Return the argument ``name`` of a batch that has no rows, filled with ``rows`` rows of padding of ``length``
    tokens; ``None`` for an argument that is not one of tokens, such as pictures. Other values are returned unchanged.
    """
    if not isinstance(value, Tensor) or value.ndim < 2:
        return value
    counts = name == "position_ids"  # [rows, tokens], or of several axes [3, rows, tokens]
    if value.shape[-2 if counts else 0] > 0:
        return value
    if counts:
        counted = torch.arange(length, dtype=value.dtype, device=value.device)
        return counted.expand(*value.shape[:-2], rows, length)
    if name == "attention_mask" and value.ndim == 4:  # [rows, heads, tokens, tokens]
        attends = int(not value.is_floating_point())  # floating-point masks are added to scores
        return value.new_full((rows, value.shape[1], length, length), attends)
    width = max(2, value.shape[1])
    if name not in _TENSORS and not name.endswith("mask") and width != length:
        return None
    return value.new_full((rows, width, *value.shape[2:]), _FILLERS.get(name, 0))
