"""Make the program of each pipeline rank: its computations in order, with the sends and receives between them.

The send of a result follows right after the computation. When a send is added to a rank's program, the matching receive
is added to the end of the receiving rank's program. Both ranks therefore have their transfers in the same order, and no
rank waits for a later send. The shape and dtype of the transferred hidden states are sent once between two stages
(:class:`ActivationTypes`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...distributed.mesh import Mesh
from ...distributed.ops.collectives import waiting
from ...errors import ConfigError
from .timeline import GRADIENT, Action, Order, Result, needs, play, stage_ranks

if TYPE_CHECKING:
    from .worker import StageWorker


_CALLS = {
    "backward_weight": "backward_weight",
    "SEND_F": "send_output",
    "RECV_F": "receive_input",
    "SEND_B": "send_gradient",
    "RECV_B": "receive_gradient",
}
_RESULTS = {
    "forward": (0, "activation"),
    "RECV_F": (-1, "activation"),
    "RECV_B": (1, "gradient"),
}
# The results that each kind of step adds to its rank, as (offset of the result's stage, result).
_RESULTS |= dict.fromkeys(GRADIENT, (0, "gradient"))
Step = tuple[str, int, int]
"""One step of a rank's program: what it does (a kind of action, or a send or receive of an activation or gradient), the
stage, and the microbatch.
"""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LENGTH = 6  # number of integers in an announcement: dtype, number of trailing dims, the dims
_Kind = tuple[tuple[int, ...], torch.dtype]


def rank_programs(order: Order, name: str = "this order") -> list[list[Step]]:
    """Return the program of each rank: its computations in the given order, with the sends and receives between them.

    Raises:
        ConfigError: the order has updates inside a step, or a pair that can never begin.
    """
    if any(action.kind == "update" for actions in order for action in actions):
        raise ConfigError(
            f"{name} has updates (U) inside a step, which can only be drawn, not run, because the optimizer runs after "
            "the step: leave the updates out"
        )
    homes = stage_ranks(order)
    programs: list[list[Step]] = [[] for _ in order]
    # the results that each rank has computed or received
    there: list[set[Result]] = [set() for _ in order]

    def run(rank: int, piece: list[Action]) -> bool:
        inputs = [(action, need) for action in piece for need in needs(action, len(homes) - 1)]
        if not {need for action, need in inputs if need[0] != action.stage} <= there[rank]:
            return False
        for where, (kind, stage, microbatch) in _steps(piece, homes):
            programs[where].append((kind, stage, microbatch))
            if kind in _RESULTS:
                further, what = _RESULTS[kind]
                there[where].add((stage + further, what, microbatch))
        return True

    if any(play(order, run)):
        raise ConfigError(
            f"{name} cannot be run: a pair, for example (0F1;1B0)OVERLAP_F_B, starts when both of its actions can "
            "start, but in this order one of them waits for the other or for a later action: split the pair"
        )
    return programs


def run_program(program: Sequence[Step], workers: Mapping[int, "StageWorker"]) -> None:
    """Run this rank's program on ``workers``, the rank's stages by number.

    Between two stages of the rank, tensors are passed on directly, without a transfer.
    """
    for kind, stage, microbatch in program:
        worker = workers[stage]
        if kind == "forward":
            output = worker.forward(microbatch)
            if stage + 1 in workers:
                workers[stage + 1].take_input(output, microbatch)
            # otherwise the last stage's graph would stay alive until the next forward pass
            del output
        elif kind in GRADIENT:
            worker.backward(microbatch, full=kind == "backward")
            if stage - 1 in workers:
                workers[stage - 1].take_gradient(worker, microbatch)
        else:
            getattr(worker, _CALLS[kind])(microbatch)


def _steps(piece: Sequence[Action], homes: Mapping[int, int]) -> Iterator[tuple[int, Step]]:
    """Yield (rank, step) for one action or for a pair of actions that begin together, then for the sends of their
    results and the matching receives.
    """
    for action in piece:
        yield homes[action.stage], (action.kind, action.stage, action.microbatch)
    for action in piece:
        if action.kind != "backward_weight":
            further, letter = (1, "F") if action.kind == "forward" else (-1, "B")
            here = homes[action.stage]
            there = homes.get(action.stage + further)
            if there is not None and there != here:
                yield here, (f"SEND_{letter}", action.stage, action.microbatch)
                yield there, (f"RECV_{letter}", action.stage + further, action.microbatch)


class ActivationTypes:
    """Hold the shape and dtype of the hidden states that each stage receives, without the dims for samples and tokens,
    for training and for evaluation.

    A stage sends them to the next stage over the control group, together with its first hidden states. The numbers of
    samples and tokens are known from the batch.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._control = mesh.control
        self._known: dict[tuple[int, bool], _Kind] = {}
        self._told: dict[tuple[int, bool], _Kind] = {}
        self._sending: list[tuple[Tensor, Any]] = []
        self._expected: _Kind | None = None

    def expect(self, trailing: tuple[int, ...], dtype: torch.dtype) -> None:
        """Assume these trailing dims and this dtype for all received hidden states, instead of receiving them from the
        sending stage.
        """
        self._expected = trailing, dtype

    def announce(
        self,
        stage: int,
        stream: Tensor,
        leading: tuple[int, ...],
        peer: int,
        training: bool,
    ) -> None:
        """Send the trailing dims and dtype of the hidden states ``stream`` to rank ``peer``, which holds ``stage``. Do
        so only once for training and once for evaluation.

        Raises:
            ConfigError: the dims or dtype differ from those sent before, or the first dims are not ``leading``
                (samples, tokens).
        """
        kind = tuple(stream.shape[len(leading) :]), stream.dtype
        if tuple(stream.shape[: len(leading)]) != leading or kind[1] not in _DTYPES:
            raise ConfigError(
                "the hidden states between stages must have the shape [samples, tokens, ...] and a floating-point "
                f"dtype, got {tuple(stream.shape)} and {stream.dtype} for {leading[0]} samples of {leading[1]} "
                "tokens: use pp_size=1"
            )
        told = self._told.setdefault((stage, training), kind)
        if told is not kind:
            if told != kind:
                raise ConfigError(
                    f"the trailing dims and dtype of the hidden states between stages must not change, got {told} in "
                    f"the first step and {kind} now: change precision only before the first step"
                )
            return
        header = torch.zeros(_LENGTH, dtype=torch.int64)
        header[0], header[1] = _DTYPES.index(kind[1]), len(kind[0])
        header[2 : 2 + len(kind[0])] = torch.tensor(kind[0], dtype=torch.int64)
        self._sending.append((header, dist.isend(header, peer, group=self._control)))

    def learn(self, stage: int, peer: int, training: bool) -> _Kind:
        """Return trailing dims and dtype of the input of ``stage``; the first call receives them from rank ``peer``."""
        if self._expected is not None:
            return self._expected
        if (stage, training) not in self._known:
            header = torch.empty(_LENGTH, dtype=torch.int64)
            with waiting("recv", peer, self._control):
                dist.recv(header, peer, group=self._control)
            index, dims, *tail = header.tolist()
            self._known[stage, training] = tuple(tail[:dims]), _DTYPES[index]
        return self._known[stage, training]

    def finish(self) -> None:
        """Wait until the shapes and dtypes sent to other stages have arrived."""
        for _, work in self._sending:
            work.wait()
        self._sending.clear()
