"""Sequence parallelism: between blocks, each tensor rank holds and computes its share of the tokens only.

Data flow (Korthikanti et al. 2022), ``t`` tensor ranks, the stream of one layer stack::

    embedding  [b, s, h] --scatter--> [b, s/t, h] -> norm --gather--> column ... row --scatter sum--> [b, s/t, h] -> ...
                                                                      ... -> final norm --gather--> [b, s, h] head

The stock code of a layer runs unchanged on fewer tokens; masks, positions and rotary tables are made from the whole
sequence and used inside blocks only, where the sequence is whole. The stream is cut where it enters the first layer and
gathered where it leaves the module that owns the layers. Parameters between the blocks see their rank's tokens, so
their gradients are partial (:mod:`.partial_gradients`). A module inside a layer that hfscale does not know to treat
every token by itself is run on the whole sequence and keeps its own tokens' results.

Lengths differ by at most one token. A pass without gradients (evaluation, generation) leaves the stream whole: there is
nothing saved that cutting it would spare.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._host.torch import counts_forward_hooks, version_of
from ..._host.transformers.hidden_states import hidden_states_of, other_arguments, with_hidden_states
from ...errors import ConfigError
from ...ops import enter, gather, gather_sum, scatter, scatter_sum
from ...ops.exchange import Started, start_all_gather, start_reduce_scatter
from ...plan import SequencePlan
from ...planner.sequence import share_evenly
from ...runtime import recomputing
from .random import LayerRandom

_DIM = 1


class _Pass:
    """One forward pass: ``samples`` of ``total`` tokens, and whether its backward pass is over."""

    def __init__(self, total: int, samples: int) -> None:
        self.total, self.samples, self.done = total, samples, False

    def end_with(self, share: Tensor) -> None:
        """The backward pass is over when the gradient of this rank's first share is there."""
        if share.requires_grad:
            share.register_hook(lambda grad: self._end())
        _keep(share, self)

    def _end(self) -> None:
        self.done = True


class SequenceRegion:
    """The stream of one layer stack: whether it is cut now, and into which lengths."""

    def __init__(self, plan: SequencePlan, group: dist.ProcessGroup) -> None:
        self.plan, self.group = plan, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._open = False  # inside a forward pass of the owner that saves activations
        self._total: int | None = None  # tokens per sample in that pass, once the stream is cut
        self._first: nn.Module | None = None  # the layer that cut it
        self._current: _Pass | None = None  # the latest pass
        self._pending: list[weakref.ref[_Pass]] = []
        self._arrives: int | None = None  # tokens of a stream that is cut where it arrives, from another stage
        self._leaves = False  # it stays cut where the pass ends, for the next stage
        self._partial = False  # the embedding left its sum over ranks to the first layer
        self.random = LayerRandom(self.rank)
        self.feeds_head = False  # a head whose outputs are cut asks for what this stack gave out
        self._left: tuple[Tensor, Tensor] | None = None  # that: this rank's share, and the whole

    @property
    def cut(self) -> bool:
        """Whether what flows between blocks is this rank's share."""
        return bool(self._passes()) if self._again else self._open and self._total is not None

    @property
    def _again(self) -> bool:
        """Whether layers are recomputed one by one; recomputing the whole stack is a pass like the first."""
        return recomputing() and not self._open

    def lengths(self, x: Tensor, whole: bool = False) -> list[int]:
        """Each rank's number of entries along the dim of ``x`` that holds tokens: dim 1, or dim 0 of ``[b s, h]``.

        Args:
            whole: ``x`` has all tokens, and not this rank's only.
        """
        current = self._recomputed(x, whole) if self._again else self._current
        assert current is not None
        lengths = share_evenly(current.total, self.size)
        if x.ndim == 2:
            lengths = [current.samples * length for length in lengths]
        if x.shape[_dim(x)] != (sum(lengths) if whole else lengths[self.rank]):
            raise ConfigError(
                f"sequence_parallel=True: a block under {self.plan.owner!r} has {x.shape[_dim(x)]} tokens where "
                f"{current.total} are shared out as {lengths}, so its family does not fit: use sequence_parallel=False"
            )
        return lengths

    def _passes(self) -> list["_Pass"]:
        """Forward passes whose graphs are alive and that no backward pass has gone through."""
        self._pending = [reference for reference in self._pending if reference() is not None]
        alive = [found for reference in self._pending if (found := reference()) is not None and not found.done]
        return alive or ([self._current] if self._current is not None else [])

    def _recomputed(self, x: Tensor, whole: bool) -> "_Pass":
        """The pass that ``x`` is recomputed for; every rank comes to the same conclusion, or raises."""
        kinds = {(found.total, found.samples if x.ndim == 2 else 0): found for found in self._passes()}
        shares = [share_evenly(total, self.size) for total, _ in kinds]
        mixed = any(
            a == b for i, one in enumerate(shares) for other in shares[:i] for a, b in zip(one, other, strict=True)
        )
        if len(kinds) > 1 and (mixed or x.ndim == 2):
            raise ConfigError(
                f"sequence_parallel=True: forward passes over {', '.join(str(total) for total, _ in kinds)} tokens "
                "wait for their backward passes, and their recomputed layers cannot be told apart: run backward after "
                "each forward pass, pad them to one length, or do without activation checkpointing"
            )
        for found in kinds.values():
            length = found.total if whole else share_evenly(found.total, self.size)[self.rank]
            if len(kinds) == 1 or x.shape[_DIM] == length:
                return found
        raise ConfigError(f"sequence_parallel=True: no forward pass had {x.shape[_DIM]} tokens here: run it again")

    def enter(self, x: Tensor) -> Tensor:
        """This rank's tokens ``[b, s/t, h]`` or ``[b s/t, h]`` -> all tokens, for a computation that ranks share."""
        return gather_sum(x, self.lengths(x), self.group, _dim(x))

    def collectives(self, x: Tensor) -> tuple[Callable[[Tensor], Started], Callable[[Tensor], Started]]:
        """What begins to gather tensors like ``x``, this rank's tokens, and what begins to sum partial results for all
        tokens into tensors like it. Both may be called in a backward pass that comes after other forward passes.
        """
        how: dict[str, Any] = {"lengths": self.lengths(x), "dim": _dim(x), "group": self.group}
        return partial(start_all_gather, **how), partial(start_reduce_scatter, **how)

    def leave(self, x: Tensor) -> Tensor:
        """Partial sums for all tokens -> the sums for this rank's tokens."""
        return scatter_sum(x, self.lengths(x, whole=True), self.group, _dim(x))

    def keep_own(self, x: Tensor) -> Tensor:
        """All tokens -> this rank's; what other ranks keep has no gradient here."""
        lengths = self.lengths(x, whole=True)
        return x.narrow(_dim(x), sum(lengths[: self.rank]), lengths[self.rank])

    def sum_later(self, embedding: nn.Module) -> bool:
        """Asked by the embedding: may it leave the sum over the ranks to the first layer?"""
        # What a hook adds to its output (noise, say) must be added once.
        hooked = counts_forward_hooks(embedding) > 1  # one is the embedding's own, which asks
        self._partial = self._open and self._total is None and self.plan.direct and not hooked
        return self._partial

    def enter_head(self, x: Tensor) -> Tensor | None:
        """The input of a head whose outputs are cut, if ``x`` is what this stack gave out: its gradient then travels
        as one reduce-scatter, where summing and cutting it apart would be an all-reduce.
        """
        if self._left is None:
            return None
        (own, whole), self._left = self._left, None
        # A view of it, and not a detached or changed one.
        same = x.data_ptr() == whole.data_ptr() and x.shape == whole.shape and x.stride() == whole.stride()
        same = same and x.requires_grad == whole.requires_grad and version_of(x) == version_of(whole)
        return gather_sum(own, self._lengths_of(whole), self.group, _DIM, known=whole) if same else None

    def passes(self, arrives: int | None, leaves: bool) -> None:
        """What comes is a pipeline stage's pass: its stream may arrive cut, of so many tokens, and leave cut."""
        self._arrives, self._leaves = arrives, leaves

    def install(self, model: nn.Module, holds: Callable[[str], bool]) -> None:
        """Hook the owner of the layers, the layers, and the modules that need the whole sequence; of what other
        pipeline stages have, which ``holds`` says, nothing.
        """
        owner = model.get_submodule(self.plan.owner)
        owner.register_forward_pre_hook(lambda *_: self._begin())
        if self.plan.exit == self.plan.owner or holds(self.plan.exit):
            model.get_submodule(self.plan.exit).register_forward_hook(lambda _, args, output: self._end(output))
        owner.register_forward_hook(lambda *_: self._check_ended())
        for name in filter(holds, self.plan.layers):
            layer = model.get_submodule(name)
            layer.register_forward_pre_hook(self._before_layer, with_kwargs=True)
            if self.plan.dropout:
                layer.register_forward_hook(lambda module, args, output: self.random.leave_layer(module))
        for name in filter(holds, self.plan.gathered):
            module = model.get_submodule(name)
            module.register_forward_pre_hook(self._before_whole, with_kwargs=True)
            module.register_forward_hook(lambda _, args, output: self._after_whole(output))

    def draw_sums_alike(self, name: str, rows: Sequence[nn.Module], exits: Sequence[nn.Module]) -> None:
        """Between the row projections of block ``name`` and its exits, drop the same entries on every rank."""
        for row in rows:
            row.register_forward_pre_hook(lambda module, _: self.random.enter_sums(module, name) if self.cut else None)
        for module in exits:
            module.register_forward_hook(lambda *_: self.random.leave_sums())

    def _begin(self) -> None:
        self._open, self._total, self._partial, self._left = torch.is_grad_enabled(), None, False, None
        self.random.reset()

    def _before_layer(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if not (self._open or self._again):
            return None
        if self.plan.dropout:
            self.random.enter_layer(layer)
        x: Tensor = hidden_states_of(args, kwargs)
        # Recomputation may start in front of this hook or behind it, depending on the host's version.
        first = self._first is layer if self._again else self._total is None
        if not first:
            return None
        if self._arrives is not None and not self._again:
            self._begin_pass(self._arrives, x)
            return None
        total = x.shape[_DIM]
        share = (scatter_sum if self._partial else scatter)(x, share_evenly(total, self.size), self.group, _DIM)
        if not self._again:
            self._first = layer
            self._begin_pass(total, share)
        return with_hidden_states(args, kwargs, share)

    def _begin_pass(self, total: int, share: Tensor) -> None:
        self._total = total
        self._current = _Pass(total, share.shape[0])
        self._pending.append(weakref.ref(self._current))
        self._current.end_with(share)

    def _before_whole(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if not self.cut:
            return None
        args, kwargs = with_hidden_states(args, kwargs, self.enter(hidden_states_of(args, kwargs)))
        # Other inputs (an encoder's output) are whole already; each rank sees a part of their gradient.
        others = {name: enter(x, self.group) for name, x in other_arguments(kwargs).items() if _trains(x)}
        return (*args[:1], *(enter(x, self.group) if _trains(x) else x for x in args[1:])), {**kwargs, **others}

    def _after_whole(self, output: Any) -> Any:
        if not self.cut:
            return output
        return (self.keep_own(output[0]), *output[1:]) if isinstance(output, tuple) else self.keep_own(output)

    def _end(self, output: Any) -> Any:
        if self._leaves:
            return output
        cut, self._open = self.cut, False
        if not cut:
            return output
        if isinstance(output, Tensor):
            return self._gathered(output)
        if isinstance(output, tuple):
            return (self._gathered(output[0]), *output[1:])
        output.last_hidden_state = self._gathered(output.last_hidden_state)
        return output

    def _check_ended(self) -> None:
        if self._leaves:
            self._open = False
        if self.cut and not self._again:
            raise ConfigError(
                f"sequence_parallel=True: {self.plan.owner!r} returned without having called {self.plan.exit!r}, where "
                "its stream becomes whole again, so its family does not fit: use sequence_parallel=False"
            )

    def _gathered(self, x: Tensor) -> Tensor:
        whole = gather(x, self.lengths(x), self.group, _DIM)
        _keep(whole, self._current)  # the pass waits for its backward pass as long as its graph is alive
        if self.feeds_head:
            self._left = x, whole
        return whole

    def own_length(self, total: int) -> int:
        """Of ``total`` tokens per sample, this rank's."""
        return share_evenly(total, self.size)[self.rank]

    def _lengths_of(self, whole: Tensor) -> list[int]:
        return share_evenly(whole.shape[_DIM], self.size)


def _keep(x: Tensor, thing: Any) -> None:
    """Keep ``thing`` alive as long as the graph of ``x`` is."""
    node: Any = x.grad_fn
    if node is not None:
        node.metadata["hfscale pass"] = thing
    else:  # what arrived from another stage, which keeps it for its backward pass
        x._hfscale_pass = thing  # type: ignore[attr-defined]


def _trains(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _dim(x: Tensor) -> int:
    return _DIM if x.ndim > 2 else 0
