"""What becomes of one parameter under a layout; and names of parameters and modules."""

from dataclasses import dataclass

import torch

from .cut import Cut, cut_shape, narrow_spans
from .reductions import Reduction

MODEL_AXES = ("ep", "tp")
"""The axes whose cuts change the shapes of a model's parameters."""


def wild_name(name: str) -> str:
    """``model.layers.3.mlp`` -> ``model.layers.*.mlp``: one line speaks for every layer."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def join_path(block: str, child: str) -> str:
    """``child`` inside ``block``; the empty child is the block itself."""
    return f"{block}.{child}" if child else block


@dataclass(frozen=True)
class ParameterPlan:
    """What becomes of one parameter.

    Attributes:
        name: its name in the stock model.
        shape: its global shape.
        dtype: its type.
        stage: the pipeline stage that holds it; the first, where several hold the module.
        cuts: how it is cut between ranks, in order (tensor first, then sharded data).
        reductions: what happens to its gradient before the optimizer sees it, in order.
        tied_to: the name of the parameter it is the same tensor as.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stage: int = 0
    cuts: tuple[Cut, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    tied_to: str | None = None

    def local_shape(self, ranks: dict[str, int]) -> tuple[int, ...]:
        """Its shape on the rank at coordinates ``ranks`` (axis -> rank)."""
        return cut_shape(self.shape, self.cuts, ranks)

    @property
    def partial(self) -> tuple[str, ...]:
        """Axes over which each rank holds only a part of the gradient, so that the parts must be summed."""
        return tuple(step.axis for step in self.reductions if step.kind == "sum")

    @property
    def replicas(self) -> int:
        """How many ranks hold the same share of it, or of its most widely held part; each sees a part of its gradient.

        They are consecutive ranks of the axis of the cut, and the parts must be summed over them.
        """
        return max((cut.most_replicas for cut in self.cuts), default=1)

    def counted(self, ranks: dict[str, int]) -> tuple[int, list[tuple[int, int]]] | None:
        """What of the share at ``ranks`` counts in a sum over all ranks, in which every entry must count once.

        Returns:
            a dim of the share and the ``(start, stop)`` along it of which this rank holds the first copy; ``None``
            where it holds the first, or the only, copy of everything.
        """
        replicated = next((index for index, cut in enumerate(self.cuts) if cut.most_replicas > 1), None)
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
