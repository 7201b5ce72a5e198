"""Prove a blueprint: threads act as tensor-parallel ranks, and must compute what one process computes, in float64.

Every rank runs a copy of the model with its shards, forward and backward, in lockstep with the other ranks; ranks
exchange tensors at the edges (entries and exits) of tensor-parallel blocks, like processes::

    enter   forward: x itself              backward: the sum over the ranks
    leave   forward: the sum of all ranks  backward: the gradient itself
    gather  forward: all ranks' slices     backward: the rank's own slice

The gradient of a parameter that the plan lists neither as sharded nor as partial is not summed over ranks, as in a real
run.
"""

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...._compat.torch import own_parameters
from ....config.parallel import AXES, ParallelConfig
from ....distributed.ops.collectives import apply_mapping
from ....models.blueprint import TOLERANCE, Blueprint, Proof
from ....models.module_kinds import follow_weight
from ....parallel.tensor.blocks import plan_blocks
from ....parallel.tensor.edges import Edge, hook_block, set_local_sizes
from ....plan import BlockPlan, Cut
from ....plan.drafting.draft import Draft
from ..probe import apart
from .subject import Subject, Unplanned, Unproved, brief, run_backward

_PATIENCE = 60.0  # seconds to wait for another rank
# Relative to the largest gradient: smaller values are the rounding of gradients that are exactly zero.
_FLOOR = 1e-6

Gradients = dict[str, Tensor | None]  # gradients by the parameter's name in the clone


def prove(subject: Subject, blueprint: Blueprint, tp_size: int = 2) -> Proof:
    """Compare the clone with ``tp_size`` ranks that shard the blocks of ``blueprint``, planned as in a real run; raise
    :class:`Unproved` if they differ.
    """
    sizes: dict[str, Any] = {f"{axis}_size": 1 for axis in AXES}
    # Pass all sizes explicitly, so that no size is read from environment variables.
    layout = ParallelConfig(**{**sizes, "tp_size": tp_size}, sequence_parallel=False)
    draft = Draft(subject.model, layout)
    try:
        blocks = plan_blocks(draft, blueprint, subject.layer_names)
    except (AttributeError, KeyError) as error:  # some layer lacks a named module
        raise Unproved(brief(error)) from error
    if draft.problems:
        raise Unplanned(draft.problems[0].partition(": ")[2] or draft.problems[0])
    expected, wanted = subject.reference
    outputs, gradients = _run_as_ranks(subject, draft, blocks)
    proof = Proof(max(apart(output, expected) for output in outputs), 0.0, "")
    if proof.worst > TOLERANCE:
        raise Unproved(
            f"the output over ranks differs from the output of one process by {proof.output:.0e}"
        )
    floor = _FLOOR * max(
        float(gradient.abs().max()) for gradient in wanted.values() if gradient is not None
    )
    for name, gradient in wanted.items():
        largest = max(_gradient_apart(of_run[name], gradient, floor) for of_run in gradients)
        if largest >= proof.gradient:
            proof = Proof(proof.output, largest, name)
    if proof.worst > TOLERANCE:
        raise Unproved(
            f"the gradient of {proof.parameter} over ranks differs from that of one process by {proof.gradient:.0e}"
        )
    return proof


def _gradient_apart(found: Tensor | None, wanted: Tensor | None, floor: float) -> float:
    if found is None or wanted is None:
        return 0.0 if wanted is None and (found is None or not found.any()) else float("inf")
    return apart(found, wanted, floor)


def _run_as_ranks(
    subject: Subject, draft: Draft, blocks: Sequence[BlockPlan]
) -> tuple[list[Tensor], tuple[Gradients, ...]]:
    """Run the batch on ``draft.tp`` ranks (``draft`` is the plan being made). Return, by rank, the output and the
    gradients in the shape of full parameters.
    """
    rules = {id(subject.model.get_parameter(name)): rule for name, rule in draft.rules.items()}
    group = _Group(draft.tp)
    try:
        ranks = [
            _RankModel(
                subject.model,
                rules,
                blocks,
                rank,
                group,
            )
            for rank in range(draft.tp)
        ]
    except (
        AttributeError,
        TypeError,
        ValueError,
    ) as error:  # a name, size or number to cut does not exist
        raise Unproved(brief(error)) from error
    outputs, own = zip(
        *group.run([partial(rank.run, subject) for rank in ranks]),
        strict=True,
    )
    gradients = tuple(dict(of_rank) for of_rank in own)
    for name, leaf in subject.model.named_parameters():
        cut, axes = rules.get(id(leaf), (None, ()))
        if cut is not None or axes:
            parts = [_in_place(leaf, cut, rank, of_rank[name]) for rank, of_rank in enumerate(own)]
            known = [part for part in parts if part is not None]
            for of_rank in gradients:
                of_rank[name] = _total(known) if known else None
    return list(outputs), gradients


def _in_place(
    leaf: Tensor,
    cut: Cut | None,
    rank: int,
    gradient: Tensor | None,
) -> Tensor | None:
    """Return a shard's ``gradient`` in the shape of the full parameter ``leaf``, with zeros outside the shard."""
    if cut is None or gradient is None:
        return gradient
    full = leaf.detach().requires_grad_()
    (placed,) = torch.autograd.grad(cut.take(full, rank), full, gradient)
    return placed


def _total(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).sum(0)


class _Group:
    """Run ``size`` threads that act as tensor-parallel ranks; they wait for each other at every exchange of tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._slots: list[Any] = [None] * size

    def exchange(self, rank: int, value: Tensor) -> list[Tensor]:
        """Return the values that all ranks have passed to this call, by rank."""
        self._slots[rank] = value
        self._barrier.wait(_PATIENCE)
        values = list(self._slots)
        self._barrier.wait(_PATIENCE)
        return values

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call one function per rank; return the results by rank."""

        def guarded(function: Callable[[], Any]) -> Any:
            try:
                return function()
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as threads:
            calls = [threads.submit(guarded, function) for function in functions]
        errors = [error for call in calls if (error := call.exception()) is not None]
        if errors:
            raise Unproved(
                brief(
                    min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
                )
            )
        return [call.result() for call in calls]


class _RankModel:
    """Hold one rank's copy of a model, with the rank's shards, and with collectives at the entries and exits of
    tensor-parallel blocks.
    """

    def __init__(
        self,
        full: Any,
        rules: dict[int, tuple[Cut | None, tuple[str, ...]]],
        blocks: Sequence[BlockPlan],
        rank: int,
        group: _Group,
    ) -> None:
        self.rank = rank
        self.group = group
        self.model = copy.deepcopy(full)
        self.own: dict[str, nn.Parameter] = {}
        row_biases = {f"{row}.bias" for block in blocks for row in block.row}
        once = row_biases.union(*(block.once for block in blocks))
        shards: dict[int, nn.Parameter] = {}
        for name, leaf in full.named_parameters(remove_duplicate=False):
            if id(leaf) not in shards:
                cut, _ = rules.get(id(leaf), (None, ()))
                part = leaf.detach() if cut is None else cut.take(leaf.detach(), rank)
                shards[id(leaf)] = self.own[name] = nn.Parameter(part.clone())
            owner, _, attribute = name.rpartition(".")
            module = self.model.get_submodule(owner)
            shard = shards[id(leaf)]
            own_parameters(module)[attribute] = shard * 0.0 if name in once and rank > 0 else shard
            if attribute == "weight":
                follow_weight(module)
        edge = Edge(
            rank, group.size, self._enter, self._leave, enter_other=self._enter, gather=self._gather
        )
        for block in blocks:
            set_local_sizes(self.model.get_submodule(block.name), block)
            hook_block(self.model, block, edge)

    def run(self, subject: Subject) -> tuple[Tensor, Gradients]:
        """Return the output, and this rank's gradients of its own parameters."""
        with torch.autograd.set_multithreading_enabled(False):
            return run_backward(self.model, subject.inputs, dict(self.own))

    def _sum(self, x: Tensor) -> Tensor:
        return _total(self.group.exchange(self.rank, x))

    def _enter(self, x: Tensor) -> Tensor:
        return apply_mapping(x, Tensor.clone, self._sum)

    def _leave(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor):
            raise Unproved(f"a block must return a tensor, got a {type(x).__name__}")
        return apply_mapping(x, self._sum, None)

    def _gather(self, x: Tensor, lengths: list[int]) -> Tensor:
        return apply_mapping(
            x,
            lambda own: torch.cat(self.group.exchange(self.rank, own), -1),
            lambda gradient: gradient.split(lengths, -1)[self.rank],
        )
