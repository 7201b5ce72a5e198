"""Split a batch into the microbatches of a pipelined step, and make decoder inputs for stages without labels."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.transformers.classes import class_name, takes_argument
from ..._compat.transformers.computing import encoder_outputs
from ...errors import ConfigError
from ...plan import Plan
from ...plan.sequence_split import tokens_of
from ...train.runtime.batches import Microbatch
from .orders import order, order_of
from .timeline import Order, fullest_live, peak_live

Batch = Mapping[str, Any]

_PER_STAGE = 4  # default number of microbatches per stage: the bubble, (p - 1) / 4p, is then less than a quarter
_GIVEN = ("decoder_input_ids", "decoder_inputs_embeds")


def share_out(
    given: Sequence[Batch],
    wanted: int | None,
    pp_size: int,
    accepts: Callable[[int], bool],
    towers: bool = False,
) -> list[dict[str, Any]]:
    """Split the batches ``given`` to a training step into its microbatches.

    If several batches are given and the schedule accepts their number, each batch is one microbatch. Otherwise each
    batch is split along its first dim into equal microbatches. Tensors with as many rows as ``input_ids`` are split;
    all other values go to every microbatch.

    Args:
        given: the batches.
        wanted: number of microbatches into which each batch is split; batches are not split if it is their number.
            ``None``: the largest number that rows and schedule allow, up to four microbatches per stage.
        pp_size: number of pipeline ranks.
        accepts: returns whether the schedule can run a number of microbatches.
        towers: whether the model has vision or audio towers, whose inputs cannot be split by row.

    Raises:
        ConfigError: the rows cannot be split evenly, or a batch that must be split has images or sounds.
    """
    count = len(given)
    if wanted == count or (wanted is None and count > 1 and accepts(count)):
        return [dict(batch) for batch in given]
    rows = [rows_of(batch) for batch in given]
    fitting = [
        parts
        for parts in range(1, min(rows) + 1)
        if gcd(*rows) % parts == 0 and accepts(parts * count)
    ]
    few = [parts for parts in fitting if parts * count <= _PER_STAGE * pp_size]
    parts = max(few, default=min(fitting, default=0)) if wanted is None else wanted
    if parts not in fitting:
        raise ConfigError(_unfit(count, wanted, rows, fitting, accepts))
    if towers and parts > 1:
        _refuse_pictures(given, parts * count)
    return [
        part for batch, size in zip(given, rows, strict=True) for part in _cut(batch, size, parts)
    ]


def _refuse_pictures(given: Sequence[Batch], parts: int) -> None:
    if any(is_of_towers(value) for batch in given for value in batch.values()):
        raise ConfigError(
            f"the schedule splits {len(given)} batches into {parts} microbatches, but images cannot be split together "
            f"with the rows to which they belong: pass train_step a list of {parts} microbatches, each with the "
            "images of its texts"
        )


def is_of_towers(value: Any) -> bool:
    """Return whether an input is read only by a model's vision or audio towers.

    This is assumed of every floating point tensor, because images and sounds are such tensors and token ids are not.
    """
    return isinstance(value, Tensor) and value.is_floating_point()


def hidden_shape(batch: Microbatch) -> tuple[int, int]:
    """Return the batch size and the number of tokens of this rank's hidden states, before they are sharded by sequence
    parallelism.
    """
    samples, tokens = tokens_of(batch)
    return samples, tokens if batch.tokens is None else batch.tokens


def rows_of(batch: Batch) -> int:
    """Return the number of samples in one batch."""
    return tokens_of(batch)[0]


def _cut(
    batch: Batch,
    rows: int,
    parts: int,
) -> list[dict[str, Any]]:
    size = rows // parts
    return [
        {name: _part(name, value, rows, index * size, size) for name, value in batch.items()}
        for index in range(parts)
    ]


def _part(
    name: str,
    value: Any,
    rows: int,
    start: int,
    size: int,
) -> Any:
    if not isinstance(value, Tensor) or value.ndim == 0 or size == rows:
        return value
    if value.shape[0] == rows:
        return value.narrow(0, start, size)
    if value.shape[0] == 1:  # the same for every sample
        return value
    raise ConfigError(
        f"{name} of shape {tuple(value.shape)} cannot be split into microbatches like the batch's {rows} rows: pass "
        "train_step a list of microbatches"
    )


def _unfit(
    count: int,
    wanted: int | None,
    rows: list[int],
    fitting: list[int],
    accepts: Callable[[int], bool],
) -> str:
    what = (
        f"a batch of {rows[0]} rows"
        if count == 1
        else f"a list of {count} batches of {sorted(set(rows))} rows"
    )
    asked = (
        f"num_microbatches={wanted} does not divide {what}"
        if wanted
        else f"{what} does not fit the schedule"
    )
    if fitting:
        return f"{asked} into microbatches that the schedule accepts: use num_microbatches {_listed(fitting)}"
    lengths = [number for number in range(1, 65) if accepts(number)]
    return (
        f"{asked}, and no other number works: pass batches with more rows, or a list of microbatches whose length "
        f"is one of {_listed(lengths)}"
    )


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:12]))
    return shown + (" ..." if len(numbers) > 12 else "")


class _Seen(Exception):
    """Signal that an encoder-decoder's decoder was called, to end the forward pass: the call's input is all that is
    needed.
    """


def targets_of(batch: Batch) -> tuple[int, int]:
    """Return the numbers of samples and of tokens per sample of the decoder's input.

    If the batch has no decoder input, return the numbers of the encoder's input.
    """
    return tokens_of(batch, first=_GIVEN)


def with_targets(model: nn.Module, decoder: nn.Module, batch: Batch) -> Batch:
    """Return the batch with the decoder's input, which the model's code makes from the labels.

    Raises:
        ConfigError: the model does not call its decoder with tokens made from labels.
    """
    labels = batch.get("labels")
    if (
        any(batch.get(name) is not None for name in _GIVEN)
        or not isinstance(labels, Tensor)
        or labels.ndim < 2
    ):
        return batch
    seen: list[Any] = []

    def note(
        _: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        seen.append(args[0] if args else kwargs.get("input_ids"))
        raise _Seen

    handle = decoder.register_forward_pre_hook(note, with_kwargs=True, prepend=True)
    try:
        # Call the class's forward method, because the instance's method runs a stage; the model's hooks do not run.
        with torch.no_grad():
            made = encoder_outputs(torch.zeros(*tokens_of(batch), 1, device=labels.device))
            # Classifiers make the decoder's input from the encoder's tokens.
            inputs = {name: batch[name] for name in ("input_ids",) if name in batch}
            if takes_argument(model, "use_cache"):
                inputs["use_cache"] = False
            type(model).forward(model, **inputs, labels=labels, encoder_outputs=made)
    except _Seen:
        pass
    finally:
        handle.remove()
    if not seen or not isinstance(seen[0], Tensor):
        raise ConfigError(
            f"{class_name(model)} does not make decoder inputs from labels by itself, and only the last stage has "
            "labels: pass decoder_input_ids"
        )
    return {**batch, "decoder_input_ids": seen[0]}


def most_in_flight(plan: Plan, num_microbatches: int | None) -> tuple[int, ...]:
    """Return, per stage, the largest number of microbatches that it holds at once; empty without pipeline stages."""
    return () if plan.stages is None else peak_live(_order(plan, num_microbatches))


def in_flight_together(plan: Plan, num_microbatches: int | None) -> tuple[int, ...]:
    """Return, per stage, the microbatches that it holds at the time when all stages of its rank have the most in flight
    in total.

    A single stage may hold more microbatches at another time.
    """
    if plan.stages is None:
        return ()
    return fullest_live(
        _order(plan, num_microbatches),
        [max(1, len(stage.layers)) for stage in plan.stages.stages],
    )


@cache
def in_flight_of_ranks(
    schedule: str, pp_size: int, num_microbatches: int, virtual_stages: int
) -> tuple[int, ...]:
    """Return, per rank, the largest number of microbatches that are in flight at once on all of its stages, which are
    assumed to be of equal size.

    At most ``2 pp_size`` microbatches of a step are simulated, because more do not change the result.
    """
    played = order(schedule, pp_size, min(num_microbatches, 2 * pp_size), virtual_stages)
    live = fullest_live(played, [1] * (pp_size * virtual_stages))
    return tuple(
        sum(live[stage] for stage in {action.stage for action in actions}) for actions in played
    )


def _order(plan: Plan, num_microbatches: int | None) -> Order:
    layout = plan.layout
    count = num_microbatches or layout.num_microbatches or layout.pp
    # Without a flush, microbatches of earlier steps are still in flight.
    return order_of(layout, count, 1 if layout.flushes else layout.pp)
