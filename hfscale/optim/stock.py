"""Step plain tensors with a stock optimizer class of torch or bitsandbytes.

:class:`LocalStepper` steps all shards in place by one optimizer. :class:`OneByOneStepper` has an optimizer for each
parameter, and steps one parameter at a time: its shard, or the gathered full tensor. It can step copies of weights: on
the CPU (offload: :mod:`.offloaded`), or in float32 for stochastic rounding::

    weight, gradient --copy--> CPU and / or float32 --stock optimizer--> copy --written back, rounded--> weight
                                                          |
                                                        state   stays on the device and in the dtype of the copies

The device holds at most one copy of a weight and its gradient at a time, in addition to the state.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.bitsandbytes import keep_overrides_apart
from ..cost.model.optimizer_bytes import BLOCK
from ..distributed.mesh import Mesh
from ..distributed.ops.fused import fused, is_fused
from ..plan import ParameterPlan
from ..plan.cut import share_spans
from ..plan.state_tensor import StateTensor, like, scales, whole
from ..train.guards.stock_loops import leave_to_outer
from ..train.runtime.shards import gather_full
from .sharded import Groups, Member, State, Stepper, gradients_present

UPDATES = "updates"
"""Key of a parameter group with the number of updates, so that a resumed run continues the rounding's random
numbers.
"""

# Keys of bitsandbytes' 8-bit states.
_SCALES = "absmax"
_TABLES = "qmap"

# Function that makes the stock optimizer over parameter groups.
Stock = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
_CHUNK = 1 << 20  # entries that are rounded at a time; a random number takes 8 bytes
_LOW = (1 << 16) - 1
# Constants of SplitMix64 (Steele et al. 2014), as signed integers.
_MIX = (
    -7046029254386353131,
    -4658895280553007687,
    -7723592293110705685,
)


@dataclass(frozen=True)
class Aside:
    """Describe copies of weights that the optimizer updates in place of the weights: they are on ``device``. If
    ``seed`` is given, copies of bfloat16 weights are in float32, and the results are rounded stochastically to
    bfloat16, with random numbers that depend on ``seed``.
    """

    device: torch.device
    seed: int | None = None

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """Return the dtype of a copy of a weight or gradient: float32 if the weight is rounded stochastically."""
        return (
            torch.float32
            if self.seed is not None and tensor.dtype == torch.bfloat16
            else tensor.dtype
        )


class StockOverStandIns:
    """Run a stock optimizer over stand-ins for the model's parameters: ``nn.Parameter`` objects that get the memory of
    a weight, its gradient and its state only for a step.
    """

    def __init__(
        self,
        stock: Stock,
        members: Sequence[Member],
        groups: Groups,
        copied: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Make the stock optimizer. ``copied`` makes the copy of a weight that is stepped; without it, the weight
        itself is stepped.
        """
        self.pairs = [
            (member, nn.Parameter(copied(member.weight) if copied else member.weight))
            for member in members
        ]
        of_groups = [
            [each for member, each in self.pairs if member.group == index]
            for index in range(len(groups))
        ]
        self.optimizer = stock(
            [{**group, "params": own} for group, own in zip(groups, of_groups, strict=True)]
        )
        leave_to_outer(self.optimizer)
        keep_overrides_apart(self.optimizer)

    def step(
        self,
        groups: Groups,
        state: State,
        tensors: Callable[[Member], tuple[Tensor, Tensor | None]],
    ) -> None:
        """Make one step. ``tensors`` returns weight and gradient of a :class:`Member`, one of the optimizer's
        parameters; a parameter whose gradient is ``None`` is not stepped.
        """
        for mine, group in zip(self.optimizer.param_groups, groups, strict=True):
            mine.update({key: value for key, value in group.items() if key != "params"})
        scattered = []
        for member, stand_in in self.pairs:
            weight, gradient = tensors(member)
            # bitsandbytes would update a contiguous copy and leave the weight unchanged.
            if not weight.is_contiguous():
                scattered.append((weight, stand_in))
                weight = weight.contiguous()
            stand_in.data = weight
            stand_in.grad = gradient
            if member.parameter in state:
                self.optimizer.state[stand_in] = state[member.parameter]
        self.optimizer.step()
        for weight, stand_in in scattered:
            weight.copy_(stand_in)
        for _, stand_in in self.pairs:
            stand_in.grad = None
        self.publish(state)

    def publish(self, state: State) -> None:
        """Move the optimizer's state into ``state``, keyed by the model's own parameters."""
        for member, stand_in in self.pairs:
            if stand_in in self.optimizer.state:
                state[member.parameter] = self.optimizer.state.pop(stand_in)

    def release(self) -> None:
        """Free the memory of the stand-ins for the model's parameters until the next step."""
        for _, stand_in in self.pairs:
            stand_in.data = stand_in.data.new_empty(0)


class LocalStepper(Stepper):
    """Update shards in place: with elementwise optimizers, or with blockwise optimizers if shards consist of whole
    blocks.
    """

    _full = False  # whether full tensors are updated, so that every rank has the full state

    def __init__(
        self,
        stock: Stock,
        members: Sequence[Member],
        groups: Groups,
        mesh: Mesh,
    ) -> None:
        super().__init__(members, mesh)
        self._inners = [StockOverStandIns(stock, members, groups)]

    def publish(self, state: State) -> None:
        """Move state that exists before the first step into ``state``."""
        for inner in self._inners:
            inner.publish(state)

    def state_layout(self, planned: ParameterPlan, key: str, shape: tuple[int, ...]) -> StateTensor:
        """Return how a state tensor is sharded: like the parameter, or like its blocks of entries if the state holds
        one scale per block; see :meth:`Stepper.state_layout`.
        """
        if not shape or key.startswith(_TABLES):
            return whole(*shape)
        if key.startswith(_SCALES):
            return scales(planned, BLOCK, *shape[:-1], whole=self._full)
        lead = shape[: len(shape) - len(planned.shape)]
        return whole(*lead, *planned.shape) if self._full else like(planned, *lead)

    def step(self, groups: Groups, state: State) -> None:
        """Make one update, without communication."""

        def here(member: Member) -> tuple[Tensor, Tensor | None]:
            weight = member.weight
            grad = member.parameter.grad
            return weight, None if grad is None or not weight.numel() else member.gradient

        self._inners[0].step(groups, state, here)


class OneByOneStepper(LocalStepper):
    """Step one parameter at a time.

    Args:
        aside: if given, copies of weight and gradient are stepped, and the result is written back to the weight.
        full: weight and gradient are gathered from all ranks that hold shards of them. All these ranks make the same
            update, write their shards of the result, and hold the full state.
    """

    def __init__(
        self,
        stock: Stock,
        members: Sequence[Member],
        groups: Groups,
        mesh: Mesh,
        aside: Aside | None,
        full: bool,
    ) -> None:
        Stepper.__init__(self, members, mesh)
        self._aside = aside
        self._full = full
        self._inners = [
            StockOverStandIns(stock, some, groups, self._copy) for some in self._divided(members)
        ]
        for inner in self._inners:
            inner.release()
            optimizer: Any = inner.optimizer
            # All stock optimizers share the same tables of bitsandbytes' 8-bit values.
            if not full and hasattr(optimizer, "name2qmap"):
                first: Any = self._inners[0].optimizer
                optimizer.name2qmap = first.name2qmap

    def _divided(self, members: Sequence[Member]) -> Iterable[Sequence[Member]]:
        """Return the parameters ``members`` in groups that are stepped together; in this class, one by one."""
        return [[member] for member in members]

    def step(self, groups: Groups, state: State) -> None:
        """Make one update. If full tensors are updated, first gather them over the ranks that shard them."""
        for inner, (member, *_) in self._with_gradients():
            pair = (
                self._copy(self._whole(member, member.weight)),
                self._copy(self._whole(member, member.gradient)),
            )
            inner.step(groups, state, lambda _, pair=pair: pair)  # type: ignore[misc]
            self._write(member, pair[0], groups)
            inner.release()
            del pair  # free both before the next tensors are gathered

    def _with_gradients(self) -> list[tuple[StockOverStandIns, list[Member]]]:
        """Return each stock optimizer that has parameters with a gradient, together with these parameters."""
        local = (
            each.parameter.grad is not None and each.weight.numel() > 0 for each in self.members
        )
        flags = gradients_present(self.members, self._mesh) if self._full else local
        present = set(compress(self.members, flags))
        pairs = [
            (inner, [member for member, _ in inner.pairs if member in present])
            for inner in self._inners
        ]
        return [(inner, members) for inner, members in pairs if members]

    def _copy(self, tensor: Tensor) -> Tensor:
        aside = self._aside
        return (
            tensor if aside is None else tensor.to(aside.device, aside.dtype_of(tensor), copy=True)
        )

    def _whole(self, member: Member, tensor: Tensor) -> Tensor:
        planned = member.planned
        return (
            gather_full(tensor, planned.shape, planned.cuts, self._mesh) if self._full else tensor
        )

    def _write(self, member: Member, stepped: Tensor, groups: Groups) -> None:
        """Write this rank's shard of the updated weight ``stepped`` into the weight; the copy from pinned memory is
        asynchronous.
        """
        planned = member.planned
        weight = member.weight
        aside = self._aside
        share = planned.take(stepped, self._mesh.ranks) if self._full else stepped
        if aside is None or aside.seed is None or weight.dtype != torch.bfloat16:
            weight.copy_(share, non_blocking=True)
            return
        key = key_of(
            aside.seed,
            groups[member.group].get(UPDATES, 0),
            planned.name,
        )
        places = places_of(planned, self._mesh.ranks, weight.device)
        write_rounded(weight, share.to(weight.device, non_blocking=True), places, key)


class CountUpdates(Stepper):
    """Count updates in the parameter groups; runs after the steppers, which read the count."""

    def step(self, groups: Groups, state: State) -> None:
        """Count one update."""
        for group in groups:
            group[UPDATES] = group.get(UPDATES, 0) + 1


def key_of(seed: int, update: int, name: str) -> int:
    """Return the key (63 bits) of the random numbers of parameter ``name`` in one update."""
    digest = hashlib.blake2b(f"{seed} {update} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def places_of(
    planned: ParameterPlan,
    ranks: dict[str, int],
    device: torch.device,
) -> list[Tensor]:
    """Return, per dim, one number for each index along the dim of the shard on the rank at coordinates ``ranks``. The
    sum of an entry's numbers over all dims is the entry's flat index in the full tensor.
    """
    spans = share_spans(planned.shape, planned.cuts, ranks)
    strides = [prod(planned.shape[dim + 1 :]) for dim in range(len(planned.shape))]
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    return [
        torch.cat(
            [
                empty,
                *(torch.arange(start, stop, device=device) for start, stop in pieces),
            ]
        )
        * stride
        for pieces, stride in zip(spans, strides, strict=True)
    ]


def write_rounded(share: Tensor, wide: Tensor, places: list[Tensor], key: int) -> None:
    """Round ``wide`` (float32) stochastically to ``share`` (bfloat16, same shape): up or down at random, so that the
    mean is right (Gupta et al. 2015). Infinities and NaNs are cast. ``places`` are the results of :func:`places_of`.

    A bfloat16 is the upper half of a float32. A random number of 16 bits is added to the lower half, which is then
    dropped. The random number is a hash of ``key`` and the entry's index in the full tensor, so an entry is rounded to
    the same value on all its replicas and in every layout, without communication.
    """
    if share.numel() == 0:
        return
    # The key is a tensor, since a Python number would become a constant of compiled code.
    shift = torch.full((), key, dtype=torch.int64, device=wide.device)
    if not places:  # a scalar
        share.copy_(
            _rounded(
                wide.reshape(1),
                shift,
                torch.zeros(1, dtype=torch.int64, device=wide.device),
            )[0]
        )
        return
    by_dim = [
        span.view([-1 if i == dim else 1 for i in range(len(places))])
        for dim, span in enumerate(places)
    ]
    rows = share.shape[0] if is_fused(share.device) else max(1, _CHUNK // max(1, share[0].numel()))
    for begin in range(0, share.shape[0], rows):
        part = slice(begin, begin + rows)
        share[part].copy_(
            _rounded(
                wide[part],
                shift,
                by_dim[0][part],
                *by_dim[1:],
            )
        )


@fused
def _rounded(wide: Tensor, key: Tensor, *places: Tensor) -> Tensor:
    x = (sum(places[1:], places[0]) + 1) * _MIX[
        0
    ] + key  # SplitMix64 of the indices; products wrap around
    x = (x ^ _shifted(x, 30)) * _MIX[1]
    x = (x ^ _shifted(x, 27)) * _MIX[2]
    noise = (_shifted(x ^ _shifted(x, 31), 16) & _LOW).to(torch.int32)
    cut = ((wide.contiguous().view(torch.int32) + noise) & ~_LOW).view(torch.float32)
    return torch.where(wide.isfinite(), cut, wide).to(torch.bfloat16)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Return ``x`` shifted right by ``bits``, with zeros shifted in from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
