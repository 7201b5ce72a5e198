"""Replace methods of the PEFT model that wraps a sharded model by versions that work on shards. Each must be called on
every rank.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint.save import save_adapter_files
from ..errors import ConfigError
from ..features.adapters.several import directory_by_peft
from ..features.adapters.storage import AdapterFiles
from ..train.runtime import runtime_of
from ..train.runtime.writing import everyone_arrives
from .several_adapters import put_several


def put_methods(
    peft_model: Any,
    model: nn.Module,
    merge: Callable[..., Any],
    unload: Callable[[nn.Module], Any],
) -> None:
    """Set the methods of ``peft_model``: ``merge_and_unload`` and ``unload`` call ``merge`` and ``unload`` with
    ``model``; ``save_pretrained`` and the methods that add and delete adapters are set as well.
    """

    def merge_and_unload(*_: Any, dtype: torch.dtype | None = None, **asked: Any) -> Any:
        """Merge like PEFT's own method, but always check merged weights (``safe_merge``)."""
        return merge(model, dtype=dtype, adapter_names=asked.get("adapter_names"))

    # If the adapter is a prompt, ``base_model`` is the stock model itself, whose methods stay.
    for part in dict.fromkeys((peft_model, peft_model.base_model)):
        if part is model:
            continue
        part.merge_and_unload = merge_and_unload
        part.unload = lambda *_, **__: unload(model)
    peft_model.save_pretrained = _saving(peft_model)
    put_several(peft_model, partial(put_methods, peft_model, model, merge, unload))


def _saving(peft_model: Any) -> Callable[..., None]:
    """Return a ``save_pretrained`` with PEFT's arguments and files; every rank must call it."""

    def save_pretrained(
        save_directory: str,
        safe_serialization: bool = True,
        selected_adapters: list[str] | None = None,
        save_embedding_layers: bool | str = "auto",
        is_main_process: bool = True,
        path_initial_model_for_weight_conversion: str | None = None,
        *,
        timeout: timedelta = timedelta(minutes=2),
        **others: Any,
    ) -> None:
        runtime = runtime_of(peft_model)
        call = f"PEFT's save_pretrained({str(save_directory)!r})"
        converts = path_initial_model_for_weight_conversion is not None
        _refuse_arguments(call, converts, others)
        names = list(peft_model.peft_config)
        wanted = names if selected_adapters is None else list(selected_adapters)
        if unknown := [each for each in wanted if each not in names]:
            raise ConfigError(
                f"selected_adapters must name adapters of the model ({', '.join(names)}), got {unknown[0]!r}: pass "
                "only such names"
            )
        if os.path.isfile(save_directory):
            raise ConfigError(
                f"{call} needs the path of a directory, but this path is a file: give another path"
            )
        everyone_arrives(runtime.mesh, timeout, call)
        # Scripts choose the rank that writes (``is_main_process``); if no rank is chosen, stock code writes nothing.
        if any(runtime.mesh.all_gather_object(is_main_process and bool(wanted))):
            target = Path(save_directory)
            files = AdapterFiles(save_embedding_layers, safe_serialization, card=True)
            for name in wanted:
                directory = directory_by_peft(name, target)
                save_adapter_files(runtime, name, directory, files, call=call)

    return save_pretrained


def _refuse_arguments(call: str, converts: bool, others: dict[str, Any]) -> None:
    """Raise :class:`ConfigError` for arguments that PEFT would apply to one rank's shards of the adapter."""
    if converts:
        raise ConfigError(
            f"{call} cannot convert an adapter that is sharded over ranks to plain LoRA: leave "
            "path_initial_model_for_weight_conversion out, load the saved adapter in one process, and convert it in "
            "that process"
        )
    given = sorted(name for name, value in others.items() if value is not None)
    if given:
        raise ConfigError(
            f"{call} gathers the adapter itself, from all ranks, and takes no {', '.join(given)}=...: leave that "
            f"argument out, and call {call} on every rank"
        )
