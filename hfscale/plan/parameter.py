"""Plan one parameter under a layout; and helpers for names of parameters and modules."""

from dataclasses import dataclass

import torch

from .cut import Cut, cut_shape, narrow_spans
from .reductions import Reduction

MODEL_AXES = ("ep", "tp")  # the axes whose cuts change the shapes of a model's parameters


def join_path(block: str, child: str) -> str:
    """Return the name of ``child`` inside ``block``; the empty child is the block itself."""
    return f"{block}.{child}" if child else block


@dataclass(frozen=True)
class ParameterPlan:
    """Plan of one parameter: its stage, its cuts, and the reductions of its gradient."""

    name: str  # its name in the stock model
    shape: tuple[int, ...]  # its global shape
    dtype: torch.dtype  # its type
    stage: int = 0  # the pipeline stage that holds it; the first, where several hold the module
    cuts: tuple[Cut, ...] = ()  # how it is cut between ranks, in order (tensor first, then sharded data)
    reductions: tuple[Reduction, ...] = ()  # reductions of its gradient before the optimizer's step, in order
    tied_to: str | None = None  # the name of the parameter that it shares its tensor with

    def local_shape(self, ranks: dict[str, int]) -> tuple[int, ...]:
        """Return its shape on the rank at coordinates ``ranks`` (axis -> rank)."""
        return cut_shape(self.shape, self.cuts, ranks)

    @property
    def partial(self) -> tuple[str, ...]:
        """Axes over which each rank holds a partial gradient, to be summed."""
        return tuple(step.axis for step in self.reductions if step.kind == "sum")

    @property
    def replicas(self) -> int:
        """The number of consecutive ranks that hold the same shard of it, or of its most widely replicated part."""
        return max((cut.most_replicas for cut in self.cuts), default=1)

    def counted(self, ranks: dict[str, int]) -> tuple[int, list[tuple[int, int]]] | None:
        """Return a dim, and ``(start, stop)`` of the entries whose first replica is at ``ranks``; ``None``: all."""
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
        """Cuts that change the parameter's shape in the model; those of the data axes come last, on top."""
        return tuple(cut for cut in self.cuts if cut.axis in MODEL_AXES)

    @property
    def data_cuts(self) -> tuple[Cut, ...]:
        """Cuts over the data axes."""
        return tuple(cut for cut in self.cuts if cut.axis not in MODEL_AXES)

    def model_shape(self, ranks: dict[str, int]) -> tuple[int, ...]:
        """Return its shape in the model on the rank at ``ranks``, without cuts over the data axes."""
        return cut_shape(self.shape, self.model_cuts, ranks)

    def cut_over(self, axis: str) -> Cut | None:
        """Return its cut over ``axis``, if it has one."""
        return next((cut for cut in self.cuts if cut.axis == axis), None)

    def take(self, tensor: torch.Tensor, ranks: dict[str, int], axes: tuple[str, ...] | None = None) -> torch.Tensor:
        """Return the shard of a full tensor on the rank at ``ranks``, by all cuts or by those over ``axes`` only."""
        for cut in self.cuts:
            if axes is None or cut.axis in axes:
                tensor = cut.take(tensor, ranks.get(cut.axis, 0))
        return tensor
