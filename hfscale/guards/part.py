"""Guards as parts: what ordinary code around a model would get wrong without a word."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..errors import ConfigError
from ..runtime import Batch, Part, Runtime
from ..runtime.batches import compare_first
from ..runtime.local_weights import LocalWeights
from .changes import refuse_changes
from .counts import count_whole
from .optimizers import refuse_whole_tensor_optimizers
from .stock_loops import refuse_stock_accelerator, refuse_stock_clipping
from .structure import Structure


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
    """Stock loops, clipping, optimizers and changes that would take this rank's part for the model are refused; its own
    ``save_pretrained`` saves all of it.

    Args:
        save: :func:`hfscale.save_pretrained`.
    """

    def __init__(self, save: Callable[..., None]) -> None:
        self._save = save
        self._structure: Structure | None = None

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Comes last."""
        model, layout = runtime.model, runtime.mesh.layout
        refuse_changes(model, layout)
        if layout.total_size > 1 or runtime.plan.adapters:  # with adapters, the host would write its weights wrapped
            model.save_pretrained = _saves_all_of_it(model, self._save)
        if layout.total_size == 1:
            return
        refuse_stock_accelerator()
        refuse_stock_clipping(runtime)
        refuse_whole_tensor_optimizers(runtime)
        count_whole(runtime)
        self._structure = Structure(runtime)
        if runtime.plan.stages is None:  # stages run in steps alone, with older weights in some schedules
            model.register_forward_pre_hook(self._look, prepend=True)

    def _look(self, model: nn.Module, args: Any) -> None:
        """Plain loops call the model alone."""
        if self._structure is not None and not torch.compiler.is_compiling():
            self._structure.check()

    def check_model(self, runtime: Runtime) -> None:
        """It has the modules, parameters and loss that it was built with."""
        if self._structure is not None:
            self._structure.check()

    def as_built(self) -> AbstractContextManager[None]:
        """A save is no place to refuse a model: what was trained is saved, and a warning names what was changed."""
        return self._structure.as_built() if self._structure is not None else nullcontext()


def _saves_all_of_it(model: Any, save: Callable[..., None]) -> Callable[..., None]:
    """``model.save_pretrained`` as loops for stock models call it: on every rank, with what Accelerate adds."""

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
