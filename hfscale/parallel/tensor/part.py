"""Install tensor and sequence parallelism: the blocks, the loss over a sharded vocabulary, and random streams."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..._compat.torch import has_accumulation_hook, has_backward_hook, own_parameters
from ..._compat.transformers.added_layers import added_layers
from ...distributed.mesh import Mesh
from ...errors import ConfigError
from ...models.fields import partial_output
from ...models.module_kinds import follow_weight
from ...plan import BlockPlan, Plan
from ...plan.cut import share_evenly
from ...plan.feature_plans import recomputed
from ...plan.parameter import MODEL_AXES
from ...train.runtime import Part, Runtime
from ...train.runtime.batches import Microbatch
from ...train.runtime.parameter_names import owner_of
from ...train.runtime.runtime import RandomAxis, SequenceAxis
from ...train.runtime.shards import LocalWeights
from .edges import Overlap, install_block_edges, set_local_sizes
from .embedding import install_vocab_parallel_embedding
from .loss import install_loss
from .partial_gradients import PartialSums, install_partial_sums, install_replica_sums
from .random import agree_on_replicated_stream, install_generate

if TYPE_CHECKING:  # imported only with sequence parallelism
    from .sequence.region import SequenceRegion

_COUNTED: ContextVar[bool] = ContextVar("router_loss_counted", default=False)


def cut_parameters(model: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Replace every parameter that is sharded over the tensor or expert axis by this rank's shard.

    Tied parameters stay tied, and ``requires_grad`` is kept. The model may be on any device; on the meta device only
    shapes change.
    """
    replaced: dict[int, nn.Parameter] = {}
    for planned in plan.parameters:
        if not planned.model_cuts or not plan.is_local(mesh.pp_rank, planned.name):
            continue
        module, attribute = owner_of(model, planned.name)
        whole = getattr(module, attribute)
        if id(whole) not in replaced:
            share = planned.take(whole.detach(), mesh.ranks, axes=MODEL_AXES)
            share = share.clone() if share.device.type != "meta" else share.new_empty(share.shape)
            replaced[id(whole)] = nn.Parameter(share, requires_grad=whole.requires_grad)
        own_parameters(module)[attribute] = replaced[id(whole)]
        if attribute == "weight":
            follow_weight(module)


@contextmanager
def router_loss_counted_once() -> Iterator[None]:
    """Allow a tensor-parallel model to compute its router loss inside the ``with`` block.

    The caller must pass the loss through :func:`share_of_router_loss`, since all tensor ranks compute the same loss.
    """
    token = _COUNTED.set(True)
    try:
        yield
    finally:
        _COUNTED.reset(token)


def share_of_router_loss(loss: Tensor, ranks: int) -> Tensor:
    """Return ``loss`` with its gradient divided by ``ranks``, so that the sum of the gradients over tensor ranks counts
    the loss once.

    Every tensor rank computes the same loss.
    """
    share = loss / ranks
    return share + (loss - share).detach()


class TensorParallel(Part, SequenceAxis):
    """Shard the blocks over the tensor ranks and, with sequence parallelism, the hidden states between the blocks."""

    def __init__(self) -> None:
        # sums partial gradients over the tensor ranks; ``None`` with one tensor rank
        self.sums: PartialSums | None = None
        self.regions: list[SequenceRegion] = []
        # block name -> entry of the block, for blocks that overlap the entry's collective with weight gradients
        self.overlaps: dict[str, Overlap] = {}
        self._region_of: dict[str, SequenceRegion | None] = {}
        self._blocks: list[str] = []
        self._has_partial = False  # whether any gradient is partial over the tensor ranks
        self._head: str | None = None

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Install the collectives in a model that holds this rank's tensor shards."""
        model = runtime.model
        plan = runtime.plan
        mesh = runtime.mesh
        is_local = runtime.is_local
        group = mesh.tp_group
        if group is None:
            return
        runtime.sequence = self
        self._blocks = [block.name for block in plan.blocks]
        self._head = plan.head
        self.sums = PartialSums(group)
        self._has_partial = any("tp" in planned.partial for planned in plan.parameters)
        if plan.sequence_regions:
            from .sequence.hooks import install_sequence_hooks
            from .sequence.region import SequenceRegion

            self.regions = [SequenceRegion(planned, group) for planned in plan.sequence_regions]
            for region in self.regions:
                install_sequence_hooks(region, model, is_local)
        install_partial_sums(model, plan, self.sums, is_local, first=mesh.tp_rank == 0)
        for block in (block for block in plan.blocks if is_local(block.name)):
            set_local_sizes(model.get_submodule(block.name), block)
            overlap = self._overlap(runtime, block, self.sums)
            if overlap is not None:
                self.overlaps[block.name] = overlap
            install_block_edges(model, block, mesh, self.region_of(block.name), overlap)
        install_replica_sums(model, plan, mesh, is_local)
        if plan.blocks:
            model.register_forward_pre_hook(_refuse_partial_outputs, with_kwargs=True)
        if self.regions:
            model.register_forward_pre_hook(_refuse_cut_outputs, with_kwargs=True)
        lookups = {} if plan.embedding is None else {plan.embedding: self.regions}
        added = added_layers(model)
        if lookups and added is not None:
            lookups[added.lookup] = []
        for name in filter(is_local, lookups):
            planned = plan.by_name[f"{name}.weight"]
            install_vocab_parallel_embedding(
                model.get_submodule(name), planned, mesh, lookups[name]
            )

    def _overlap(self, runtime: Runtime, block: BlockPlan, sums: PartialSums) -> Overlap | None:
        plan = runtime.plan
        # Overlap needs one entry whose tensor all projections of the block read, so blocks with several entries have no
        # overlap. If projections are recomputed without the block's entry, the operands of weight gradients are
        # missing.
        again = tuple(f"{module}." for module in recomputed(plan).modules)
        alone = any(f"{name}.".startswith(again) for name in block.column)
        if alone or not plan.layout.overlap or len(block.enter) > 1 or block.enter_inputs:
            return None
        # The gradient of a replicated weight is summed in the backward pass, so its computation cannot be deferred.
        columns = [name for name in block.column if plan.by_name[f"{name}.weight"].replicas == 1]
        modules = [runtime.model.get_submodule(name) for name in columns]
        regather = bool(plan.layout.sequence_regather)
        return Overlap(modules, sums.group, regather)

    def region_of(self, name: str) -> "SequenceRegion | None":
        """Return the object that shards hidden states along the sequence in the stack of layers that contains module
        ``name``; ``None`` if hidden states are not sharded in this module.
        """
        if name not in self._region_of:  # cached, because layers call this in every pass
            inside = (
                r
                for r in self.regions
                if any(f"{name}.".startswith(f"{layer}.") for layer in r.plan.layers)
            )
            self._region_of[name] = next(inside, None)
        return self._region_of[name]

    def around_gradients(self, runtime: Runtime) -> AbstractContextManager[None]:
        """Sum gradients that are partial over the tensor ranks once, after the ``with`` block."""
        if self.sums is None or not self._has_partial:
            return nullcontext()
        partial = [
            parameter for planned, parameter in runtime.parameters() if "tp" in planned.partial
        ]
        # Gradient hooks (of an optimizer that steps in the backward pass) need full gradients, so each gradient is
        # summed in the backward pass.
        if any(has_backward_hook(p) or has_accumulation_hook(p) for p in partial):
            return nullcontext()
        return self.sums.at_the_end([p for p in partial if p.requires_grad])

    def around_stage_pass(
        self, runtime: Runtime, arrives: int | None, leaves: bool
    ) -> AbstractContextManager[None]:
        """Tell the layers of a pipeline stage, before its pass, whether the hidden states that it receives and sends
        are sharded along the sequence.
        """
        for region in self.regions:
            if not region.plan.alone:
                region.passes(arrives, leaves)
        return nullcontext()

    def local_seqlen(self, tokens: int) -> int:
        return (
            share_evenly(tokens, self.regions[0].size)[self.regions[0].rank]
            if self.regions
            else tokens
        )

    def is_seq_sharded(self, module: str) -> bool:
        region = self.region_of(module)
        return region is not None and region.cut

    def local_view(self, module: str) -> str | None:
        block = next((name for name in self._blocks if module.startswith(f"{name}.")), None)
        if block is not None:
            return (
                f"inside {block} it gets this rank's heads or columns, or a partial sum over tensor ranks; a hook "
                f"on {block} itself gets full tensors"
            )
        if module == self._head:
            return "it gets this rank's slice of the vocabulary; call the model without labels for full logits"
        if self.is_seq_sharded(module):
            return (
                "it gets this rank's tokens of a sequence cut by sequence_parallel: it may compute per token, but must "
                "not mix or keep tokens; with sequence_parallel=False it gets all tokens"
            )
        return None


def _refuse_partial_outputs(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    given = {**kwargs, "output_router_logits": False} if _COUNTED.get() else kwargs
    if asked := partial_output(model.config, given):
        raise ConfigError(
            f"over tensor ranks, {asked}: leave this option out, or load the model with tp_size=1"
        )


def _refuse_cut_outputs(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    wanted = kwargs.get("output_hidden_states")
    if torch.is_grad_enabled() and (
        model.config.output_hidden_states if wanted is None else wanted
    ):
        raise ConfigError(
            "output_hidden_states=True would return only this rank's tokens under sequence_parallel: ask for "
            "hidden states under torch.no_grad(), or use sequence_parallel=False"
        )


class VocabularyLoss(Part):
    """Install the cross entropy that training steps divide by their number of labels, even if the vocabulary is not
    sharded.
    """

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Make the cross entropy over a possibly sharded vocabulary the model's loss; call this after the
        collectives of the blocks are installed.
        """
        tensor = runtime.part(TensorParallel)
        loss = install_loss(runtime, tensor.regions if tensor is not None else [])
        runtime.loss = runtime.loss or loss


class RandomStreams(Part, RandomAxis):
    """Make ranks of one tensor group draw equal random numbers, and all other ranks different random numbers."""

    def __init__(self) -> None:
        self.agreed = False

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Install hooks on ``generate()`` and, for training loops without ``train_step``, on forward passes."""
        runtime.streams = self
        install_generate(runtime.model, runtime.mesh)

        def before(model: nn.Module, _: Any) -> None:
            if model.training and not self.agreed:
                self.synchronize(runtime)

        runtime.model.register_forward_pre_hook(before)

    def synchronize(self, runtime: Runtime) -> None:
        """Agree on random streams, if they are not yet :attr:`agreed`: after the user has seeded."""
        agree_on_replicated_stream(runtime.mesh)
        self.agreed = True

    def around_step(
        self, runtime: Runtime, microbatches: Sequence[Microbatch], train: bool
    ) -> AbstractContextManager[None]:
        if train and not self.agreed:
            self.synchronize(runtime)
        return nullcontext()
