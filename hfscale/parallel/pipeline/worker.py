"""Run one pipeline stage: its forward and backward passes on single microbatches, and its sends and receives.

:mod:`.transfers` decides the order; computing and sending are implemented here. torch's own pipeline stages and engine
are not used, for two reasons:

- microbatches of one step may differ in length, which torch's stage does not support;
- torch's engine keeps every sent tensor until the step is over, so a stage would keep the outputs of all microbatches
  alive, while the purpose of 1F1B is to keep only a few.

Each pair of ranks has a process group per direction, so that no transfer is queued after a transfer in the other
direction.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..._compat.torch import base_of
from ...distributed.ops.collectives import waiting
from .recorder import Recorder
from .split import Split, backward_of_input, backward_of_weights
from .timeline import Action, Kind

Compute = Callable[[Tensor | None, int], Tensor]
"""Type of the function that runs a stage's forward pass: (hidden states from the stage before, number of the
microbatch) -> hidden states for the next stage or, on the last stage, the loss.
"""
# Microbatch -> shape and dtype of the hidden states that arrive.
Shape = Callable[[int], tuple[torch.Size, torch.dtype]]


@dataclass(frozen=True)
class StagePlace:
    """Hold the index of a stage, and the ranks, groups and device with which it communicates."""

    index: int
    ranks: tuple[int, ...]  # the pipeline rank of every stage
    group: dist.ProcessGroup
    # (sender, receiver), as pipeline ranks -> the process group for transfers in this direction
    streams: Mapping[tuple[int, int], dist.ProcessGroup]
    device: torch.device


@dataclass
class _Kept:
    """Hold the tensors of one microbatch between its forward and its backward pass."""

    arrived: Tensor | None  # the stage's input; ``None`` on the first stage
    output: Tensor
    split: Split | None = None  # state for the second half of a split backward pass
    # the gradient of the output, if the second half runs the full backward pass
    gradient: Tensor | None = None


class _Transfer:
    """Hold a transfer and its tensor, which must stay alive until the transfer is complete."""

    def __init__(
        self,
        move: Any,
        tensor: Tensor,
        peer: int,
        group: dist.ProcessGroup,
    ) -> None:
        self.tensor = tensor
        self._group = group
        self._peer = peer
        self._call = "recv" if move is dist.irecv else "send"
        self._works = (
            dist.batch_isend_irecv([dist.P2POp(move, tensor, peer, group)])
            if tensor.numel()
            else []
        )

    def wait(self) -> Tensor:
        with waiting(self._call, self._peer, self._group):
            for work in self._works:
                work.wait()
        self._works = []
        return self.tensor


class StageWorker:
    """Run the passes of one pipeline stage over single microbatches, and its transfers."""

    def __init__(
        self,
        place: StagePlace,
        compute: Compute,
        shape: Shape,
        parameters: Callable[[], Iterable[Any]],
    ) -> None:
        self.place = place
        self._compute = compute
        self._shape = shape
        self._parameters = parameters
        # splits: whether the halves of a split backward pass run separately; otherwise the first half computes all
        # trains: whether a parameter of this stage or of an earlier stage trains
        # trains_before: whether a parameter of an earlier stage trains; this stage's input then has a gradient
        self.trains_before = self.trains = self.splits = True
        self.recomputes = False  # whether layers are recomputed in the backward pass
        self.recorder: Recorder | None = None
        # called after every second half of a backward pass, for which autograd's gradient hooks do not run
        self.accumulate: Callable[[], None] = lambda: None
        # called when a microbatch's backward pass is complete
        self.reduce: Callable[[], None] = lambda: None
        self._kept: dict[int, _Kept] = {}
        self._arriving: dict[int, _Transfer | Tensor] = {}
        self._gradients: dict[int, _Transfer | Tensor] = {}
        self.returning: dict[int, Tensor] = {}
        self._leaving: dict[int, _Transfer] = {}
        self._sent: list[_Transfer] = []
        self.index = place.index
        self.has_backward = True
        self.is_first = place.index == 0

    # --- computing ----------------------------------------------------------------------------------------------------

    def forward(self, microbatch: int) -> Tensor:
        """Run the forward pass; keep its output until the backward pass or, without one, until the output is sent."""
        arrived = None if self.is_first else _there(self._arriving.pop(microbatch))
        if arrived is not None and self.has_backward:
            # Reentrant recomputation computes no gradients for layers whose input requires none.
            arrived.requires_grad_(self.trains_before or (self.recomputes and self.trains))
        with self._recorded("forward", microbatch), torch.set_grad_enabled(self.has_backward):
            output = self._compute(arrived, microbatch)
            # torch detaches it in place, which a view does not allow
            if self.splits and base_of(output) is not None:
                output = output.clone()
        self._kept[microbatch] = _Kept(arrived, output)
        return output

    def backward(self, microbatch: int, full: bool = True) -> None:
        """Run the backward pass or, with ``full=False``, its first half, which computes the gradient of the input."""
        kept = self._kept.pop(microbatch) if full else self._kept[microbatch]
        gradient = None
        if microbatch in self._gradients:
            gradient = _there(self._gradients.pop(microbatch))
            # the gradient came back, so the sent output has arrived
            if microbatch in self._leaving:
                self._leaving.pop(microbatch).wait()
        wants = kept.arrived is not None and self.trains_before
        with self._recorded("backward" if full else "backward_input", microbatch):
            if not self.trains:
                pass  # output.requires_grad may be True: transformers sets it on embeddings for checkpointing
            elif full or not self.splits:
                _backward(kept.output, gradient)
            elif kept.arrived is None or not wants:
                kept.gradient = gradient  # no stage waits for the input's gradient: the second half computes all
            elif kept.output.requires_grad:
                kept.split = backward_of_input(
                    kept.output, gradient, kept.arrived, self._parameters()
                )
        if wants:
            assert kept.arrived is not None
            grad, kept.arrived.grad = kept.arrived.grad, None
            self.returning[microbatch] = torch.zeros_like(kept.arrived) if grad is None else grad
        if full:
            self.reduce()

    def backward_weight(self, microbatch: int) -> None:
        """Run the second half of a split backward pass, which computes the gradients of the weights."""
        kept = self._kept.pop(microbatch)
        with self._recorded("backward_weight", microbatch):
            if kept.split is not None:
                backward_of_weights(kept.split, self._parameters())
                self.accumulate()
            elif self.trains and self.splits and (kept.arrived is None or not self.trains_before):
                _backward(kept.output, kept.gradient)
        self.reduce()

    # --- sending and receiving ----------------------------------------------------------------------------------------

    def receive_input(self, microbatch: int) -> None:
        """Start receiving the hidden states from the stage before."""
        if not self.is_first:
            shape, dtype = self._shape(microbatch)
            buffer = torch.empty(shape, dtype=dtype, device=self.place.device)
            self._arriving[microbatch] = self._move(dist.irecv, buffer, -1)

    def send_output(self, microbatch: int) -> None:
        """Start sending the hidden states to the next stage."""
        output = self._kept[microbatch].output
        # without gradients that come back, wait here for all sends but the latest
        if not self.has_backward:
            del self._kept[microbatch]
            for index in list(self._leaving)[:-1]:
                self._leaving.pop(index).wait()
        self._leaving[microbatch] = self._move(dist.isend, output.detach(), +1)

    def receive_gradient(self, microbatch: int) -> None:
        """Start receiving the gradient of the hidden states from the next stage."""
        if self.trains:
            buffer = torch.empty_like(
                self._kept[microbatch].output, memory_format=torch.contiguous_format
            )
            self._gradients[microbatch] = self._move(dist.irecv, buffer, +1)

    def send_gradient(self, microbatch: int) -> None:
        """Start sending the gradient of the received hidden states to the stage before."""
        if self.trains_before and not self.is_first:
            # gloo reports the end of a send only to a caller that waits, so older sends are waited for here. The wait
            # ends: in an order each receive has the place of its send, and without a flush the stage before has
            # received the older gradients before it sent what this stage has just used.
            while len(self._sent) > 1:
                self._sent.pop(0).wait()
            self._sent.append(
                self._move(
                    dist.isend,
                    self.returning.pop(microbatch),
                    -1,
                )
            )

    def take_input(self, output: Tensor, microbatch: int) -> None:
        """Use the output of the previous stage, which is on the same rank, as this stage's input."""
        self._arriving[microbatch] = output.detach()

    def take_gradient(self, following: "StageWorker", microbatch: int) -> None:
        """Use the input gradient of the next stage, which is on the same rank, as the gradient of this stage's output.

        Do nothing if the next stage has no such gradient.
        """
        if microbatch in following.returning:
            self._gradients[microbatch] = following.returning.pop(microbatch)

    def finish(self) -> None:
        """Wait until all sent tensors have arrived."""
        for transfer in (*self._leaving.values(), *self._sent):
            transfer.wait()
        self._leaving.clear()
        self._sent.clear()

    def reset(self) -> None:
        """Drop the tensors and transfers of an interrupted step."""
        for held in (self._kept, self._arriving, self._gradients, self.returning, self._leaving):
            held.clear()
        self._sent.clear()

    def _move(self, move: Any, tensor: Tensor, step: int) -> _Transfer:
        """Start a send to, or a receive from, the stage ``step`` stages after this one (before, if negative)."""
        place = self.place
        here = place.ranks[place.index]
        there = place.ranks[place.index + step]
        group = place.streams[(there, here) if move is dist.irecv else (here, there)]
        return _Transfer(move, tensor.contiguous(), dist.get_global_rank(place.group, there), group)

    def _recorded(self, kind: Kind, microbatch: int) -> AbstractContextManager[None]:
        if self.recorder is None:
            return nullcontext()
        return self.recorder.run(Action(self.place.index, kind, microbatch))


def _there(arriving: _Transfer | Tensor) -> Tensor:
    return arriving.wait() if isinstance(arriving, _Transfer) else arriving


def _backward(output: Tensor, gradient: Tensor | None) -> None:
    if output.requires_grad:
        torch.autograd.backward(output, gradient)
