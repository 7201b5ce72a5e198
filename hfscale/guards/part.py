"""Guards as parts: what ordinary code around a model would get wrong without a word."""

from collections.abc import Sequence
from typing import Any

from torch.utils.hooks import RemovableHandle

from ..errors import ConfigError
from ..runtime import Batch, Part, Runtime
from ..runtime.batches import compare_first
from ..runtime.local_weights import LocalWeights
from .changes import refuse_changes
from .stock_loops import refuse_stock_accelerator, refuse_stock_clipping


class SharedBatch(Part):
    """Ranks that share a batch are given the same one, also in plain loops."""

    def __init__(self) -> None:
        self._first: RemovableHandle | None = None

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Compare the first batch of a plain loop. Comes behind what makes ranks draw alike."""
        sharing = runtime.mesh.sharing
        if sharing is not None and runtime.plan.stages is None:
            self._first = compare_first(runtime.model, sharing)

    def check_step(self, runtime: Runtime, batches: Sequence[Batch]) -> None:
        """A step compares its own."""
        if self._first is not None:
            self._first.remove()


class StockCode(Part):
    """Stock loops, clipping, changes and saving that would take this rank's part for the model are refused."""

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Comes last."""
        model, layout = runtime.model, runtime.mesh.layout
        if layout.total_size > 1:
            refuse_stock_accelerator()
            refuse_stock_clipping(runtime)
        refuse_changes(model, layout)
        if layout.total_size > 1 or runtime.plan.adapters:  # with adapters, the host would write its weights wrapped
            model.save_pretrained = _refuse_partial_save


def _refuse_partial_save(*_: Any, **__: Any) -> None:
    raise ConfigError(
        "model.save_pretrained would write what this rank holds, adapters and all, as if it were the model: call "
        "hfscale.save_pretrained(model, directory) on every rank"
    )
