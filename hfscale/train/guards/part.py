"""Install guards against ordinary code that would silently compute wrong numbers."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...errors import ConfigError
from ..runtime import Batch, Part, Runtime
from ..runtime.batches import compare_first
from ..runtime.local_weights import LocalWeights
from .changes import refuse_changes
from .counts import count_whole
from .optimizers import refuse_whole_tensor_optimizers
from .stock_loops import refuse_stock_accelerator, refuse_stock_clipping
from .structure import Structure


class SharedBatch(Part):
    """Check that ranks that share a batch get the same one, also in plain loops."""

    def __init__(self) -> None:
        self._first: RemovableHandle | None = None

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Compare the first batch of a plain loop, by a hook. Installed after the parts that synchronize RNG state."""
        sharing = runtime.mesh.sharing
        if sharing is not None and runtime.plan.stages is None:
            self._first = compare_first(runtime.model, sharing)

    def check_step(self, runtime: Runtime, batches: Sequence[Batch], user_loss: bool = False) -> None:
        """Remove the hook on plain loops: a step compares its batches itself."""
        if self._first is not None:
            self._first.remove()


class StockCode(Part):
    """Guards against stock loops, clipping, optimizers and changes that would take this rank's shards for the full
    model.

    ``model.save_pretrained`` saves the full model.

    Args:
        save: :func:`hfscale.save_pretrained`.

    Attributes:
        structure: the modules, parameters and loss that were built; ``None`` in one process.
    """

    def __init__(self, save: Callable[..., None]) -> None:
        self._save = save
        self.structure: Structure | None = None

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Install all guards; this part comes last."""
        model, layout = runtime.model, runtime.mesh.layout
        refuse_changes(model, layout)
        if layout.total_size > 1 or runtime.plan.adapters:  # transformers would save adapters' wrapped names
            model.save_pretrained = _saves_all_of_it(model, self._save)
        if layout.total_size == 1:
            return
        refuse_stock_accelerator()
        refuse_stock_clipping(runtime)
        refuse_whole_tensor_optimizers(runtime)
        count_whole(runtime)
        self.structure = Structure(runtime)
        if runtime.plan.stages is None:  # stages run in steps alone, with older weights in some schedules
            model.register_forward_pre_hook(self._look, prepend=True)

    def _look(self, model: nn.Module, args: Any) -> None:
        """Check the model when a training loop without ``train_step`` calls it."""
        if self.structure is not None and not torch.compiler.is_compiling():
            self.structure.check()


def check_model(runtime: Runtime) -> None:
    """Raise :class:`ConfigError` unless the model has the modules, parameters and loss that it was built with."""
    stock = runtime.part(StockCode)
    if stock is not None and stock.structure is not None:
        stock.structure.check()


def as_built(runtime: Runtime) -> AbstractContextManager[None]:
    """Put the modules that were built back inside the ``with`` block, and warn of those that replaced them.

    A save is no place to refuse a model: what was trained is saved.
    """
    stock = runtime.part(StockCode)
    return nullcontext() if stock is None or stock.structure is None else stock.structure.as_built()


def _saves_all_of_it(model: Any, save: Callable[..., None]) -> Callable[..., None]:
    """Return a ``model.save_pretrained`` for stock loops, which call it on every rank with Accelerate's arguments."""

    def save_pretrained(
        save_directory: Any,
        is_main_process: bool = True,
        save_function: Any = None,
        max_shard_size: str | int = "5GB",
        safe_serialization: bool = True,
        **others: Any,
    ) -> None:
        refused = sorted([*others, *([] if safe_serialization else ["safe_serialization"])])
        if refused:
            raise ConfigError(
                f"save_pretrained({', '.join(refused)}=...) cannot be used on a model whose ranks hold parts of it: "
                "leave it out, and call it on every rank, as hfscale.save_pretrained(model, directory)"
            )
        save(model, save_directory, max_shard_size=max_shard_size)

    return save_pretrained
