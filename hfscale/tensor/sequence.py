"""Sequence parallelism: between blocks, each tensor rank holds and computes its share of the tokens only.

Data flow (Korthikanti et al. 2022), ``t`` tensor ranks, the stream of one layer stack::

    embedding  [b, s, h] --scatter--> [b, s/t, h] -> norm --gather--> column ... row --scatter sum--> [b, s/t, h] -> ...
                                                                      ... -> final norm --gather--> [b, s, h] head

The stock code of a layer runs unchanged on fewer tokens; masks, positions and rotary tables are made from the whole
sequence and used inside blocks only, where the sequence is whole. The stream is cut where it enters the first layer and
gathered where it leaves the module that owns the layers. Parameters between the blocks see their rank's tokens, so
their gradients are partial (:mod:`.shared`). A module inside a layer that hfscale does not know to treat every token by
itself is run on the whole sequence and keeps its own tokens' results.

Lengths differ by at most one token. A pass without gradients (evaluation, generation) leaves the stream whole: there is
nothing saved that cutting it would spare.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import ConfigError
from ..ops import enter, gather, gather_sum, scatter, scatter_sum
from ..ops.exchange import Started, start_all_gather, start_reduce_scatter
from ..plan import StreamPlan, share_evenly
from .random import LayerRandom

_DIM = 1


class Stream:
    """The stream of one layer stack: whether it is cut now, and into which lengths."""

    def __init__(self, plan: StreamPlan, group: dist.ProcessGroup) -> None:
        self.plan, self.group = plan, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._open = False  # inside a forward pass of the owner that saves activations
        self._total: int | None = None  # tokens per sample in that pass, once the stream is cut
        self._samples = 0
        self._first: nn.Module | None = None  # the layer that cut it
        self._totals: dict[int, int] = {}  # length of this rank's share -> that of the whole, for recomputation
        self._partial = False  # the embedding left its sum over ranks to the first layer
        self.random = LayerRandom(self.rank)
        self.feeds_head = False  # a head whose outputs are cut asks for what this stack gave out
        self._left: tuple[Tensor, Tensor] | None = None  # that: this rank's share, and the whole

    @property
    def cut(self) -> bool:
        """Whether what flows between blocks is this rank's share."""
        return bool(self._totals) if _recomputing() else self._open and self._total is not None

    def lengths(self, x: Tensor, whole: bool = False) -> list[int]:
        """Each rank's number of entries along the dim of ``x`` that holds tokens: dim 1, or dim 0 of ``[b s, h]``.

        Args:
            whole: ``x`` has all tokens, and not this rank's only.
        """
        total, samples = self._total, self._samples
        if _recomputing() and x.ndim > 2:  # the last forward pass need not be the one that is recomputed
            total = x.shape[_DIM] if whole else self._totals[x.shape[_DIM]]
        assert total is not None
        lengths = [length * (1 if x.ndim > 2 else samples) for length in share_evenly(total, self.size)]
        if x.shape[_dim(x)] != (sum(lengths) if whole else lengths[self.rank]):
            raise ConfigError(
                f"sequence_parallel=True: a block under {self.plan.owner!r} has {x.shape[_dim(x)]} tokens where "
                f"{total} are shared out as {lengths}, so its family does not fit: use sequence_parallel=False"
            )
        return lengths

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

    def sum_later(self) -> bool:
        """Asked by the embedding: may it leave the sum over the ranks to the first layer?"""
        self._partial = self._open and self._total is None and self.plan.direct
        return self._partial

    def enter_head(self, x: Tensor) -> Tensor | None:
        """The input of a head whose outputs are cut, if ``x`` is what this stack gave out: its gradient then travels
        as one reduce-scatter, where summing and cutting it apart would be an all-reduce.
        """
        if self._left is None:
            return None
        (own, whole), self._left = self._left, None
        same = x.data_ptr() == whole.data_ptr() and x.shape == whole.shape and x.stride() == whole.stride()
        return gather_sum(own, self._lengths_of(whole), self.group, _DIM, known=whole) if same else None

    def install(self, model: nn.Module) -> None:
        """Hook the owner of the layers, the layers, and the modules that need the whole sequence."""
        owner = model.get_submodule(self.plan.owner)
        owner.register_forward_pre_hook(lambda *_: self._begin())
        model.get_submodule(self.plan.exit).register_forward_hook(lambda _, args, output: self._end(output))
        owner.register_forward_hook(lambda *_: self._check_ended())
        for name in self.plan.layers:
            layer = model.get_submodule(name)
            layer.register_forward_pre_hook(self._before_layer, with_kwargs=True)
            if self.plan.dropout:
                layer.register_forward_hook(lambda module, args, output: self.random.leave_layer(module))
        for name in self.plan.gathered:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(self._before_whole, with_kwargs=True)
            module.register_forward_hook(lambda _, args, output: self._after_whole(output))

    def draw_sums_alike(self, name: str, rows: Sequence[nn.Module], exits: Sequence[nn.Module]) -> None:
        """Between the row projections of block ``name`` and its exits, drop the same entries on every rank."""
        for row in rows:
            row.register_forward_pre_hook(lambda module, _: self.random.enter_sums(module, name) if self.cut else None)
        for module in exits:
            module.register_forward_hook(lambda module, args, output: self.random.leave_sums(module))

    def _begin(self) -> None:
        self._open, self._total, self._partial, self._left = torch.is_grad_enabled(), None, False, None
        self.random.reset()

    def _before_layer(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if not (self._open or _recomputing()):
            return None
        if self.plan.dropout:
            self.random.enter_layer(layer)
        x: Tensor = args[0] if args else kwargs["hidden_states"]
        self._samples = x.shape[0]
        # Recomputation may start in front of this hook or behind it, depending on the host's version.
        first = self._first is layer if _recomputing() else self._total is None
        if not first:
            return None
        self._first, self._total = layer, x.shape[_DIM]
        lengths = share_evenly(self._total, self.size)
        self._totals[lengths[self.rank]] = self._total
        share = (scatter_sum if self._partial else scatter)(x, lengths, self.group, _DIM)
        return _replaced(args, kwargs, share)

    def _before_whole(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if not self.cut:
            return None
        args, kwargs = _replaced(args, kwargs, self.enter(args[0] if args else kwargs["hidden_states"]))
        # Other inputs (an encoder's output) are whole already; each rank sees a part of their gradient.
        others = {name: enter(x, self.group) for name, x in kwargs.items() if name != "hidden_states" and _trains(x)}
        return (*args[:1], *(enter(x, self.group) if _trains(x) else x for x in args[1:])), {**kwargs, **others}

    def _after_whole(self, output: Any) -> Any:
        if not self.cut:
            return output
        return (self.keep_own(output[0]), *output[1:]) if isinstance(output, tuple) else self.keep_own(output)

    def _end(self, output: Any) -> Any:
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
        if self.cut and not _recomputing():
            raise ConfigError(
                f"sequence_parallel=True: {self.plan.owner!r} returned without having called {self.plan.exit!r}, where "
                "its stream becomes whole again, so its family does not fit: use sequence_parallel=False"
            )

    def _gathered(self, x: Tensor) -> Tensor:
        whole = gather(x, self.lengths(x), self.group, _DIM)
        if self.feeds_head:
            self._left = x, whole
        return whole

    def _lengths_of(self, whole: Tensor) -> list[int]:
        return share_evenly(whole.shape[_DIM], self.size)


def _trains(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _dim(x: Tensor) -> int:
    return _DIM if x.ndim > 2 else 0


def _replaced(args: Any, kwargs: dict[str, Any], x: Tensor) -> tuple[Any, dict[str, Any]]:
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})


def _recomputing() -> bool:
    """Whether this forward pass is activation checkpointing's second one, inside a backward pass."""
    return torch._C._current_graph_task_id() != -1
