"""The one file of this room that touches private names of ``torch.distributed.pipelining``.

Checked with torch 2.13: ``pipeline_order`` of the schedule classes, the fields of ``schedules._Action``, that the
classes build their order from the counts of a stage alone, without processes, and
``_PipelineScheduleRuntime._prepare_schedule_with_comms``, which adds the sends and receives to an order by
``_add_send_recv``, and ``_step_microbatches``, which runs it.
"""

import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_send_recv,
    _ComputationType,
    _PipelineScheduleRuntime,
    get_schedule_class,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

from ...errors import ConfigError
from .timeline import Action, Kind, Order

_LOG = logging.getLogger("torch.distributed.pipelining.schedules")
LETTERS: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
_CLASSES = {
    "interleaved1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


def engine_order(schedule: str, pp_size: int, num_microbatches: int, virtual_stages: int) -> Order:
    """The order that torch's class for ``schedule`` runs in; waits (``None``) are left out.

    Raises:
        ValueError: the class refuses these numbers.
    """
    build: Any = get_schedule_class(_CLASSES[schedule])
    count = pp_size * virtual_stages
    stages = [
        SimpleNamespace(
            stage_index=index * pp_size,
            num_stages=count,
            group_size=pp_size,
            group_rank=0,
            is_first=index == 0,
            is_last=index * pp_size == count - 1,
            submod=torch.nn.Identity(),
        )
        for index in range(virtual_stages)
    ]
    lists: dict[int, list[Any]] = build(stages, num_microbatches).pipeline_order
    return tuple(tuple(action for found in lists[rank] for action in _translate(found)) for rank in range(pp_size))


class _Runtime(_PipelineScheduleRuntime):
    """Torch's engine, also for stages that need no preparation."""

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        if any(isinstance(stage, _PipelineStageBase) for stage in self._stages):
            super()._initialize_stages(*args, **kwargs)


def engine_runtime(
    order: Order,
    stages: Sequence[Any],
    num_microbatches: int,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    **options: Any,
) -> _PipelineScheduleRuntime:
    """Torch's engine, made to run ``order``; its ``step`` is that of every schedule class.

    Args:
        order: per rank, its actions; without updates, which are not the engine's.
        stages: this rank's stages, in order: ``PipelineStage`` objects, or what has their methods and needs no shapes
            in advance (:class:`hfscale.parallel.pipeline.worker.StageWorker`).
        num_microbatches: microbatches of one step.
        loss_fn: of the last stage's result and the target.
        options: passed on: ``scale_grads``, ``args_chunk_spec``, ``kwargs_chunk_spec``, ``output_merge_spec`` ...
    """
    runtime = _Runtime(list(stages), num_microbatches, loss_fn=loss_fn, **options)
    runtime.pipeline_order = {rank: _lower(actions) for rank, actions in enumerate(order)}
    if any(action.kind != "forward" for actions in order for action in actions):
        runtime._prepare_schedule_with_comms(runtime.pipeline_order)
        return runtime
    # An evaluation. The engine insists on backward passes, but not the part of it that adds sends and receives.
    runtime.stage_index_to_group_rank, runtime.pipeline_order_with_comms = _with_transfers(order)
    return runtime


def transfers_between(order: Order) -> list[list[tuple[str, int, int]]]:
    """Per rank, what the engine carries out: (kind, stage, microbatch) of the actions, and of the transfers that it
    puts between them: ``SEND_F``, ``RECV_F``, ``SEND_B``, ``RECV_B``.
    """
    names = {_ComputationType(letter).name: kind for letter, kind in LETTERS.items()}
    _, rows = _with_transfers(order)
    flat = [[part for action in rows[rank] for part in action.sub_actions or (action,)] for rank in range(len(order))]
    return [
        [(names.get(a.computation_type.name, a.computation_type.name), a.stage_index, a.microbatch_index) for a in row]
        for row in flat
    ]


def _with_transfers(order: Order) -> tuple[dict[int, int], dict[int, list[Any]]]:
    """The rank of every stage, and per rank the actions with sends and receives between them."""
    places = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    listed = {rank: [action for action in _lower(actions) if action] for rank, actions in enumerate(order)}
    return places, _add_send_recv(listed, places.__getitem__, len(places))


def check_runs(order: Order, name: str) -> None:
    """Refuse an order of one's own that the engine cannot carry out.

    Raises:
        ConfigError: it has updates of the weights, or no order of sends and receives fits it.
    """
    if any(action.kind == "update" for actions in order for action in actions):
        raise ConfigError(f"{name} has updates (U) inside a step, which are for drawing: the optimizer runs after it")
    try:
        _with_transfers(order)
    except AssertionError as error:
        raise ConfigError(
            f"{name} cannot be run: a pair, as in (0F1;1B0)OVERLAP_F_B, begins when both of its parts can, and one of "
            "them waits for the other, or for something behind it: take them apart"
        ) from error


def run_engine(runtime: _PipelineScheduleRuntime, num_microbatches: int) -> None:
    """Run one step whose stages find their inputs by themselves."""
    level = _LOG.level
    _LOG.setLevel(logging.CRITICAL)  # at an error in a stage it would print the whole schedule above the traceback
    try:
        runtime._step_microbatches([()] * num_microbatches, [{}] * num_microbatches, return_outputs=False)
    finally:
        _LOG.setLevel(level)


def _lower(actions: tuple[Action, ...]) -> list[_Action | None]:
    letters = {kind: letter for letter, kind in LETTERS.items()}
    lowered: list[_Action | None] = []
    piece: list[_Action] = []
    for action in actions:
        piece.append(_Action(action.stage, _ComputationType(letters[action.kind]), action.microbatch))
        if not action.paired:
            pair = _Action(-1, _ComputationType.OVERLAP_F_B, None, tuple(piece))
            lowered.append(pair if len(piece) > 1 else piece[0])
            piece = []
    return lowered


def _translate(found: Any) -> list[Action]:
    if found is None:
        return []
    if found.sub_actions:
        parts = [action for part in found.sub_actions for action in _translate(part)]
        return [action._replace(paired=index < len(parts) - 1) for index, action in enumerate(parts)]
    return [Action(found.stage_index, LETTERS[found.computation_type.value], found.microbatch_index)]
