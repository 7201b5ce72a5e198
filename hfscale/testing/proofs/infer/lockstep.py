"""Run the ranks of a tensor group as threads of this process.

Every rank runs a copy of the model with its shards, forward and backward, in lockstep with the others; they meet at the
edges of blocks as processes do::

    enter   forward: x itself              backward: the sum over the ranks
    leave   forward: the sum of all ranks  backward: the gradient itself

A parameter that the plan does not call cut or partial has the gradient of its own rank alone, as in a real run.
"""

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...._compat.torch import own_parameters
from ....models.projections import follow_weight
from ....parallel.tensor.edges import Edge, hook_block, set_local_sizes
from ....plan.cut import Cut
from ....plan.drafting.draft import Draft
from ....plan.modules import BlockPlan
from .subject import Subject, Unproved, brief, cotangent, run

_PATIENCE = 60.0  # seconds to wait for another rank


class Lockstep:
    """Run ``size`` threads that wait for each other at every exchange."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._slots: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank."""
        self._slots[rank] = value
        self._barrier.wait(_PATIENCE)
        values = list(self._slots)
        self._barrier.wait(_PATIENCE)
        return values

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call one function per rank; returns the results by rank.

        Raises:
            Unproved: one of them failed.
        """
        results: list[Any] = [None] * self.size
        errors: list[BaseException | None] = [None] * self.size

        def work(rank: int) -> None:
            try:
                results[rank] = functions[rank]()
            except BaseException as error:
                errors[rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = [error for error in errors if error is not None]
        if found:
            first = next((error for error in found if not isinstance(error, threading.BrokenBarrierError)), found[0])
            raise Unproved(brief(first))
        return results


class _ThreadEnter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lockstep: Lockstep, rank: int) -> Tensor:
        ctx.lockstep, ctx.rank = lockstep, rank
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _total(ctx.lockstep.exchange(ctx.rank, gradients[0])), None, None


class _ThreadLeave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lockstep: Lockstep, rank: int) -> Tensor:
        return _total(lockstep.exchange(rank, x.detach()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


class _ThreadGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lockstep: Lockstep, rank: int) -> Tensor:
        values = lockstep.exchange(rank, x.detach())
        ctx.lengths, ctx.rank = [value.shape[-1] for value in values], rank
        return torch.cat(values, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].split(ctx.lengths, -1)[ctx.rank], None, None


def _total(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).sum(0)


@dataclass
class RankResult:
    """Hold the results of one rank: the output, and the gradients of full parameters, by name in the clone."""

    output: Tensor
    gradients: dict[str, Tensor | None]


def run_as_ranks(subject: Subject, draft: Draft, blocks: Sequence[BlockPlan]) -> list[RankResult]:
    """Run the subject's batch on ``draft.tp`` ranks, forward and backward.

    Raises:
        Unproved: they cannot run.
    """
    rules = {id(subject.model.get_parameter(name)): rule for name, rule in draft.rules.items()}
    lockstep = Lockstep(draft.tp)
    try:
        ranks = [_RankModel(subject.model, rules, blocks, rank, lockstep) for rank in range(draft.tp)]
    except (AttributeError, TypeError, ValueError) as error:  # a name, a size or a number that is not there to be cut
        raise Unproved(brief(error)) from error
    found: list[tuple[Tensor, dict[str, Tensor | None]]] = lockstep.run(
        [partial(rank.forward_and_backward, subject) for rank in ranks]
    )
    results = [RankResult(output, dict(own)) for output, own in found]
    for name, leaf in subject.model.named_parameters():
        cut, axes = rules.get(id(leaf), (None, ()))
        if cut is None and not axes:
            continue
        parts = [_as_whole(leaf, cut, rank, own[name]) for rank, (_, own) in enumerate(found)]
        known = [part for part in parts if part is not None]
        for result in results:
            result.gradients[name] = _total(known) if known else None
    return results


def _as_whole(leaf: Tensor, cut: Cut | None, rank: int, gradient: Tensor | None) -> Tensor | None:
    """Return the gradient of a shard at its place in the full parameter, with zeros elsewhere."""
    if cut is None or gradient is None:
        return gradient
    whole = leaf.detach().requires_grad_()
    (placed,) = torch.autograd.grad(cut.take(whole, rank), whole, gradient)
    return placed


class _RankModel:
    """Hold one rank's copy of a model, with edges."""

    def __init__(
        self,
        whole: Any,
        rules: dict[int, tuple[Cut | None, tuple[str, ...]]],
        blocks: Sequence[BlockPlan],
        rank: int,
        lockstep: Lockstep,
    ) -> None:
        self.rank, self.lockstep = rank, lockstep
        self.model = copy.deepcopy(whole)
        self.own: dict[str, nn.Parameter] = {}
        row_biases = {f"{row}.bias" for block in blocks for row in block.row}
        shares: dict[int, nn.Parameter] = {}
        for name, leaf in whole.named_parameters(remove_duplicate=False):
            if id(leaf) not in shares:
                cut, _ = rules.get(id(leaf), (None, ()))
                share = leaf.detach() if cut is None else cut.take(leaf.detach(), rank)
                shares[id(leaf)] = self.own[name] = nn.Parameter(share.clone())
            self._set(name, shares[id(leaf)], once=name in row_biases)
        for block in blocks:
            self._install(block)

    def forward_and_backward(self, subject: Subject) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Return the output, and this rank's gradients of its own parameters."""
        with torch.autograd.set_multithreading_enabled(False):
            output = run(self.model, subject.inputs)
            found = torch.autograd.grad(output, list(self.own.values()), cotangent(output), allow_unused=True)
        return output.detach(), dict(zip(self.own, found, strict=True))

    def _set(self, name: str, share: nn.Parameter, once: bool) -> None:
        owner, _, attribute = name.rpartition(".")
        module = self.model.get_submodule(owner)
        own_parameters(module)[attribute] = share * 0.0 if once and self.rank > 0 else share
        if attribute == "weight":
            follow_weight(module)

    def _install(self, block: BlockPlan) -> None:
        lockstep, rank = self.lockstep, self.rank
        set_local_sizes(self.model.get_submodule(block.name), block)
        edge = Edge(
            rank=rank,
            size=lockstep.size,
            enter=self._entered,
            leave=self._sum,
            enter_other=self._entered,
            gather=lambda x, _: _ThreadGather.apply(x, lockstep, rank),
        )
        hook_block(self.model, block, edge)

    def _entered(self, value: Tensor) -> Tensor:
        entered: Tensor = _ThreadEnter.apply(value, self.lockstep, self.rank)
        return entered

    def _sum(self, value: Tensor) -> Tensor:
        if not isinstance(value, Tensor):
            raise Unproved(f"a block returns a {type(value).__name__}")
        total: Tensor = _ThreadLeave.apply(value, self.lockstep, self.rank)
        return total
