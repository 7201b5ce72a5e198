"""Sequence parallelism: between blocks, each tensor rank holds and computes only its shard of the tokens.

Data flow (Korthikanti et al. 2022), ``t`` tensor ranks, the hidden states of one layer stack::

    embedding  [b, s, h] --scatter--> [b, s/t, h] -> norm --gather--> column ... row --scatter sum--> [b, s/t, h] -> ...
                                                                      ... -> final norm --gather--> [b, s, h] head

The stock code of a layer runs unchanged on fewer tokens. Masks, positions and rotary tables are made from the full
sequence and used only inside blocks, which compute on the full sequence. Hidden states are scattered when they enter
the first layer, and gathered when they leave the module that owns the layers. Parameters between the blocks are applied
to this rank's tokens only, so their gradients are partial (:mod:`..partial_gradients`). A module inside a layer that
may mix tokens runs on the full sequence, and each rank keeps only its own tokens of the output.

The ranks' numbers of tokens differ by at most one. In a pass without gradients (evaluation, generation) hidden states
are not sharded.
"""

import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...._compat.torch import counts_forward_hooks, version_of
from ....distributed.ops.collectives import (
    Started,
    gather_from_sequence_region,
    gather_from_tp_region,
    reduce_scatter_to_sequence_region,
    scatter_to_tp_region,
    start_all_gather,
    start_reduce_scatter,
)
from ....errors import ConfigError
from ....plan import SequencePlan
from ....plan.cut import share_evenly
from ....train.runtime import recomputing
from ..random import LayerRandom

TOKENS = 1  # the dim of ``[b, s, h]`` that holds tokens


class ForwardPass:
    """Describe one forward pass: its ``samples`` of ``total`` tokens each, and whether its backward pass is done.

    The two numbers are stored as sizes of an empty tensor, because torch's compiler treats plain numbers as constants
    and would compile again for every new number.
    """

    def __init__(self, total: int, samples: int) -> None:
        self.sizes = torch.empty(total, samples, 0)
        self.done = False

    @property
    def total(self) -> int:
        """The number of tokens of a sample."""
        return self.sizes.shape[0]

    @property
    def samples(self) -> int:
        """The number of samples in the pass."""
        return self.sizes.shape[1]


class Running:
    """Hold the forward pass to which the running layer belongs, where the layer's compiled code can read it.

    Compiled code cannot read the pass from the autograd graph, and would treat sizes of tensors in a model's attributes
    as constants.
    """

    # the pass; ``None`` if the layer's hidden states are not sharded
    told: ForwardPass | None = None


RUNNING = Running()


class SequencePasses:
    """Hold the forward passes of one stack of layers by weak references; the passes' autograd graphs
    keep them alive.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.latest: ForwardPass | None = None
        self._begun: list[weakref.ref[ForwardPass]] = []

    def begin(self, total: int, share: Tensor) -> None:
        """Begin a forward pass over samples of ``total`` tokens; ``share`` is the first layer's input, which has only
        this rank's tokens.
        """
        self.latest = begun = ForwardPass(total, share.shape[0])
        self._begun.append(weakref.ref(begun))
        # The backward pass is done when the gradient of the first layer's sharded input is computed.
        if share.requires_grad:
            share.register_hook(lambda grad: setattr(begun, "done", True))
        keep_with_graph(share, begun)

    def waiting(self) -> list[ForwardPass]:
        """Return the forward passes whose autograd graph is alive and whose backward pass is not done; if there is
        none, the latest pass.
        """
        self._begun = [reference for reference in self._begun if reference() is not None]
        alive = [
            started
            for reference in self._begun
            if (started := reference()) is not None and not started.done
        ]
        return alive or ([self.latest] if self.latest is not None else [])

    def of_recomputed(self, x: Tensor, whole: bool) -> ForwardPass:
        """Return the pass for which ``x`` is recomputed; all ranks return the same pass, or all raise.

        Raises:
            ConfigError: several waiting passes are possible, or no pass fits.
        """
        kinds = {
            (passing.total, passing.samples if x.ndim == 2 else 0): passing
            for passing in self.waiting()
        }
        shares = [share_evenly(total, self.size) for total, _ in kinds]
        mixed = any(
            a == b
            for i, one in enumerate(shares)
            for other in shares[:i]
            for a, b in zip(one, other, strict=True)
        )
        if len(kinds) > 1 and (mixed or x.ndim == 2):
            raise ConfigError(
                f"sequence_parallel=True: forward passes over {', '.join(str(total) for total, _ in kinds)} tokens "
                "wait for their backward passes, and the layers that are recomputed for them cannot be told apart: run "
                "backward after each forward pass, pad all batches to one length, or turn activation checkpointing off"
            )
        for passing in kinds.values():
            length = passing.total if whole else share_evenly(passing.total, self.size)[self.rank]
            if len(kinds) == 1 or x.shape[TOKENS] == length:
                return passing
        raise ConfigError(
            f"sequence_parallel=True: a layer is recomputed for {x.shape[TOKENS]} tokens of this rank, but no forward "
            "pass that waits for its backward pass had so many: run the forward pass again before the backward pass"
        )


def keep_with_graph(x: Tensor, thing: Any) -> None:
    """Keep ``thing`` alive as long as the autograd graph of ``x`` is alive."""
    node: Any = x.grad_fn
    if node is not None:
        node.metadata["hfscale pass"] = thing
    else:  # a leaf received from another pipeline stage, which the stage keeps until its backward pass
        x._hfscale_pass = thing  # type: ignore[attr-defined]


class SequenceRegion:
    """Track, in one stack of layers, whether hidden states are currently sharded along the sequence, and how.

    Hooks on the stack's modules (:mod:`.hooks`) call ``begin``, ``cut_before`` and ``finish`` in each pass, and leave
    this state:

    ============== =================== ============== ===================================================
    where          ``_open``           ``_total``     hidden states
    ============== =================== ============== ===================================================
    outside        no                  last pass's    all tokens
    ``begin``      with gradients on   ``None``       all tokens; an embedding may leave its sum over
                                                      ranks to the first layer (``_partial``)
    ``cut_before`` yes                 tokens         this rank's tokens; all tokens inside blocks
    ``finish``     no                  tokens         all tokens, kept for the head (``_left``)
    recomputation  no                  last pass's    as in the pass that waits for its backward pass
                                                      (:class:`.region.SequencePasses`)
    ============== =================== ============== ===================================================

    ``_open`` is whether a pass that saves activations is running, ``_total`` the number of tokens per sample.

    A pipeline stage may receive sharded hidden states (``_arrives``) and send sharded hidden states (``_leaves``). With
    ``_leaves``, hidden states stay sharded until the module that calls the layers returns.
    """

    def __init__(self, plan: SequencePlan, group: dist.ProcessGroup) -> None:
        self.plan = plan
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.random = LayerRandom(self.rank)
        self.feeds_head = False  # whether a vocabulary-parallel head reads this stack's output
        self._passes = SequencePasses(self.rank, self.size)
        self._open = False  # whether a forward pass of the owner is running that saves activations
        # the number of tokens per sample in the pass, once its hidden states are sharded
        self._total: int | None = None
        # the layer before which the hidden states were scattered
        self._first: nn.Module | None = None
        # the number of tokens per sample, if a pipeline stage receives hidden states that are sharded already
        self._arrives: int | None = None
        # whether hidden states stay sharded at the end of the pass, for the next pipeline stage
        self._leaves = False
        # whether the embedding has left its sum over ranks to the first layer
        self._partial = False
        # the stack's output for the head: this rank's tokens, and all tokens
        self._left: tuple[Tensor, Tensor] | None = None

    @property
    def cut(self) -> bool:
        """Return whether hidden states between blocks currently have only this rank's tokens."""
        if torch.compiler.is_compiling() and RUNNING.told is not None:
            return True
        return (
            bool(self._passes.waiting())
            if self._recomputes_layers
            else self._open and self._total is not None
        )

    @property
    def active(self) -> bool:
        """Return whether hidden states may be sharded in the current pass: it saves activations, or layers are being
        recomputed.
        """
        return self._open or self._recomputes_layers

    @property
    def _recomputes_layers(self) -> bool:
        """Return whether layers are being recomputed one by one.

        Recomputing the full stack at once does not count: it runs like an ordinary forward pass.
        """
        return recomputing() and not self._open

    def lengths(self, x: Tensor, whole: bool = False) -> list[int]:
        """Return each rank's length along the token dim of ``x``: dim 1 of ``[b, s, h]``, dim 0 of ``[b s, h]``.

        With ``whole``, ``x`` has all tokens; otherwise it has this rank's tokens.
        """
        current = self._pass_of(x, whole)
        lengths = share_evenly(current.total, self.size)
        if x.ndim == 2:
            lengths = [current.samples * length for length in lengths]
        if x.shape[_dim(x)] != (sum(lengths) if whole else lengths[self.rank]):
            raise ConfigError(
                f"sequence_parallel=True: a block inside of {self.plan.owner!r} got {x.shape[_dim(x)]} tokens on this "
                f"rank, but {current.total} tokens per sample are sharded over tensor ranks into {lengths}, so this "
                "model family does not support sequence parallelism: use sequence_parallel=False"
            )
        return lengths

    def _pass_of(self, x: Tensor, whole: bool) -> ForwardPass:
        if torch.compiler.is_compiling() and RUNNING.told is not None:
            return RUNNING.told
        current = (
            self._passes.of_recomputed(x, whole) if self._recomputes_layers else self._passes.latest
        )
        assert current is not None
        return current

    def shape_for_compiled(self) -> tuple[int, int] | None:
        """Return the samples and tokens of the running layer's pass for its compiled code; ``None`` without such."""
        return None if RUNNING.told is None else (RUNNING.told.samples, RUNNING.told.total)

    def note_stream(self, share: Tensor) -> None:
        """Record the forward pass to which the layer that runs next belongs, for the layer's compiled code."""
        RUNNING.told = self._pass_of(share, whole=False) if self.cut else None

    def enter(self, x: Tensor) -> Tensor:
        """All-gather all tokens from each rank's ``[b, s/t, h]`` or ``[b s/t, h]``; reduce-scatter the gradient."""
        return gather_from_sequence_region(x, self.lengths(x), self.group, _dim(x))

    def collectives(
        self, x: Tensor
    ) -> tuple[Callable[[Tensor], Started], Callable[[Tensor], Started], int]:
        """Return functions for tensors with the shape of ``x``, and the number of entries of the gathered tensor.

        The first function starts an all-gather to all tokens, the second one a reduce-scatter to this rank's tokens.
        """
        how: dict[str, Any] = {
            "lengths": self.lengths(x),
            "dim": _dim(x),
            "group": self.group,
        }
        entries = sum(how["lengths"]) * math.prod(
            size for dim, size in enumerate(x.shape) if dim != how["dim"]
        )
        return partial(start_all_gather, **how), partial(start_reduce_scatter, **how), entries

    def leave(self, x: Tensor) -> Tensor:
        """Reduce-scatter the partial sums of all tokens over the tensor ranks: each rank gets the sums
        of its tokens.
        """
        return reduce_scatter_to_sequence_region(
            x, self.lengths(x, whole=True), self.group, _dim(x)
        )

    def keep_own(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of ``x``, which has all tokens; the other tokens get no gradient on this rank."""
        lengths = self.lengths(x, whole=True)
        return x.narrow(
            _dim(x),
            sum(lengths[: self.rank]),
            lengths[self.rank],
        )

    def sum_later(self, embedding: nn.Module) -> bool:
        """Return whether the embedding may return partial sums, which the first layer's reduce-scatter then sums over
        the tensor ranks.
        """
        # A user's hook may add something to the embedding's output (noise, for example), which must be added only once.
        # one of the hooks is hfscale's, which calls this method
        hooked = counts_forward_hooks(embedding) > 1
        self._partial = self._open and self._total is None and self.plan.direct and not hooked
        return self._partial

    def enter_head(self, x: Tensor) -> Tensor | None:
        """Return ``x`` with a gradient that goes directly to this rank's tokens, if ``x`` is the gathered output of
        this stack; else ``None``.

        The gradient then needs a single reduce-scatter.
        """
        if self._left is None:
            return None
        (own, whole), self._left = self._left, None
        # x must be a view of the stack's output, unchanged and not detached.
        same = (
            x.data_ptr() == whole.data_ptr()
            and x.shape == whole.shape
            and x.stride() == whole.stride()
        )
        same = (
            same and x.requires_grad == whole.requires_grad and version_of(x) == version_of(whole)
        )
        if not same:
            return None
        return gather_from_sequence_region(
            own, share_evenly(whole.shape[TOKENS], self.size), self.group, TOKENS, known=whole
        )

    def passes(self, arrives: int | None, leaves: bool) -> None:
        """Prepare for a pipeline stage's pass.

        Args:
            arrives: the number of tokens per sample if the stage's input is sharded; else ``None``.
            leaves: whether the stage's output stays sharded.
        """
        self._arrives = arrives
        self._leaves = leaves

    def begin(self) -> None:
        """Reset the state of the previous pass. A hook calls this before the module that calls the layers runs."""
        self._open = torch.is_grad_enabled()
        self._total = None
        self._partial = False
        self._left = None
        RUNNING.told = None
        self.random.reset()

    def cut_before(self, layer: nn.Module, x: Tensor) -> Tensor | None:
        """Return this rank's tokens of ``x``, the input of ``layer``, if ``layer`` is the first layer and ``x`` has all
        tokens; else ``None``.
        """
        # Recomputation may start before or after this hook, depending on transformers' version.
        first = self._first is layer if self._recomputes_layers else self._total is None
        if not first:
            return None
        if self._arrives is not None and not self._recomputes_layers:
            self._begin_pass(self._arrives, x)
            return None
        total = x.shape[TOKENS]
        cut = reduce_scatter_to_sequence_region if self._partial else scatter_to_tp_region
        share = cut(x, share_evenly(total, self.size), self.group, TOKENS)
        if not self._recomputes_layers:
            self._first = layer
            self._begin_pass(total, share)
        return share

    def _begin_pass(self, total: int, share: Tensor) -> None:
        self._total = total
        self._passes.begin(total, share)

    def finish(self) -> bool:
        """Record that the last layer of the stack has run; return whether its output is sharded and must be gathered by
        :meth:`gather`.
        """
        if self._leaves:
            return False
        cut = self.cut
        self._open = False
        return cut

    def gather(self, x: Tensor) -> Tensor:
        """All-gather this rank's tokens to all tokens for the modules after the layers."""
        whole = gather_from_tp_region(x, self.lengths(x), self.group, TOKENS)
        keep_with_graph(whole, self._passes.latest)  # the pass lives as long as the graph
        if self.feeds_head:
            self._left = x, whole
        return whole

    def check_finished(self) -> None:
        """Raise :class:`ConfigError` if the module that calls the layers has returned but the hidden states are still
        sharded.

        On a pipeline stage that sends sharded hidden states this is no error.
        """
        RUNNING.told = None
        if self._leaves:
            self._open = False
        if self.cut and not self._recomputes_layers:
            raise ConfigError(
                f"sequence_parallel=True: the forward pass of {self.plan.owner!r} ended without a call of "
                f"{self.plan.exit!r}, after which the sharded hidden states are gathered, so this model family does "
                "not support sequence parallelism: use sequence_parallel=False"
            )


def _dim(x: Tensor) -> int:
    return TOKENS if x.ndim > 2 else 0
