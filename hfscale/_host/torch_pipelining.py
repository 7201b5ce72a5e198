"""Names of ``torch.distributed.pipelining`` that it does not promise to keep: its engine, schedules, split backward.

Checked with torch 2.13: the fields of ``schedules._Action``,
``_PipelineScheduleRuntime._prepare_schedule_with_comms``, which adds the sends and receives to an order by
``_add_send_recv``, and ``_step_microbatches``, which runs it.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_send_recv,
    _ComputationType,
    _PipelineScheduleRuntime,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

__all__ = ["stage_backward_input", "stage_backward_weight"]

_LOG = logging.getLogger("torch.distributed.pipelining.schedules")

Computation: TypeAlias = tuple[int, str, int]
"""A stage, what it computes (``F``, ``B``, or ``I`` and ``W``, the halves of ``B``), and a microbatch."""

Piece: TypeAlias = tuple[Computation, ...]
"""One computation, or several that overlap."""

Rows: TypeAlias = Sequence[Sequence[Piece]]
"""Per rank, what it computes, in sequence."""


class Engine(_PipelineScheduleRuntime):
    """Torch's engine, also for stages that need no preparation; its ``step`` is that of every schedule class."""

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        if any(isinstance(stage, _PipelineStageBase) for stage in self._stages):
            super()._initialize_stages(*args, **kwargs)


def make_engine(
    rows: Rows,
    ranks: Mapping[int, int],
    stages: Sequence[Any],
    num_microbatches: int,
    loss_fn: Callable[..., torch.Tensor] | None,
    **options: Any,
) -> Engine:
    """Torch's engine, made to run ``rows``.

    Args:
        ranks: of every stage.
        stages: this rank's, in order: ``PipelineStage`` objects, or what has their methods.
        options: passed on: ``scale_grads``, ``args_chunk_spec``, ``kwargs_chunk_spec``, ``output_merge_spec`` ...
    """
    engine = Engine(list(stages), num_microbatches, loss_fn=loss_fn, **options)
    lowered = _lowered(rows)
    engine.pipeline_order = dict(lowered)
    if any(what != "F" for row in rows for piece in row for _, what, _ in piece):
        engine._prepare_schedule_with_comms(engine.pipeline_order)
        return engine
    # An evaluation. The engine insists on backward passes, but not the part of it that adds sends and receives.
    engine.stage_index_to_group_rank = dict(ranks)
    engine.pipeline_order_with_comms = _add_send_recv(lowered, ranks.__getitem__, len(ranks))
    return engine


def with_transfers(rows: Rows, ranks: Mapping[int, int]) -> list[list[Computation]]:
    """Per rank, what the engine carries out: computations, and the transfers that it puts between them (``SEND_F``,
    ``RECV_F``, ``SEND_B``, ``RECV_B``).

    Raises:
        AssertionError: no order of sends and receives fits ``rows``.
    """
    found = _add_send_recv(_lowered(rows), ranks.__getitem__, len(ranks))
    return [[part for action in found[rank] for part in _piece(action)] for rank in range(len(rows))]


def run_engine(engine: Engine, num_microbatches: int) -> None:
    """Run one step whose stages find their inputs by themselves."""
    level = _LOG.level
    _LOG.setLevel(logging.CRITICAL)  # at an error in a stage it would print the whole schedule above the traceback
    try:
        engine._step_microbatches([()] * num_microbatches, [{}] * num_microbatches, return_outputs=False)
    finally:
        _LOG.setLevel(level)


def _lowered(rows: Rows) -> dict[int, list[Any]]:
    return {rank: [_action(piece) for piece in row] for rank, row in enumerate(rows)}


def _action(piece: Piece) -> _Action:
    parts = tuple(_Action(stage, _ComputationType(what), microbatch) for stage, what, microbatch in piece)
    return parts[0] if len(parts) == 1 else _Action(-1, _ComputationType.OVERLAP_F_B, None, parts)


def _piece(action: Any) -> Piece:
    parts = action.sub_actions or (action,)
    return tuple((part.stage_index, part.computation_type.value, part.microbatch_index) for part in parts)
