"""Draw random numbers (dropout) under tensor parallelism.

Each rank has two streams of random numbers. The *replicated* stream is torch's default generator. Replicated
activations must get the same dropout mask on every tensor rank, so all ranks of a tensor group draw the same numbers
from this stream, and ranks with different batches draw different numbers. The *cut* stream (the model-parallel state in
Megatron-LM) is for sharded activations (attention weights; under sequence parallelism everything between the blocks):
each rank draws different numbers.

The cut stream is not stored. On entering a cut region, its seed is derived from the state of the replicated stream and
from the tensor rank; on leaving the region, the replicated stream continues at its earlier state. Code that restores
the default generator (activation checkpointing, a resumed run) therefore restores both streams.

=================  ==========================  ===========================================
within a layer     full hidden states          sharded along the sequence
=================  ==========================  ===========================================
between blocks     replicated                  cut
block, before row  cut                         cut
block, after row   replicated (partial sums)   derived from the layer's replicated state
=================  ==========================  ===========================================

``generate()`` runs on every rank of a tensor group and must pick the same tokens on all of them. Logits are equal on
all ranks, so greedy search picks the same tokens without further work. For sampling, each call of ``generate()`` first
broadcasts the generator state of the group's first rank, in case the ranks were seeded differently.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._compat.torch_device import device_module, is_accelerator
from ...distributed.mesh import Mesh
from ...distributed.ops.collectives import apply_mapping
from ...distributed.ops.overlap import Derive
from ...train.runtime import recomputing

# the seeds of a region's cut streams are a common multiple of this number plus the rank
_RANKS = 1 << 16


def cut_region(
    block: nn.Module,
    exits: Sequence[nn.Module],
    rank: int,
    wanted: Callable[[], bool],
) -> Callable[[], None]:
    """Draw random numbers that differ between tensor ranks (the *cut* stream) from the start of ``block`` to its row
    projections ``exits``.

    The stream is switched only in passes for which ``wanted()`` is true. Return a function that restores the stream
    with equal numbers on all ranks (the *replicated* stream) after a pass that was interrupted.
    """
    saved: list[Tensor] = []
    # whether the saved state is from a recomputation, which itself restores the generator afterwards
    passing = [False]

    def into(module: nn.Module, args: tuple[Any, ...]) -> None:
        if module.training and wanted():
            passing[0] = recomputing()
            # `module` may be a dropout, without parameters
            saved[:] = [_switch(_generator_of(exits[0]), rank)]

    def back(module: nn.Module, args: tuple[Any, ...]) -> None:
        if saved:
            _generator_of(module).set_state(saved.pop())

    def restore() -> None:
        if saved and not passing[0]:
            _generator_of(exits[0]).set_state(saved[0])
        saved.clear()

    block.register_forward_pre_hook(into)
    for module in exits:
        module.register_forward_pre_hook(back)
    return restore


class LayerRandom:
    """Switch random streams in a layer whose hidden states are sharded along the sequence.

    The layer draws from the *cut* stream, which differs between tensor ranks. Only from a block's row projection to the
    end of the block, activations are partial sums of all tokens, which need equal dropout masks on all ranks, so their
    numbers come from a third stream. It is derived from the part of the seed that all ranks' cut streams have in
    common. A recomputation may start after the layer's hooks, and then only the cut stream is available.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        # state at which the replicated stream continues after this layer
        self._after: Tensor | None = None
        # the block, and the state at which the cut stream continues after the block
        self._cut: tuple[str, Tensor] | None = None
        self._generator: torch.Generator | None = None

    def reset(self) -> None:
        """Restore the random stream with equal numbers on all tensor ranks after a layer that raised, and drop the
        state of a recomputed layer.
        """
        self.leave_layer()
        self._cut = None

    def enter_layer(self, layer: nn.Module) -> None:
        """Switch to random numbers that differ between tensor ranks, for a layer in which each rank has
        its own tokens.
        """
        if layer.training:
            self._generator = _generator_of(layer)
            after = _switch(self._generator, self.rank)
            # A recomputation restores the generator itself.
            self._after = None if recomputing() else after

    def leave_layer(self) -> None:
        """Switch back to random numbers that are equal on all tensor ranks, after a layer that each rank ran on its own
        tokens.
        """
        if self._after is not None and self._generator is not None:
            self._generator.set_state(self._after)
            self._after = None

    def enter_sums(self, row: nn.Module, block: str) -> None:
        """Switch to random numbers that are equal on all tensor ranks, for dropout on the partial sums
        of all tokens.
        """
        if row.training and (self._cut is None or self._cut[0] != block):
            self._generator = generator = _generator_of(row)
            self._cut = block, generator.get_state()
            generator.manual_seed(derive_seed(str(generator.initial_seed() // _RANKS), block))

    def leave_sums(self) -> None:
        """Switch back to random numbers that differ between tensor ranks, for dropout on this rank's tokens."""
        if self._cut is not None and self._generator is not None:
            self._generator.set_state(self._cut[1])
            self._cut = None


def drop_own(dropout: Derive, x: Tensor, rank: int) -> Tensor:
    """Apply dropout to a sharded activation with a mask of this rank only, in code whose random numbers are equal on
    all tensor ranks.
    """
    generator = default_generator(x.device)
    after = _switch(generator, rank)
    try:
        return dropout(x)
    finally:
        generator.set_state(after)


def drop_again(dropout: Derive, x: Tensor, key: str) -> Derive:
    """Return a dropout function for the replicated activation ``x``, in code whose random numbers differ between tensor
    ranks.

    The function draws the same mask in every call and on all ranks.
    """
    seed = derive_seed(str(default_generator(x.device).initial_seed() // _RANKS), key)

    def drop(x: Tensor) -> Tensor:
        generator = default_generator(x.device)
        after = generator.get_state()
        generator.manual_seed(seed)
        try:
            return dropout(x)
        finally:
            generator.set_state(after)

    return drop


def drawn_again(x: Tensor, drop: Derive) -> Tensor:
    """Return ``drop(x)``, and in the backward pass draw its mask again instead of saving it.

    Dropout multiplies each entry, and the gradient of the entry, by a number drawn in memory order. ``drop`` must draw
    the same numbers in every call.
    """

    def draw(x: Tensor) -> Tensor:
        return drop(x.contiguous())

    return apply_mapping(x, draw, draw)


def _switch(generator: torch.Generator, rank: int) -> Tensor:
    """Seed the generator from its state and ``rank``, so that tensor ranks draw different numbers; return the state to
    restore afterwards.
    """
    # Draw one number, so that the next region gets another seed even if nothing is drawn in between.
    torch.empty(1, device=generator.device).uniform_(generator=generator)
    state = generator.get_state()
    generator.manual_seed(derive_seed(state, "cut") // _RANKS * _RANKS + rank)
    return state


def _generator_of(module: nn.Module) -> torch.Generator:
    return default_generator(next(module.parameters()).device)


def agree_on_replicated_stream(mesh: Mesh) -> None:
    """Broadcast the generator state of each tensor group's first rank, then reseed per batch and pipeline stage.

    Without reseeding, ranks with different batches or stages would draw the same masks. Ranks of the first batch on
    stage 0 keep the state, so they draw the same masks as a single process.
    """
    group = mesh.tp_group
    # Some models also draw from the CPU generator when they run on a GPU (LayerDrop).
    for device in dict.fromkeys((torch.device("cpu"), mesh.device)):
        generator = default_generator(device)
        state = (
            generator.get_state()
            if group is None
            else take_first_state(generator, group, mesh.device)
        )
        if mesh.data_rank > 0 or mesh.pp_rank > 0:
            place = (
                mesh.data_rank
                if mesh.pp_rank == 0
                else f"{mesh.data_rank}, stage {mesh.ranks['pp']}"
            )
            generator.manual_seed(derive_seed(state, place))


def default_generator(device: torch.device) -> torch.Generator:
    """Return torch's default generator of ``device``."""
    if is_accelerator(device):
        module = device_module(device)
        module.init()
        return module.default_generators[device.index or 0]
    return torch.default_generator


def take_first_state(
    generator: torch.Generator, group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """Set a generator to its state on the group's first rank, and return this state; tensors are sent on ``device``."""
    state = generator.get_state().to(device)
    dist.broadcast(state, group=group, group_src=0)
    state = state.cpu()
    generator.set_state(state)
    return state


def derive_seed(source: Tensor | str, key: int | str) -> int:
    """Return a seed derived from ``key`` and ``source``, a generator's state or a string."""
    content = source.encode() if isinstance(source, str) else source.cpu().numpy().tobytes()
    digest = hashlib.blake2b(
        content,
        key=hashlib.blake2b(str(key).encode(), digest_size=32).digest(),
        digest_size=8,
    )
    return int.from_bytes(digest.digest(), "little") >> 1


def install_generate(model: Any, mesh: Mesh) -> None:
    """Make ``model.generate`` sample the same tokens on all tensor ranks.

    Do nothing if there is one tensor rank, or if the model has no ``generate``.
    """
    group, generate = mesh.tp_group, getattr(model, "generate", None)
    if group is None or generate is None:
        return

    @functools.wraps(generate)
    def generate_alike(*args: Any, **kwargs: Any) -> Any:
        for device in dict.fromkeys((torch.device("cpu"), mesh.device)):
            take_first_state(default_generator(device), group, mesh.device)
        return generate(*args, **kwargs)

    model.generate = generate_alike
