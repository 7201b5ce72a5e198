"""Handle fixed values: tensors of adapters that are never trained, like VeRA's shared matrices and UniLoRA's tables.

PEFT creates fixed values from the sizes of all modules that it wraps. So PEFT's full-size model on the meta device
holds them, as its only tensors with memory, and a rank's wrappers, which compute full projections, use the same
tensors. A file from another machine may contain different values.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..._compat.peft_shared import fixed_values, is_stored, shared_parameters
from ..._compat.transformers.classes import input_embedding
from ...errors import CheckpointError
from .prompts import prompt_keys

_PREFIX = "base_model.model."


def kept_by_peft(whole: Any, name: str, embeddings: Any) -> dict[str, Any]:
    """Map the keys of a saved adapter, by PEFT's own rules, to names of parameters in the wrapped model, or to modules
    that hold fixed values (tensors that are never trained). ``embeddings`` is PEFT's ``save_embedding_layers``.
    """
    from peft import get_peft_model_state_dict

    if whole.peft_config[name].is_prompt_learning:
        return prompt_keys(whole, name)
    # PEFT selects and renames tensors by name alone, so pass an index as each tensor's value to recognize it.
    keys: list[str] = []
    kept: list[Any] = []
    names: dict[int, str] = {}
    stock = whole.get_base_model()
    for live, parameter in stock.named_parameters(remove_duplicate=False):
        keys.append(f"{_PREFIX}{live}")
        kept.append(live)
        names.setdefault(id(parameter), live)
    for key, parameter in shared_parameters(whole).items():
        if id(parameter) in names:
            keys.append(key)
            kept.append(names[id(parameter)])
    for path, holder in fixed_values(whole, name).items():
        if is_stored(holder):
            keys.append(f"{path}.{name}")
            kept.append(holder)
    marked = {key: torch.tensor(number) for number, key in enumerate(keys)}
    found: dict[str, Any] = {}
    for layers in (False,) if input_embedding(stock) is None else (False, embeddings):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Embeddings may be omitted.
            warnings.filterwarnings("always", "Could not find a config file")
            written = get_peft_model_state_dict(
                whole, state_dict=marked, adapter_name=name, save_embedding_layers=layers
            )
        found |= {key: kept[int(number)] for key, number in written.items()}
    return found


def fixed_holders(whole: Any, name: str) -> dict[str, Any]:
    """Map the keys of an adapter file's fixed values (VeRA's shared matrices, for example) to the modules that hold
    them.
    """
    kept = kept_by_peft(whole, name, False)
    return {key: holder for key, holder in kept.items() if isinstance(holder, nn.Module)}


def buffer_names(whole: Any, name: str) -> dict[str, str]:
    """Map every name of a fixed value (an untrained tensor of an adapter) to the first name of the same tensor in the
    full model. Pipeline stages need this, because each stage names a shared tensor by its own layers.
    """
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for path, holder in fixed_values(whole, name).items():
        if path.startswith(_PREFIX):
            live = f"{path.removeprefix(_PREFIX)}.{name}"
            names[live] = first.setdefault(id(holder), live)
    return names


def stored_buffers(whole: Any, name: str) -> dict[str, str]:
    """Map the keys of fixed values in an adapter file to the names that :func:`buffer_names` returns."""
    named: dict[int, str] = {}
    for path, holder in fixed_values(whole, name).items():
        if path.startswith(_PREFIX):
            named.setdefault(id(holder), f"{path.removeprefix(_PREFIX)}.{name}")
    return {key: named[id(holder)] for key, holder in fixed_holders(whole, name).items()}


def read_fixed(whole: Any, name: str, stored: Mapping[str, Any], source: str) -> set[str]:
    """Write the fixed values among ``stored`` tensors into PEFT's full-size model; return their keys.

    Raises:
        CheckpointError: the file of ``source`` lacks a fixed value, or its shape differs.
    """
    holders = fixed_holders(whole, name)
    for key, holder in holders.items():
        expected = holder[name]
        if key not in stored:
            raise CheckpointError(
                f"{source} lacks {key}, which the adapter needs in the forward pass: save or download the adapter again"
            )
        given = stored[key][...]
        if given.shape != expected.shape:
            raise CheckpointError(
                f"{source}: {key} has the shape {tuple(given.shape)}, but the model needs {tuple(expected.shape)}: "
                "load the adapter onto the model that it was trained on"
            )
        holder[name] = given.to(expected.dtype)
    return set(holders)


def share_fixed(whole: Any, local: Any, name: str, device: torch.device) -> None:
    """Let the wrappers of a rank's model compute with the fixed values of the full-size model."""
    full = fixed_values(whole, name)
    done = set[int]()
    for path, holder in fixed_values(local, name).items():
        # All wrappers of VeRA share one holder.
        if path in full and id(holder) not in done:
            holder[name] = full[path][name].to(device)
            done.add(id(holder))
