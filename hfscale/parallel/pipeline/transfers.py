"""The program of each pipeline rank: its computations in order, and the sends and receives between them.

A computation is followed at once by the send of its result, and at that moment the receive is appended to the program
of the receiving rank. So both ranks have their transfers in the same order, and none waits for a send that comes after
its own receive.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ...errors import ConfigError
from .timeline import GRADIENT, Action, Order, play, stage_ranks

if TYPE_CHECKING:
    from .worker import StageWorker

Step = tuple[str, int, int]
"""What a rank does: a kind of action, or ``SEND_F``, ``RECV_F``, ``SEND_B``, ``RECV_B``; the stage; the microbatch."""


def rank_programs(order: Order, name: str = "this order") -> list[list[Step]]:
    """Return the program of every rank for its actions in ``order``: of an evaluation, the forward passes alone. Raise
    :class:`ConfigError` if ``order`` updates weights within a step, or a pair of actions can never begin.
    """
    if any(action.kind == "update" for actions in order for action in actions):
        raise ConfigError(
            f"{name} has updates (U) inside a step, which can only be drawn, not run: leave them out; the optimizer "
            "runs after it"
        )
    homes = stage_ranks(order)
    programs: list[list[Step]] = [[] for _ in order]
    done: list[set[Step]] = [set() for _ in order]

    def run(rank: int, piece: list[Action]) -> bool:
        if not all(_has_input(action, done[rank], len(homes)) for action in piece):
            return False
        for where, step in _steps(piece, homes):
            programs[where].append(step)
            done[where].add(step)
        return True

    if any(play(order, run)):
        raise ConfigError(
            f"{name} cannot be run: a pair, as in (0F1;1B0)OVERLAP_F_B, starts when both of its actions can, and "
            "one of them waits for the other or for a later action: split the pair"
        )
    return programs


def run_program(program: Sequence[Step], workers: Mapping[int, "StageWorker"]) -> None:
    """Run this rank's program on ``workers``, its stages by number, which hand tensors to each other as they are."""
    for kind, stage, microbatch in program:
        worker = workers[stage]
        if kind == "forward":
            output = worker.forward(microbatch)
            if stage + 1 in workers:
                workers[stage + 1].take_input(output, microbatch)
            del output  # else the last stage's graph would live until the next forward pass
        elif kind in GRADIENT:
            worker.backward(microbatch, full=kind == "backward")
            if stage - 1 in workers:
                workers[stage - 1].take_gradient(worker.hand_out_gradient(microbatch), microbatch)
        elif kind == "backward_weight":
            worker.backward_weight(microbatch)
        elif kind == "SEND_F":
            worker.send_output(microbatch)
        elif kind == "RECV_F":
            worker.receive_input(microbatch)
        elif kind == "SEND_B":
            worker.send_gradient(microbatch)
        else:
            worker.receive_gradient(microbatch)


def _has_input(action: Action, done: set[Step], stages: int) -> bool:
    """Return whether an action's input has been received, or computed on the same rank."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "forward" and stage > 0:
        return bool(done & {("RECV_F", stage, microbatch), ("forward", stage - 1, microbatch)})
    if action.kind in GRADIENT and stage < stages - 1:
        return bool(done & {("RECV_B", stage, microbatch), *((kind, stage + 1, microbatch) for kind in GRADIENT)})
    return True


def _steps(piece: Sequence[Action], homes: Mapping[int, int]) -> Iterator[tuple[int, Step]]:
    """Yield (rank, step): the actions of a piece, then the sends of their results and the receives of other ranks."""
    for action in piece:
        yield homes[action.stage], (action.kind, action.stage, action.microbatch)
    for action in piece:
        if action.kind != "backward_weight":
            further, letter = (1, "F") if action.kind == "forward" else (-1, "B")
            here, there = homes[action.stage], homes.get(action.stage + further)
            if there is not None and there != here:
                yield here, (f"SEND_{letter}", action.stage, action.microbatch)
                yield there, (f"RECV_{letter}", action.stage + further, action.microbatch)
