"""Tensor and sequence parallelism as parts: the blocks, the loss over a sharded vocabulary, and random streams."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from ..._compat.torch import has_gradient_hook
from ...train.runtime import Part, Runtime, local_tensor
from ...train.runtime.axes import SequenceAxis
from ...train.runtime.batches import Microbatch
from ...train.runtime.local_weights import LocalWeights
from .apply import install_edges
from .deferred_weights import Overlap
from .generate import install_generate
from .loss import install_loss
from .partial_gradients import PartialSums
from .random import agree_on_replicated_stream, on_first_training_pass
from .sequence_region import SequenceRegion


class TensorParallel(Part, SequenceAxis):
    """Cut the blocks over the tensor ranks, and with sequence parallelism the hidden states between them.

    Attributes:
        sums: sums partial gradients over the tensor ranks; ``None`` for one rank.
        regions: the layer stacks under sequence parallelism.
        overlaps: entries of blocks that overlap their collectives with weight gradients, by the block's name.
    """

    def __init__(self) -> None:
        self.sums: PartialSums | None = None
        self.regions: list[SequenceRegion] = []
        self.overlaps: dict[str, Overlap] = {}
        self._region_of: dict[str, SequenceRegion | None] = {}
        self._blocks: list[str] = []
        self._head: str | None = None

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Install hooks on the edges of blocks."""
        group = runtime.mesh.tp_group
        if group is not None:
            runtime.sequence = self
            self._blocks, self._head = [block.name for block in runtime.plan.blocks], runtime.plan.head
            self.sums = PartialSums(group)
            self.regions = [SequenceRegion(planned, group) for planned in runtime.plan.sequence_regions]
            install_edges(runtime, self.sums, self.regions, self.region_of, self.overlaps)

    def region_of(self, name: str) -> SequenceRegion | None:
        """Return the sequence-parallel region that a module in the layers belongs to; ``None`` if it is in none."""
        if name not in self._region_of:  # layers ask in every pass
            inside = (r for r in self.regions if any(f"{name}.".startswith(f"{layer}.") for layer in r.plan.layers))
            self._region_of[name] = next(inside, None)
        return self._region_of[name]

    def around_gradients(self, runtime: Runtime) -> AbstractContextManager[None]:
        """Sum gradients that are partial over the tensor ranks once, after the with block."""
        if self.sums is None:
            return nullcontext()
        partial = [parameter for planned, parameter in runtime.parameters() if "tp" in planned.partial]
        # A gradient hook (an optimizer that steps in backward) must see full gradients: sum them inside backward.
        if any(map(has_gradient_hook, partial)):
            return nullcontext()
        return self.sums.at_the_end([p for p in partial if p.requires_grad], local_tensor)

    def around_stage_pass(self, runtime: Runtime, arrives: int | None, leaves: bool) -> AbstractContextManager[None]:
        """Let hidden states arrive as shards of the sequence, and leave so."""
        for region in self.regions:
            region.passes(arrives, leaves)
        return nullcontext()

    def local_seqlen(self, tokens: int) -> int:
        """Return how many of ``tokens`` this rank has, under sequence parallelism fewer than all."""
        return self.regions[0].own_length(tokens) if self.regions else tokens

    def is_seq_sharded(self, module: str) -> bool:
        """Return whether the hidden states of ``module`` are cut along the sequence in this pass."""
        region = self.region_of(module)
        return region is not None and region.cut

    def local_view(self, module: str) -> str | None:
        """Return a sentence on how activations in ``module`` are local to this rank; ``None`` where they are not."""
        block = next((name for name in self._blocks if module.startswith(f"{name}.")), None)
        if block is not None:
            return (
                f"within {block} that is a share of the heads or columns, or a part of a sum over tensor ranks; a hook "
                f"on {block} itself sees the whole"
            )
        if module == self._head:
            return "that is a share of the vocabulary; call the model without labels for whole logits"
        if self.is_seq_sharded(module):
            return (
                "those are this rank's tokens, of the sequence that sequence_parallel cuts: what treats each token by "
                "itself is right, what mixes them or keeps them is not; sequence_parallel=False shows it all of them"
            )
        return None


class VocabularyLoss(Part):
    """Install the loss that training steps normalize, also where nothing is cut."""

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Install the loss, after the edges of blocks."""
        tensor = runtime.part(TensorParallel)
        loss = install_loss(runtime, tensor.regions if tensor is not None else [])
        runtime.loss = runtime.loss or loss


class RandomStreams(Part):
    """Make ranks that compute together draw equal random numbers, and other ranks different ones.

    Attributes:
        agreed: whether the ranks have synchronized their generators.
    """

    def __init__(self) -> None:
        self.agreed = False

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Install hooks on ``generate()`` and the first training pass, for training loops without ``train_step``."""
        install_generate(runtime.model, runtime.mesh)
        on_first_training_pass(runtime.model, lambda: self.synchronize(runtime))

    def synchronize(self, runtime: Runtime) -> None:
        """Agree on random streams once, before the first training step, after the user's seeding."""
        if not self.agreed:
            agree_on_replicated_stream(runtime.mesh)
            self.agreed = True

    def around_step(
        self, runtime: Runtime, microbatches: Sequence[Microbatch], train: bool
    ) -> AbstractContextManager[None]:
        """Agree on random streams before the first training step."""
        if train:
            self.synchronize(runtime)
        return nullcontext()
