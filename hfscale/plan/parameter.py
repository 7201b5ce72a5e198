"""Define the plan of one parameter under a layout: how it is sharded over mesh axes, and the collectives that reduce
its gradient between the backward pass and the optimizer's step.

The kinds of reductions, which run over the ranks of one mesh ``axis``::

    kind              when                                                      collective
    sum               all ranks hold the same parameter, each with a partial    all-reduce over all ranks
                      gradient (from the heads or tokens of the rank)
    sum-stages        several pipeline stages hold one tied tensor, each        all-reduce over the ranks of these
                      with the gradient of the tensor's use on this stage       stages
    sum-replicas      several consecutive ranks hold the same key/value heads,  all-reduce over these ranks
                      each with the gradient from the queries of the rank
    reduce-scatter    data ranks have different batches, and each holds a       reduce-scatter over all ranks
                      shard of the parameter
    all-reduce        data ranks have different batches, and each holds the     all-reduce over all ranks
                      same shard of the parameter
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

import torch

from ..config.parallel import ParallelConfig
from .cut import Cut, cut_shape, narrow_spans

Kind = Literal["sum", "sum-stages", "sum-replicas", "reduce-scatter", "all-reduce"]
MODEL_AXES = ("ep", "tp")  # the axes whose cuts change the shapes of a model's parameters


@dataclass(frozen=True)
class Reduction:
    """Describe one collective that reduces a parameter's gradient. ``str()`` returns its text in the printed plan."""

    kind: Kind  # see the table in the module's docstring
    axis: str  # the mesh axis whose ranks take part
    stages: tuple[int, ...] = ()  # for ``sum-stages``, the pipeline stages
    replicas: int = 1  # for ``sum-replicas``, how many consecutive ranks take part

    def __str__(self) -> str:
        words = {
            "sum-stages": f"sum over stages {', '.join(map(str, self.stages))}",
            "sum-replicas": f"sum over the {self.replicas} ranks with the same heads",
        }
        return words.get(self.kind, f"{self.kind} over {self.axis}")


def data_axes(spread: bool) -> tuple[str, str]:
    """Return the names of the mesh axes over which a parameter is replicated and sharded among data ranks:
    ``("dp_replicate", "dp_shard")``, or with ``spread`` ``("edp_replicate", "edp_shard")``.

    ``spread`` means that the parameter belongs to experts that are sharded over the expert axis; ranks of this axis
    hold different experts, so the parameter has fewer data ranks than others.
    """
    return ("edp_replicate", "edp_shard") if spread else ("dp_replicate", "dp_shard")


def reductions_of(
    layout: ParallelConfig,
    cuts: Sequence[Cut],
    partial: Sequence[str],
    stages: Sequence[int],
) -> tuple[Reduction, ...]:
    """Return the reductions of a parameter's gradient, in the order in which they run.

    Args:
        cuts: how the parameter is sharded, one entry per mesh axis.
        partial: the mesh axes whose ranks each hold only one term of the gradient's sum.
        stages: the pipeline stages that hold the parameter, if several stages hold it as a tied tensor.
    """

    def steps() -> Iterator[Reduction]:
        for axis in partial:
            yield Reduction("sum", axis)
        if stages:
            yield Reduction("sum-stages", "pp", stages=tuple(stages))
        for cut in cuts:
            for replicas in sorted({count for count in cut.replicas if count > 1}):
                yield Reduction("sum-replicas", cut.axis, replicas=replicas)
        over = {cut.axis for cut in cuts}
        replicate, shard = data_axes(spread="ep" in over)
        if shard in over:
            yield Reduction("reduce-scatter", shard)
        if layout.size(replicate) > 1:
            yield Reduction("all-reduce", replicate)

    return tuple(steps())


def data_cut(layout: ParallelConfig, spread: bool = False, dim: int = 0) -> list[Cut]:
    """Return a list that describes how dim ``dim`` of a parameter is sharded over data ranks (``dp_shard``, or
    ``edp_shard`` with ``spread``, for experts that are sharded over expert ranks). The list is empty if the axis has
    one rank.
    """
    _, axis = data_axes(spread)
    size = layout.size(axis)
    return [Cut(axis, dim, size)] if size > 1 else []


def join_path(block: str, child: str) -> str:
    """Return the full name of a submodule: ``block`` and ``child`` joined by a dot; ``block`` if ``child`` is empty."""
    return f"{block}.{child}" if child else block


@dataclass(frozen=True)
class ParameterPlan:
    """Describe one parameter of a model under a layout: its pipeline stage, how it is sharded, and the reductions of
    its gradient.
    """

    name: str  # name in the stock model
    shape: tuple[int, ...]  # global shape
    dtype: torch.dtype
    stage: int = 0  # the pipeline stage that holds the parameter; the first one if several do
    # the cuts, in order: expert and tensor axes first, then the sharding data axis
    cuts: tuple[Cut, ...] = ()
    # reductions of the gradient before the optimizer's step, in order
    reductions: tuple[Reduction, ...] = ()
    tied_to: str | None = None  # the name of another parameter that is the same tensor

    @property
    def first_name(self) -> str:
        """The name under which shards and saves know the tensor, which may have several names."""
        return self.tied_to or self.name

    @property
    def numel(self) -> int:
        """The number of entries of the full parameter."""
        return prod(self.shape)

    def local_shape(self, ranks: dict[str, int]) -> tuple[int, ...]:
        """Return the parameter's shape on the rank at coordinates ``ranks`` (axis -> rank)."""
        return cut_shape(self.shape, self.cuts, ranks)

    @cached_property
    def partial(self) -> tuple[str, ...]:
        """The mesh axes whose ranks each hold only one term of the parameter's gradient; the terms must be summed."""
        return tuple(step.axis for step in self.reductions if step.kind == "sum")

    @property
    def replicas(self) -> int:
        """The number of consecutive ranks that hold the same shard of the parameter. If matrices of a fused weight have
        different numbers, it is the largest.
        """
        return max((cut.most_replicas for cut in self.cuts), default=1)

    def counted(self, ranks: dict[str, int]) -> tuple[int, list[tuple[int, int]]] | None:
        """Return which entries of its shard the rank at coordinates ``ranks`` (axis -> rank) contributes to a sum over
        ranks, such as a norm, so that replicated entries are not summed twice.

        These are the entries that no rank with a lower index on the sharding axis also holds. They are returned as a
        dim of the shard and spans ``(start, stop)`` along this dim; ``None`` stands for all entries of the shard.
        """
        replicated = next(
            (index for index, cut in enumerate(self.cuts) if cut.most_replicas > 1), None
        )
        if replicated is None:
            return None
        cut = self.cuts[replicated]
        rank = ranks.get(cut.axis, 0)
        length = cut_shape(self.shape, self.cuts[:replicated], ranks)[cut.dim]
        spans = cut.local_spans(length, rank, lambda replicas: rank % replicas == 0)
        length = cut.local_length(length, rank)
        for later in self.cuts[replicated + 1 :]:
            if later.dim == cut.dim:
                rank = ranks.get(later.axis, 0)
                spans = narrow_spans(spans, later.spans(length, rank))
                length = later.local_length(length, rank)
        return None if sum(stop - start for start, stop in spans) == length else (cut.dim, spans)

    @property
    def model_cuts(self) -> tuple[Cut, ...]:
        """How the parameter is sharded over the expert and tensor axes, in order; this determines its shape inside the
        model during the forward pass.
        """
        return tuple(cut for cut in self.cuts if cut.axis in MODEL_AXES)

    @property
    def data_cuts(self) -> tuple[Cut, ...]:
        """How the parameter is sharded over data axes (FSDP), which is applied after all other sharding."""
        return tuple(cut for cut in self.cuts if cut.axis not in MODEL_AXES)

    def model_shape(self, ranks: dict[str, int]) -> tuple[int, ...]:
        """Return the parameter's shape in a forward pass on the rank at coordinates ``ranks`` (axis -> rank): the shape
        after sharding over expert and tensor ranks, but not over data ranks.
        """
        return cut_shape(self.shape, self.model_cuts, ranks)

    def cut_over(self, axis: str) -> Cut | None:
        """Return how the parameter is sharded over mesh axis ``axis``; ``None`` if it is not sharded over this axis."""
        return next((cut for cut in self.cuts if cut.axis == axis), None)

    def take(
        self,
        tensor: torch.Tensor,
        ranks: dict[str, int],
        axes: tuple[str, ...] | None = None,
    ) -> torch.Tensor:
        """Slice the full ``tensor`` of this parameter to the shard of the rank at coordinates ``ranks`` (axis -> rank).
        With ``axes``, shard it only over these mesh axes.
        """
        for cut in self.cuts:
            if axes is None or cut.axis in axes:
                tensor = cut.take(tensor, ranks.get(cut.axis, 0))
        return tensor
