"""The contents of a plan, and the lookups that other modules make in it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
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
    """Hold the decisions, numbers and names alone, of one feature of a layout, beyond cuts and reductions of
    parameters. The part that runs it gets them by class from :meth:`PlanContents.feature`; tables and programs read all
    of them.
    """

    def describe(self, plan: "PlanContents") -> list[str]:
        """Return the lines about this feature below the plan's table; none by default."""
        return []

    @property
    def batch_fields(self) -> tuple[BatchField, ...]:
        """Name what this feature adds to the arguments of a pass, and takes out before the stock model is called."""
        return ()

    def fill(self, batch: Mapping[str, Any], shift: int) -> "dict[str, Tensor]":
        """Return the values of :attr:`batch_fields` that follow from a batch of full sequences, before it is cut; a
        label is ``shift`` behind the token that predicts it.
        """
        return {}

    @property
    def optional_layers(self) -> tuple[str, ...]:
        """Return the layers that evaluation leaves out, the last ones of the model."""
        return ()

    @property
    def run_whole(self) -> tuple[str, ...]:
        """Return the modules that run on full sequences, though each rank has a part of them."""
        return ()

    @property
    def adds_loss(self) -> str:
        """Return the option, in words, by which this feature adds to the model's own loss; empty where it does not."""
        return ""


FeatureT = TypeVar("FeatureT", bound=Feature)


@dataclass(frozen=True)
class PlanContents:
    """Hold a model under a layout: parameters, layers, blocks, stages and features. It is computed once, on the meta
    device (:func:`hfscale.api.build_plan.build_plan`), and read by everything else.
    """

    family: str  # ``config.model_type``
    layout: ParallelConfig  # the sizes it was made for
    # Every parameter, in the model's order, tied ones included.
    parameters: tuple[ParameterPlan, ...]
    layers: tuple[str, ...]  # names of the layers, in order; an encoder's before its decoder's
    blocks: tuple[BlockPlan, ...]  # the tensor-parallel blocks; empty where ``tp_size`` is 1
    embedding: str | None  # name of the vocabulary-parallel embedding, if cut
    head: str | None  # name of the output projection onto the vocabulary, if the loss runs on it
    # Transformers' name of the loss, if it is :data:`hfscale.models.module_kinds.SHIFTED`.
    loss: str | None
    # the layer stacks whose hidden states are cut along the sequence, under sequence parallelism
    sequence_regions: tuple[SequencePlan, ...] = ()
    # the decisions of all other features of the layout, one entry each (:meth:`feature`)
    features: tuple[Feature, ...] = ()
    experts: tuple[
        ExpertsPlan, ...
    ] = ()  # the experts that are spread over ranks; empty where ``ep_size`` is 1
    mixtures: tuple[ExpertsPlan, ...] = ()  # the experts of every mixture, spread or not
    # Where the blueprint of its blocks comes from, in words; empty where there are none.
    source: str = ""
    # Why ``train_step`` cannot run the model's loss, in words; empty where it can.
    no_step: str = ""
    # Name of the embedding that every token is looked up in, cut or not, where there is one.
    lookup: str | None = None
    stages: StagePlan | None = None  # the pipeline stages; ``None`` where ``pp_size`` is 1
    # Which weights are loaded in 4 or 8 bits; ``None`` where none are.
    quantized: QuantizedPlan | None = None
    adapters: tuple[
        AdapterParameter, ...
    ] = ()  # the parameters of adapters, which come last in ``parameters``

    @cached_property
    def batch_fields(self) -> dict[str, BatchField]:
        """Return what features add to the arguments of a pass, by name."""
        return {field.name: field for feature in self.features for field in feature.batch_fields}

    @property
    def optional_layers(self) -> tuple[str, ...]:
        """Return the layers that evaluation leaves out, the last ones of the model."""
        return tuple(layer for feature in self.features for layer in feature.optional_layers)

    @property
    def run_whole(self) -> tuple[str, ...]:
        """Return the modules that run on full sequences, though each rank has a part of them."""
        return tuple(name for feature in self.features for name in feature.run_whole)

    @property
    def adds_loss(self) -> str:
        """Return the options, in words, by which features add to the model's own loss; empty where none does."""
        return ", ".join(feature.adds_loss for feature in self.features if feature.adds_loss)

    @property
    def quantized_weights(self) -> tuple[str, ...]:
        """Names of the parameters that are held in 4 or 8 bits, or as stored."""
        return () if self.quantized is None else self.quantized.weights

    @cached_property
    def by_name(self) -> dict[str, ParameterPlan]:
        """Parameters by name."""
        return {parameter.name: parameter for parameter in self.parameters}

    @property
    def lookup_shape(self) -> tuple[int, int] | None:
        """The number of tokens and the width of :attr:`lookup`."""
        table = self.by_name.get(f"{self.lookup}.weight")
        return None if table is None else (table.shape[0], table.shape[1])

    @cached_property
    def of_layers(self) -> dict[str, tuple[ParameterPlan, ...]]:
        """The parameters in each layer, including those of its adapters."""
        depths = {layer.count(".") + 1 for layer in self.layers}
        by_layer: dict[str, list[ParameterPlan]] = {layer: [] for layer in self.layers}
        for parameter in self.parameters:
            parts = parameter.name.split(".")
            for depth in depths:
                by_layer.get(".".join(parts[:depth]), []).append(parameter)
        return {layer: tuple(parameters) for layer, parameters in by_layer.items()}

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """Numbers of consecutive tensor ranks that hold the same chunk of some parameter, ascending, without 1."""
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
        """Return the decisions of the feature of class ``kind``, or ``None`` if the layout does not use it."""
        return next((feature for feature in self.features if isinstance(feature, kind)), None)

    def is_local(self, rank: int, name: str) -> bool:
        """Return whether pipeline rank ``rank`` holds a parameter or module, which must not be on every stage."""
        return self.stages is None or any(
            stage.is_local(name) for stage in self.stages.of_rank(rank)
        )

    def local_names(self, rank: int) -> dict[str, str]:
        """Map owned parameters of pipeline rank ``rank`` to names there, which differ where it has only a tied copy."""
        if rank not in self._local_names:
            names: dict[str, str] = {}
            for parameter in self.parameters:
                if self.is_local(rank, parameter.name):
                    names.setdefault(parameter.tied_to or parameter.name, parameter.name)
            self._local_names[rank] = names
        return self._local_names[rank]

    @cached_property
    def _local_names(self) -> dict[int, dict[str, str]]:
        return {}

    def primary_rank(self, name: str) -> int:
        """Return the pipeline rank of the primary stage of an owned parameter, which counts and saves it."""
        return 0 if self.stages is None else self.stages.ranks[self._stages_with(name)[0]]

    def holders(self, name: str) -> tuple[int, ...]:
        """Return all pipeline ranks that hold an owned parameter, ascending."""
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
        """The number of entries of all parameters, tied ones once."""
        return sum(prod(planned.shape) for planned in self.owned())

    def owned(self) -> tuple[ParameterPlan, ...]:
        """Return the parameters without the second names of tied tensors."""
        return self._owned

    @cached_property
    def _owned(self) -> tuple[ParameterPlan, ...]:
        return tuple(parameter for parameter in self.parameters if parameter.tied_to is None)
