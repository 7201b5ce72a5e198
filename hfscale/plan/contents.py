"""Hold the fields of a plan, with functions that look up parameters, layers and ranks in them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from ..config.parallel import ParallelConfig
from .batch_fields import BatchField
from .modules import AdapterParameter, BlockPlan, ExpertsPlan, SequencePlan
from .parameter import ParameterPlan
from .quantized import QuantizedPlan
from .stages import StagePlan

if TYPE_CHECKING:  # a plan is data: nothing here computes
    from torch import Tensor


@dataclass(frozen=True)
class Feature:
    """Hold what is planned for one feature of a layout (recomputation, offload ...), as numbers and names.

    How parameters are sharded is planned elsewhere, in :class:`ParameterPlan`. Code that runs the feature gets this
    object from :meth:`PlanContents.feature`, by its class. Tables and programs read these objects of all features.
    """

    def describe(self, plan: "PlanContents") -> list[str]:
        """Return the lines that the plan's table prints about this feature; none by default."""
        return []

    @property
    def batch_fields(self) -> tuple[BatchField, ...]:
        """Return the arguments that this feature adds to a forward pass, and removes before the stock model's
        forward.
        """
        return ()

    def fill(self, batch: Mapping[str, Any], shift: int) -> "dict[str, Tensor]":
        """Return the values of :attr:`batch_fields`, computed from a batch of full sequences before it is sharded. The
        label of a token is the token ``shift`` positions later.
        """
        return {}

    @property
    def optional_layers(self) -> tuple[str, ...]:
        """Return the names of the layers that run only in training; they are the last layers of the model."""
        return ()

    @property
    def run_whole(self) -> tuple[str, ...]:
        """Return the modules that every context-parallel rank runs on full sequences."""
        return ()

    @property
    def adds_loss(self) -> str:
        """Return the option by which this feature adds a term to the model's loss, in words; empty if it adds none."""
        return ""


FeatureT = TypeVar("FeatureT", bound=Feature)


@dataclass(frozen=True)
class PlanContents:
    """Hold the plan of a model under a layout: parameters, layers, blocks, stages and features. It is computed once, on
    the meta device, by :func:`hfscale.api.build_plan.build_plan`. All other code reads it.
    """

    family: str  # ``config.model_type``
    layout: ParallelConfig  # the layout of this plan
    # All parameters, in the model's order, including both names of tied parameters.
    parameters: tuple[ParameterPlan, ...]
    # Names of the layers, in order; an encoder's layers come before its decoder's
    layers: tuple[str, ...]
    blocks: tuple[BlockPlan, ...]  # the tensor-parallel blocks; empty if ``tp_size`` is 1
    embedding: str | None  # name of the vocabulary-parallel embedding, if it is sharded
    head: str | None  # name of the output projection onto the vocabulary, if the loss runs on it
    # transformers' name of the loss, if the loss is one of :data:`hfscale.models.module_kinds.SHIFTED`
    loss: str | None
    # the layer stacks whose hidden states are sharded along the sequence, under sequence parallelism
    sequence_regions: tuple[SequencePlan, ...] = ()
    # the plans of all other features of the layout, one entry each (:meth:`feature`)
    features: tuple[Feature, ...] = ()
    experts: tuple[
        ExpertsPlan, ...
    ] = ()  # the MoE layers whose experts are sharded over expert ranks; empty if ``ep_size`` is 1
    mixtures: tuple[ExpertsPlan, ...] = ()  # all MoE layers, with sharded experts or not
    # where the blueprint of the blocks comes from, in words; empty if there are no blocks
    source: str = ""
    # why ``train_step`` cannot run the model's loss, in words; empty if it can
    no_step: str = ""
    # name of the embedding of input tokens, sharded or not; ``None`` if there is no such embedding
    lookup: str | None = None
    stages: StagePlan | None = None  # the pipeline stages; ``None`` if ``pp_size`` is 1
    # the weights that are held quantized; ``None`` if there are no such weights
    quantized: QuantizedPlan | None = None
    adapters: tuple[
        AdapterParameter, ...
    ] = ()  # the parameters of adapters, which are the last entries of ``parameters``

    @cached_property
    def batch_fields(self) -> dict[str, BatchField]:
        """The arguments that features add to a forward pass, by name."""
        return {field.name: field for feature in self.features for field in feature.batch_fields}

    @property
    def optional_layers(self) -> tuple[str, ...]:
        """The names of the layers that run only in training; they are the last layers of the model."""
        return tuple(layer for feature in self.features for layer in feature.optional_layers)

    @property
    def run_whole(self) -> tuple[str, ...]:
        """Return the modules that every context-parallel rank runs on full sequences."""
        return tuple(name for feature in self.features for name in feature.run_whole)

    @property
    def adds_loss(self) -> str:
        """The options by which features add terms to the model's loss, in words; empty if no feature does."""
        return ", ".join(feature.adds_loss for feature in self.features if feature.adds_loss)

    @property
    def quantized_weights(self) -> tuple[str, ...]:
        """Names of the parameters that are quantized."""
        return () if self.quantized is None else self.quantized.weights

    @cached_property
    def by_name(self) -> dict[str, ParameterPlan]:
        """The plan of each parameter, by the parameter's name."""
        return {parameter.name: parameter for parameter in self.parameters}

    @cached_property
    def lookup_shape(self) -> tuple[int, int] | None:
        """The shape of the weight of the input embedding: vocabulary size and width; ``None`` if there is no such
        embedding.
        """
        table = self.by_name.get(f"{self.lookup}.weight")
        return None if table is None else (table.shape[0], table.shape[1])

    @cached_property
    def of_layers(self) -> dict[str, tuple[ParameterPlan, ...]]:
        """The plans of the parameters in each layer, by the layer's name, including those of adapters."""
        depths = {layer.count(".") + 1 for layer in self.layers}
        by_layer: dict[str, list[ParameterPlan]] = {layer: [] for layer in self.layers}
        for parameter in self.parameters:
            parts = parameter.name.split(".")
            for depth in depths:
                by_layer.get(".".join(parts[:depth]), []).append(parameter)
        return {layer: tuple(parameters) for layer, parameters in by_layer.items()}

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """The numbers, above 1, of consecutive tensor ranks that hold the same shard of some parameter; ascending, each
        once.
        """
        return tuple(
            sorted(
                {
                    count
                    for p in self.parameters
                    for cut in p.cuts
                    for count in cut.replicas
                    if count > 1
                }
            )
        )

    @cached_property
    def ties(self) -> tuple[tuple[int, ...], ...]:
        """Sets of pipeline ranks that hold the same tied tensor, each set once, in order."""
        if self.stages is None:
            return ()
        ranks = {
            tuple(sorted({self.stages.ranks[stage] for stage in tie.stages}))
            for tie in self.stages.ties
        }
        return tuple(sorted(members for members in ranks if len(members) > 1))

    @cached_property
    def neighbours(self) -> tuple[tuple[int, int], ...]:
        """Pairs of pipeline ranks that hold consecutive stages, each pair once, in order."""
        ranks = () if self.stages is None else self.stages.ranks
        return tuple(
            sorted(
                {
                    (
                        min(a, b),
                        max(a, b),
                    )
                    for a, b in pairwise(ranks)
                    if a != b
                }
            )
        )

    def feature(self, kind: type[FeatureT]) -> FeatureT | None:
        """Return the plan of the feature of class ``kind``, or ``None`` if the layout does not use the feature."""
        return next((feature for feature in self.features if isinstance(feature, kind)), None)

    def is_local(self, rank: int, name: str) -> bool:
        """Return whether pipeline rank ``rank`` holds the parameter or module ``name``. Do not call it for modules that
        are on every stage.
        """
        return self.stages is None or any(
            stage.is_local(name) for stage in self.stages.of_rank(rank)
        )

    def local_names(self, rank: int) -> dict[str, str]:
        """Return the names of the parameters that pipeline rank ``rank`` holds: from the name in the plan to the name
        on this rank.

        A tied tensor has its first name in the plan. On a rank that holds it only under its second name, the name
        differs.
        """
        if rank not in self._local_names:
            names: dict[str, str] = {}
            for parameter in self.parameters:
                if self.is_local(rank, parameter.name):
                    names.setdefault(parameter.first_name, parameter.name)
            self._local_names[rank] = names
        return self._local_names[rank]

    @cached_property
    def _local_names(self) -> dict[int, dict[str, str]]:
        return {}

    def primary_rank(self, name: str) -> int:
        """Return the pipeline rank that counts and saves parameter ``name``: the rank of the first stage that holds it.

        ``name`` is the first name of a tied tensor.
        """
        return 0 if self.stages is None else self.stages.ranks[self._stages_with(name)[0]]

    def holders(self, name: str) -> tuple[int, ...]:
        """Return all pipeline ranks that hold parameter ``name``, ascending; several ranks may hold a tied tensor."""
        return (
            (0,)
            if self.stages is None
            else tuple(sorted({self.stages.ranks[s] for s in self._stages_with(name)}))
        )

    def _stages_with(self, name: str) -> tuple[int, ...]:
        assert self.stages is not None
        tied = next((tie for tie in self.stages.ties if name in tie.names), None)
        return (self.by_name[name].stage,) if tied is None else tied.stages

    @property
    def parameter_count(self) -> int:
        """The number of entries of all parameters; tied parameters count once."""
        return sum(planned.numel for planned in self.owned())

    def owned(self) -> tuple[ParameterPlan, ...]:
        """Return each parameter once: a tied tensor under its first name."""
        return self._owned

    @cached_property
    def _owned(self) -> tuple[ParameterPlan, ...]:
        return tuple(parameter for parameter in self.parameters if parameter.tied_to is None)
