"""Tensor and sequence parallelism as parts: the blocks, the loss over a sharded vocabulary, and random streams."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from ..._host.torch import has_gradient_hook
from ...runtime import Part, Runtime, local_tensor
from ...runtime.axes import SequenceAxis
from ...runtime.batches import Microbatch
from ...runtime.local_weights import LocalWeights
from .apply import install_edges
from .deferred_weights import Overlap
from .generate import install_generate
from .loss import install_loss
from .partial_gradients import PartialSums
from .random import agree_on_replicated_stream, on_first_training_pass
from .sequence_region import SequenceRegion


class TensorParallel(Part, SequenceAxis):
    """Tensor parallelism inside blocks, and sequence parallelism between them.

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
        """Install the collectives at the edges of blocks."""
        group = runtime.mesh.tp_group
        if group is not None:
            runtime.sequence = self
            self._blocks, self._head = [block.name for block in runtime.plan.blocks], runtime.plan.head
            self.sums = PartialSums(group)
            self.regions = [SequenceRegion(planned, group) for planned in runtime.plan.sequence_regions]
            install_edges(runtime, self.sums, self.regions, self.region_of, self.overlaps)

    def region_of(self, name: str) -> SequenceRegion | None:
        """Return the region of sequence parallelism that a module of the layers is in, if any."""
        if name not in self._region_of:  # layers ask in every pass
            inside = (r for r in self.regions if any(f"{name}.".startswith(f"{layer}.") for layer in r.plan.layers))
            self._region_of[name] = next(inside, None)
        return self._region_of[name]

    def around_gradients(self, runtime: Runtime) -> AbstractContextManager[None]:
        """Leave partial gradients unsummed inside the with block; sum them over the tensor ranks once at its end."""
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
        """Return how many of ``tokens`` per sample this rank has between blocks."""
        return self.regions[0].own_length(tokens) if self.regions else tokens

    def is_seq_sharded(self, module: str) -> bool:
        """Return whether the module's hidden states are sharded along the sequence in this pass."""
        region = self.region_of(module)
        return region is not None and region.cut

    def local_view(self, module: str) -> str | None:
        """Describe what a module sees here: columns or partial sums in blocks, this rank's tokens between them."""
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
    """The loss that training steps normalize; installed for any layout."""

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Install the loss. Must follow :class:`TensorParallel`."""
        tensor = runtime.part(TensorParallel)
        runtime.loss = install_loss(runtime, tensor.regions if tensor is not None else [])


class RandomStreams(Part):
    """Random streams: equal on the tensor ranks of a batch, different for other batches and stages.

    Attributes:
        agreed: whether the ranks have synchronized their generators.
    """

    def __init__(self) -> None:
        self.agreed = False

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Hook ``generate()``, and the model's first training pass, for plain loops without ``train_step``."""
        install_generate(runtime.model, runtime.mesh)
        on_first_training_pass(runtime.model, lambda: self.synchronize(runtime))

    def synchronize(self, runtime: Runtime) -> None:
        """Synchronize the ranks' generators once, before the first training step, when the user has seeded."""
        if not self.agreed:
            agree_on_replicated_stream(runtime.mesh)
            self.agreed = True

    def around_step(
        self, runtime: Runtime, microbatches: Sequence[Microbatch], train: bool
    ) -> AbstractContextManager[None]:
        """Synchronize the ranks' generators before the first training step."""
        if train:
            self.synchronize(runtime)
        return nullcontext()
