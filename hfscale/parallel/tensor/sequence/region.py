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
    own_slice,
    reduce_scatter_to_sequence_region,
    scatter_to_tp_region,
    start_all_gather,
    start_reduce_scatter,
)
from ....errors import ConfigError
from ....plan import SequencePlan
from ....plan.cut import share_evenly
from ....train.runtime.forward_passes import ForwardPasses, recomputing
from ..random import LayerRandom

TOKENS = 1  # the dim of ``[b, s, h]`` that holds tokens


class ForwardPass:
    """Hold the sizes of one forward pass whose hidden states are sharded: its ``samples`` of ``total`` tokens each.

    The two numbers are stored as sizes of an empty tensor, because torch's compiler treats plain numbers as constants
    and would compile again for every new number.
    """

    def __init__(self, total: int, samples: int, sums: bool) -> None:
        self.sizes = torch.empty(total, samples, 0)
        self.sums = sums  # whether the embedding left partial sums to the first layer

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


class SequenceRegion:
    """Track, in one stack of layers, whether hidden states are currently sharded along the sequence, and how.

    Hooks on the stack's modules (:mod:`.hooks`) call ``begin``, ``cut_before`` and ``finish`` in each pass, and leave
    this state:

    ============== =================== ===================================================================
    where          ``_open``           hidden states
    ============== =================== ===================================================================
    outside        no                  all tokens
    ``begin``      with gradients on   all tokens; an embedding may leave its sum over ranks to the first
                                       layer (``_partial``)
    ``cut_before`` yes                 this rank's tokens; all tokens inside blocks
    ``finish``     no                  all tokens, kept for the head (``_left``)
    recomputation  no                  as in the recomputed pass (``_passes``)
    ============== =================== ===================================================================

    ``_open`` is whether a pass that saves activations is running.

    A pipeline stage may receive sharded hidden states (``_arrives``) and send sharded hidden states (``_leaves``). With
    ``_leaves``, hidden states stay sharded until the module that calls the layers returns.
    """

    def __init__(self, plan: SequencePlan, group: dist.ProcessGroup) -> None:
        self.plan = plan
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.random = LayerRandom(self.rank)
        self.feeds_head = False  # whether a vocabulary-parallel head reads this stack's output
        # for each forward pass that saves activations, its sizes, once its hidden states are sharded
        self._passes = ForwardPasses[list[ForwardPass]]()
        self._passes.begin([])
        self._open = False  # whether a forward pass of the owner is running that saves activations
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
        return self.active and bool(self._sizes)

    @property
    def active(self) -> bool:
        """Return whether hidden states may be sharded in the current pass: it saves activations, or layers are being
        recomputed. Recomputing the full stack at once is a pass that saves activations (``_open``).
        """
        return self._open or recomputing()

    @property
    def _sizes(self) -> list[ForwardPass]:
        """The sizes of the pass that is being computed or recomputed; empty until its hidden states are sharded."""
        return self._passes.latest if self._open else self._passes.current()

    def lengths(self, x: Tensor, whole: bool = False) -> list[int]:
        """Return each rank's length along the token dim of ``x``: dim 1 of ``[b, s, h]``, dim 0 of ``[b s, h]``.

        With ``whole``, ``x`` has all tokens; otherwise it has this rank's tokens.
        """
        current = self._pass()
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

    def _pass(self) -> ForwardPass:
        if torch.compiler.is_compiling() and RUNNING.told is not None:
            return RUNNING.told
        return self._sizes[0]

    def shape_for_compiled(self) -> tuple[int, int] | None:
        """Return the samples and tokens of the running layer's pass for its compiled code; ``None`` without such."""
        return None if RUNNING.told is None else (RUNNING.told.samples, RUNNING.told.total)

    def note_stream(self) -> None:
        """Record the forward pass to which the layer that runs next belongs, for the layer's compiled code."""
        RUNNING.told = self._pass() if self.cut else None

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
        return own_slice(x, self.lengths(x, whole=True), _dim(x), self.group)

    def sum_later(self, embedding: nn.Module) -> bool:
        """Return whether the embedding may return partial sums, which the first layer's reduce-scatter then sums over
        the tensor ranks.
        """
        # A user's hook may add something to the embedding's output (noise, for example), which must be added only once.
        # one of the hooks is hfscale's, which calls this method
        hooked = counts_forward_hooks(embedding) > 1
        self._partial = self._open and not self._sizes and self.plan.direct and not hooked
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
        if self._open:
            self._passes.begin([])
        self._partial = False
        self._left = None
        RUNNING.told = None
        self.random.reset()

    def cut_before(self, layer: nn.Module, x: Tensor) -> Tensor | None:
        """Return this rank's tokens of ``x``, the input of ``layer``, if ``layer`` is the first layer and ``x`` has all
        tokens; else ``None``.
        """
        total = x.shape[TOKENS]
        if self._open:
            if self._sizes:
                return None
            self._sizes.append(ForwardPass(self._arrives or total, x.shape[0], self._partial))
            if self._arrives is not None:
                return None
            self._first = layer
        # Recomputation may start before or after this hook, depending on transformers' version.
        elif self._first is not layer:
            return None
        sums = self._pass().sums
        cut = reduce_scatter_to_sequence_region if sums else scatter_to_tp_region
        return cut(x, share_evenly(total, self.size), self.group, TOKENS)

    def finish(self, x: Tensor) -> Tensor:
        """Record that the last layer of the stack has run; return its output ``x`` with all tokens, for the modules
        after the layers. On a pipeline stage that sends sharded hidden states, do nothing.
        """
        if self._leaves:
            return x
        whole = x
        if self.cut:
            whole = gather_from_tp_region(x, self.lengths(x), self.group, TOKENS)
            if self.feeds_head:
                self._left = x, whole
        self._open = False
        return whole

    def check_finished(self) -> None:
        """Raise :class:`ConfigError` if the module that calls the layers has returned but the hidden states are still
        sharded.

        On a pipeline stage that sends sharded hidden states this is no error.
        """
        RUNNING.told = None
        if self._leaves:
            self._open = False
        if self._open and self._sizes:
            raise ConfigError(
                f"sequence_parallel=True: the forward pass of {self.plan.owner!r} ended without a call of "
                f"{self.plan.exit!r}, after which the sharded hidden states are gathered, so this model family does "
                "not support sequence parallelism: use sequence_parallel=False"
            )


def _dim(x: Tensor) -> int:
    return TOKENS if x.ndim > 2 else 0
