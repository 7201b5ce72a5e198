"""The plan: frozen data that says what becomes of every parameter of a model under a layout.

It is computed once (:func:`hfscale.plan.build.build_plan`), on the meta device, and read by everything else: the
loader, the patcher, gradient sync, norm clipping, the checkpoint writer and the printed table.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from ..config import ParallelConfig
from .cut import Cut, cut_shape, narrow_spans
from .stages import StagePlan

if TYPE_CHECKING:
    from .quantized import QuantizedPlan

MODEL_AXES = ("ep", "tp")
"""The axes whose cuts change the shapes of a model's parameters."""

LOSSES = {"ForCausalLM": 1}
"""Losses over the vocabulary that can run on cut logits -> how many positions the labels are shifted by."""


def wild_name(name: str) -> str:
    """``model.layers.3.mlp`` -> ``model.layers.*.mlp``: one line speaks for every layer."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


@dataclass(frozen=True)
class ParameterPlan:
    """What becomes of one parameter.

    Attributes:
        name: its name in the stock model.
        shape: its global shape.
        dtype: its type.
        stage: the pipeline stage that holds it; the first, where several hold the module.
        cuts: how it is cut between ranks, in order (tensor first, then sharded data).
        partial: axes over which each rank holds only a part of the gradient, so that the parts must be summed.
        tied_to: the name of the parameter it is the same tensor as.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stage: int = 0
    cuts: tuple[Cut, ...] = ()
    partial: tuple[str, ...] = ()
    tied_to: str | None = None

    def local_shape(self, ranks: dict[str, int]) -> tuple[int, ...]:
        """Its shape on the rank at coordinates ``ranks`` (axis -> rank)."""
        return cut_shape(self.shape, self.cuts, ranks)

    @property
    def copies(self) -> int:
        """How many ranks hold the same share of it, or of its most widely held part; each sees a part of its gradient.

        They are consecutive ranks of the axis of the cut, and the parts must be summed over them.
        """
        return max((cut.most_copies for cut in self.cuts), default=1)

    def counted(self, ranks: dict[str, int]) -> tuple[int, list[tuple[int, int]]] | None:
        """What of the share at ``ranks`` counts in a sum over all ranks, in which every entry must count once.

        Returns:
            a dim of the share and the ``(start, stop)`` along it of which this rank holds the first copy; ``None``
            where it holds the first, or the only, copy of everything.
        """
        copied = next((index for index, cut in enumerate(self.cuts) if cut.most_copies > 1), None)
        if copied is None:
            return None
        cut = self.cuts[copied]
        rank = ranks.get(cut.axis, 0)
        length = cut_shape(self.shape, self.cuts[:copied], ranks)[cut.dim]
        spans = cut.local_spans(length, rank, lambda copies: rank % copies == 0)
        length = cut.local_length(length, rank)
        for later in self.cuts[copied + 1 :]:
            if later.dim == cut.dim:
                rank = ranks.get(later.axis, 0)
                spans, length = narrow_spans(spans, later.spans(length, rank)), later.local_length(length, rank)
        return None if sum(stop - start for start, stop in spans) == length else (cut.dim, spans)

    @property
    def model_cuts(self) -> tuple[Cut, ...]:
        """Those of its cuts that change shapes in the model; shards of the data axes come last and on top."""
        return tuple(cut for cut in self.cuts if cut.axis in MODEL_AXES)

    @property
    def data_cuts(self) -> tuple[Cut, ...]:
        """Its shards over the data axes."""
        return tuple(cut for cut in self.cuts if cut.axis not in MODEL_AXES)

    def model_shape(self, ranks: dict[str, int]) -> tuple[int, ...]:
        """Its shape in the model on the rank at ``ranks``, where data ranks have it whole."""
        return cut_shape(self.shape, self.model_cuts, ranks)

    def cut_over(self, axis: str) -> Cut | None:
        """Its cut over ``axis``, if it has one."""
        return next((cut for cut in self.cuts if cut.axis == axis), None)

    def take(self, tensor: torch.Tensor, ranks: dict[str, int], axes: tuple[str, ...] | None = None) -> torch.Tensor:
        """The share of a global tensor on the rank at ``ranks``; of all its cuts, or of those over ``axes`` only."""
        for cut in self.cuts:
            if axes is None or cut.axis in axes:
                tensor = cut.take(tensor, ranks.get(cut.axis, 0))
        return tensor


@dataclass(frozen=True)
class BlockPlan:
    """One attention or MLP module whose edges talk over the tensor axis. Names are full module names."""

    name: str
    column: tuple[str, ...]
    row: tuple[str, ...]
    shared: tuple[str, ...]
    local_attributes: tuple[tuple[str, int], ...]  # with what their values are divided by
    dropout: float
    enter: tuple[str, ...] = ()
    enter_inputs: tuple[str, ...] = ()
    leave: tuple[str, ...] = ()
    heads: tuple[tuple[str, int], ...] = ()
    sample_heads: tuple[str, ...] = ()
    across: tuple[tuple[str, int], ...] = ()  # with the whole width of the input
    local_config: tuple[tuple[str, int], ...] = ()  # likewise
    copies: int = 1  # how many consecutive ranks hold each key/value head
    copied: tuple[str, ...] = ()  # what of the block they hold copies of, where there are several
    cut_from: str | None = None
    once: tuple[str, ...] = ()  # parameters that one rank adds to the sum


@dataclass(frozen=True)
class StreamPlan:
    """The stream of one layer stack, cut along the sequence between blocks. Names are full module names.

    Attributes:
        owner: the module that calls the layers.
        exit: the module whose output is the whole stream again: the norm behind the layers, or the owner.
        layers: the layers.
        gathered: modules in the layers that are run on the whole sequence.
        partial: modules with parameters of their own that see this rank's tokens only.
        direct: what the embedding returns goes into the first layer, and nowhere else.
        dropout: something in the layers drops activations out.
    """

    owner: str
    exit: str
    layers: tuple[str, ...]
    gathered: tuple[str, ...]
    partial: tuple[str, ...]
    direct: bool
    dropout: bool


@dataclass(frozen=True)
class ExpertsPlan:
    """The experts of one mixture.

    Attributes:
        name: the module that holds them.
        count: how many there are.
        layer: the layer it is in; empty outside of the layers.
    """

    name: str
    count: int
    layer: str


@dataclass(frozen=True)
class AdapterParameter:
    """One parameter of an adapter, of the whole model.

    Attributes:
        name: in the model with adapters.
        shape: of the whole parameter.
        dtype: its type.
        base: the stock name of the parameter that it adapts, or is a copy of.
        kept_in: the attribute of the wrapper that holds it, ``lora_A`` say.
        transposed: ``base`` is stored as ``[in, out]``.
        experts: how many experts' parameters lie side by side in it; 0 where it is of one module.
        tied_to: the name of the parameter it is the same tensor as.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    base: str
    kept_in: str
    transposed: bool = False
    experts: int = 0
    tied_to: str | None = None


@dataclass(frozen=True)
class Plan:
    """What becomes of a model under a layout. ``print(plan)`` is a table.

    Attributes:
        family: ``config.model_type``.
        layout: the sizes it was made for.
        parameters: every parameter, in the model's order, tied ones included.
        layers: names of the layers, in order; an encoder's before its decoder's.
        blocks: the tensor-parallel blocks; empty where ``tp_size`` is 1.
        streams: the streams that are cut along the sequence, under sequence parallelism.
        experts: the experts that are spread over ranks; empty where ``ep_size`` is 1.
        mixtures: the experts of every mixture, spread or not.
        embedding: name of the vocabulary-parallel embedding, if cut.
        head: name of the output projection onto the vocabulary, if the loss runs on it.
        loss: the host's name of the loss, if it is one of :data:`LOSSES`.
        no_step: why ``train_step`` cannot run the model's loss, in words; empty where it can.
        source: where the blueprint of its blocks comes from, in words; empty where there are none.
        stages: what each pipeline stage holds; ``None`` where ``pp_size`` is 1.
        quantized: which weights are loaded in 4 or 8 bits; ``None`` where none are.
        adapters: which of the parameters are those of adapters; they come last.
    """

    family: str
    layout: ParallelConfig
    parameters: tuple[ParameterPlan, ...]
    layers: tuple[str, ...]
    blocks: tuple[BlockPlan, ...]
    embedding: str | None
    head: str | None
    loss: str | None
    streams: tuple[StreamPlan, ...] = ()
    experts: tuple[ExpertsPlan, ...] = ()
    mixtures: tuple[ExpertsPlan, ...] = ()
    source: str = ""
    no_step: str = ""
    stages: StagePlan | None = None
    quantized: "QuantizedPlan | None" = None
    adapters: tuple[AdapterParameter, ...] = ()

    @cached_property
    def by_name(self) -> dict[str, ParameterPlan]:
        """Parameters by name."""
        return {parameter.name: parameter for parameter in self.parameters}

    @cached_property
    def copies(self) -> tuple[int, ...]:
        """On how many consecutive tensor ranks chunks of some parameters are, in ascending order, 1 left out."""
        return tuple(sorted({count for p in self.parameters for cut in p.cuts for count in cut.copies if count > 1}))

    @cached_property
    def ties(self) -> tuple[tuple[int, ...], ...]:
        """Sets of pipeline ranks that hold one tensor, each set once, in order."""
        if self.stages is None:
            return ()
        ranks = {tuple(sorted({self.stages.ranks[stage] for stage in tie.stages})) for tie in self.stages.ties}
        return tuple(sorted(members for members in ranks if len(members) > 1))

    @cached_property
    def neighbours(self) -> tuple[tuple[int, int], ...]:
        """Pairs of pipeline ranks that hold consecutive stages, each pair once, in order."""
        ranks = () if self.stages is None else self.stages.ranks
        return tuple(sorted({(min(a, b), max(a, b)) for a, b in pairwise(ranks) if a != b}))

    def holds(self, rank: int, name: str) -> bool:
        """Whether pipeline rank ``rank`` holds a parameter or module; not asked of what is on every stage."""
        return self.stages is None or any(stage.holds(name) for stage in self.stages.of_rank(rank))

    def held(self, rank: int) -> dict[str, str]:
        """What pipeline rank ``rank`` holds: name of an owned parameter -> a name that it has there.

        Another one than its own where the rank has but a copy of a tied tensor: a head without the embedding.
        """
        if rank not in self._held:
            found: dict[str, str] = {}
            for parameter in self.parameters:
                if self.holds(rank, parameter.name):
                    found.setdefault(parameter.tied_to or parameter.name, parameter.name)
            self._held[rank] = found
        return self._held[rank]

    @cached_property
    def _held(self) -> dict[int, dict[str, str]]:
        return {}

    def home(self, name: str) -> int:
        """The pipeline rank that counts and saves an owned parameter."""
        return 0 if self.stages is None else self.stages.ranks[self._stages_with(name)[0]]

    def holders(self, name: str) -> tuple[int, ...]:
        """All pipeline ranks that hold an owned parameter, ascending."""
        return (0,) if self.stages is None else tuple(sorted({self.stages.ranks[s] for s in self._stages_with(name)}))

    def _stages_with(self, name: str) -> tuple[int, ...]:
        assert self.stages is not None
        tied = next((tie for tie in self.stages.ties if name in tie.names), None)
        return (self.by_name[name].stage,) if tied is None else tied.stages

    def owned(self) -> Iterator[ParameterPlan]:
        """The parameters that are not another one under a second name."""
        return (parameter for parameter in self.parameters if parameter.tied_to is None)

    def __str__(self) -> str:
        from .table import render

        return render(self)


def join_path(block: str, child: str) -> str:
    """``child`` inside ``block``; the empty child is the block itself."""
    return f"{block}.{child}" if child else block
