"""Random streams under tensor parallelism (dropout).

Two streams of random numbers per rank. The *replicated* one is torch's default generator: replicated activations must
get the same mask on every tensor rank, so all ranks of a tensor group draw the same numbers from it; ranks with
different batches draw different ones. The *cut* one is for sharded activations (attention weights; under sequence
parallelism everything between the blocks): each rank draws different numbers.

The cut stream is not stored: on entering a cut region its seed is derived from the state of the replicated stream and
the tensor rank, and on leaving the replicated stream goes on where it was. Whatever restores the default generator
(activation checkpointing, a resumed run) therefore restores both.

=================  ==========================  ===========================================
within a layer     full hidden states          sharded along the sequence
=================  ==========================  ===========================================
between blocks     replicated                  cut
block, before row  cut                         cut
block, after row   replicated (partial sums)   derived from the layer's replicated state
=================  ==========================  ===========================================

``generate()`` runs on every rank of a tensor group and must pick the same tokens. Logits are equal on all ranks, so
greedy search agrees by itself; before it samples, rank 0's generator state is broadcast, however ranks were seeded.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..._compat.torch_device import device_module, is_accelerator
from ...distributed.mesh import Mesh
from ...distributed.ops.collectives import apply_mapping
from ...distributed.ops.overlap import Derive
from ...train.runtime import recomputing

_RANKS = 1 << 16  # seeds of the cut streams of one region differ below this


def cut_region(
    block: nn.Module,
    exits: Sequence[nn.Module],
    rank: int,
    wanted: Callable[[], bool],
) -> Callable[[], None]:
    """Use the cut stream from ``block`` (if ``wanted``) to its row projections; return what puts the other back."""
    saved: list[torch.Tensor] = []
    passing = [False]  # what is saved is a recomputation's, which puts back what it found by itself

    def into(module: nn.Module, args: tuple[Any, ...]) -> None:
        if module.training and wanted():
            passing[0] = recomputing()
            saved[:] = [_switch(_generator_of(exits[0]), rank)]  # `module` may be a mere dropout

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
    """Switch random streams in a layer cut along the sequence (last column of the table above). The stream for partial
    sums is derived from the seed that cut streams share, since recomputation may start behind hooks, with that alone.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        # Where the replicated stream goes on after this layer.
        self._after: torch.Tensor | None = None
        # Where the cut stream goes on after this block.
        self._cut: tuple[str, torch.Tensor] | None = None
        self._generator: torch.Generator | None = None

    def reset(self) -> None:
        """Restore the replicated stream after a layer that raised, and drop the state of a recomputed one."""
        if self._after is not None and self._generator is not None:
            self._generator.set_state(self._after)
        self._after = self._cut = None

    def enter_layer(self, layer: nn.Module) -> None:
        """Switch to the cut random stream."""
        if layer.training:
            self._generator = _generator_of(layer)
            after = _switch(self._generator, self.rank)
            # A recomputation puts back what it found by itself.
            self._after = None if recomputing() else after

    def leave_layer(self, layer: nn.Module) -> None:
        """Switch back to the replicated random stream."""
        if self._after is not None:
            _generator_of(layer).set_state(self._after)
            self._after = None

    def enter_sums(self, row: nn.Module, block: str) -> None:
        """Draw equal numbers on all tensor ranks, for partial sums of all tokens."""
        if row.training and (self._cut is None or self._cut[0] != block):
            self._generator = generator = _generator_of(row)
            self._cut = block, generator.get_state()
            generator.manual_seed(derive_seed(str(generator.initial_seed() // _RANKS), block))

    def leave_sums(self) -> None:
        """Switch back to the cut random stream, for this rank's tokens."""
        if self._cut is not None and self._generator is not None:
            self._generator.set_state(self._cut[1])
            self._cut = None


def drop_own(
    dropout: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, rank: int
) -> torch.Tensor:
    """Apply dropout to a sharded activation while the replicated stream is in use: each rank draws its own mask."""
    generator = default_generator(x.device)
    after = _switch(generator, rank)
    try:
        return dropout(x)
    finally:
        generator.set_state(after)


def drop_again(
    dropout: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, key: str
) -> Derive:
    """Return dropout of the replicated ``x`` under a cut stream: at any time, on all ranks, with the same mask."""
    seed = derive_seed(str(default_generator(x.device).initial_seed() // _RANKS), key)

    def drop(x: torch.Tensor) -> torch.Tensor:
        generator = default_generator(x.device)
        after = generator.get_state()
        generator.manual_seed(seed)
        try:
            return dropout(x)
        finally:
            generator.set_state(after)

    return drop


def drawn_again(x: torch.Tensor, drop: Derive) -> torch.Tensor:
    """Return ``drop(x)``, and draw its mask again in the backward pass instead of keeping it: dropout multiplies each
    entry, and its gradient, by a number drawn in memory order. ``drop`` draws the same numbers whenever it is called.
    """

    def draw(x: torch.Tensor) -> torch.Tensor:
        return drop(x.contiguous())

    return apply_mapping(x, draw, draw)


def _switch(generator: torch.Generator, rank: int) -> torch.Tensor:
    """Seed the generator for ``rank`` from its own state, and return the state to restore afterwards."""
    # Draw one number, so that the next region gets another seed even if nothing is drawn in between.
    torch.empty(1, device=generator.device).uniform_(generator=generator)
    state = generator.get_state()
    generator.manual_seed(derive_seed(state, "cut") // _RANKS * _RANKS + rank)
    return state


def _generator_of(module: nn.Module) -> torch.Generator:
    return default_generator(next(module.parameters()).device)


def agree_on_replicated_stream(mesh: Mesh) -> None:
    """Broadcast the generator state of a tensor group's first rank, then reseed for each batch and pipeline stage, or
    all would draw the same masks. Batch 0 on stage 0 keeps its state, so that it draws the masks of one process.
    """
    group = mesh.tp_group
    # Some models draw from the CPU generator on a GPU too (LayerDrop).
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
) -> torch.Tensor:
    """Set a generator to the state that it has on the group's first rank, sent by ``device``, and return that."""
    state = generator.get_state().to(device)
    dist.broadcast(state, group=group, group_src=0)
    state = state.cpu()
    generator.set_state(state)
    return state


def derive_seed(source: torch.Tensor | str, key: int | str) -> int:
    """Return a seed made of a key and a generator's state or a string."""
    content = source.encode() if isinstance(source, str) else source.cpu().numpy().tobytes()
    digest = hashlib.blake2b(
        content,
        key=hashlib.blake2b(str(key).encode(), digest_size=32).digest(),
        digest_size=8,
    )
    return int.from_bytes(digest.digest(), "little") >> 1


def install_generate(model: Any, mesh: Mesh) -> None:
    """Make ``model.generate`` sample the same tokens on all tensor ranks. Do nothing for one rank, or without it."""
    group, generate = mesh.tp_group, getattr(model, "generate", None)
    if group is None or generate is None:
        return

    @functools.wraps(generate)
    def generate_alike(*args: Any, **kwargs: Any) -> Any:
        for device in dict.fromkeys((torch.device("cpu"), mesh.device)):
            take_first_state(default_generator(device), group, mesh.device)
        return generate(*args, **kwargs)

    model.generate = generate_alike
