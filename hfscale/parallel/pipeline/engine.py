"""Orders of actions as torch's engine runs them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..._host.torch_pipelining import Engine, Piece, make_engine, with_transfers
from ...errors import ConfigError
from .timeline import Kind, Order

LETTERS: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


def engine_runtime(
    order: Order,
    stages: Sequence[Any],
    num_microbatches: int,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    **options: Any,
) -> Engine:
    """Torch's engine, made to run ``order``; its ``step`` is that of every schedule class.

    Args:
        order: per rank, its actions; without updates, which are not the engine's.
        stages: this rank's stages, in order: ``PipelineStage`` objects, or what has their methods and needs no shapes
            in advance (:class:`hfscale.parallel.pipeline.worker.StageWorker`).
        num_microbatches: microbatches of one step.
        loss_fn: of the last stage's result and the target.
        options: passed on: ``scale_grads``, ``args_chunk_spec``, ``kwargs_chunk_spec``, ``output_merge_spec`` ...
    """
    return make_engine(_rows(order), _ranks(order), stages, num_microbatches, loss_fn, **options)


def transfers_between(order: Order) -> list[list[tuple[str, int, int]]]:
    """Per rank, what the engine carries out: (kind, stage, microbatch) of the actions, and of the transfers that it
    puts between them: ``SEND_F``, ``RECV_F``, ``SEND_B``, ``RECV_B``.
    """
    rows = with_transfers(_rows(order), _ranks(order))
    return [[(LETTERS.get(what, what), stage, microbatch) for stage, what, microbatch in row] for row in rows]


def check_runs(order: Order, name: str) -> None:
    """Refuse an order of one's own that the engine cannot carry out.

    Raises:
        ConfigError: it has updates of the weights, or no order of sends and receives fits it.
    """
    if any(action.kind == "update" for actions in order for action in actions):
        raise ConfigError(f"{name} has updates (U) inside a step, which are for drawing: the optimizer runs after it")
    try:
        with_transfers(_rows(order), _ranks(order))
    except AssertionError as error:
        raise ConfigError(
            f"{name} cannot be run: a pair, as in (0F1;1B0)OVERLAP_F_B, begins when both of its parts can, and one of "
            "them waits for the other, or for something behind it: take them apart"
        ) from error


def _ranks(order: Order) -> dict[int, int]:
    """The rank of every stage."""
    return {action.stage: rank for rank, actions in enumerate(order) for action in actions}


def _rows(order: Order) -> list[list[Piece]]:
    letters = {kind: letter for letter, kind in LETTERS.items()}
    rows: list[list[Piece]] = []
    for actions in order:
        rows.append([])
        piece: Piece = ()
        for action in actions:
            piece += ((action.stage, letters[action.kind], action.microbatch),)
            if not action.paired:
                rows[-1].append(piece)
                piece = ()
    return rows
