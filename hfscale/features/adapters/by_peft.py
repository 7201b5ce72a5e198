"""Leave a model of one process to PEFT's own functions: every kind of adapter, prompts, several adapters at once.

In one process nothing is sharded, so PEFT wraps, saves and merges like with a stock model. The runtime adds PEFT's new
parameters to the plan (:mod:`hfscale.train.runtime.latecomers`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..._compat.transformers.classes import is_adapted_by_host
from ...errors import ConfigError
from ...train.runtime import Runtime, runtime_of
from .prompts import check_prefix


def around(
    model: nn.Module,
    config: Any,
    source: str | None,
    name: str = "default",
    seed: int | None = None,
    **options: Any,
) -> Any:
    """Return PEFT's model around ``model``, with a new adapter, drawn with ``seed`` (``None``: torch's current RNG
    state), or with the adapter that was saved at ``source``, to continue training. ``options`` are further arguments of
    PEFT's function.

    Raises:
        ConfigError: the adapter is a prefix, and the model recomputes layers.
    """
    check_prefix(config, runtime_of(model).plan)
    # Scripts may replace peft.get_peft_model by hfscale's function.
    from peft.mapping_func import (
        get_peft_model,
    )

    given: Any = model
    if source is None and seed is None:
        return get_peft_model(given, config, adapter_name=name, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed or 0)
        made = get_peft_model(given, config, adapter_name=name, **options)
    if source is not None:  # PEFT itself loads prompts only for inference
        load(made, source)
    return made


def found_around(runtime: Runtime, *known: Any) -> Any:
    """Return PEFT's model around a model if PEFT's own functions have added adapters or a prompt; ``None`` if there is
    no PEFT model, or if hfscale added all of its adapters. ``known`` are further modules to search for the PEFT model.
    """
    from peft import PeftModel

    if not runtime.latecomers():
        return None
    for place in (runtime.around_it, *known):
        for module in place.modules() if isinstance(place, nn.Module) else ():
            if isinstance(module, PeftModel):
                return module
    return None


def merged(peft_model: Any, adapter_names: Sequence[str] | None) -> Any:
    """Return the stock model, with adapters merged by PEFT itself.

    Raises:
        ConfigError: adapted layers are replicas of each other (``layer_replication``): each has its own adapter, but
            they share the weights. PEFT would add all of these adapters to them, without a warning.
    """
    replicated = any(
        getattr(config, "layer_replication", None) for config in peft_model.peft_config.values()
    )
    adapted = [
        each.get_base_layer()
        for each in peft_model.modules()
        if hasattr(each, "lora_A")
        and hasattr(each, "get_base_layer")  # not a module of the model's own
    ]
    weights = [
        id(weight)
        for module in {id(each): each for each in adapted}.values()
        for weight in module.parameters(recurse=False)
    ]
    if replicated and len(set(weights)) < len(weights):
        raise ConfigError(
            "adapters to merge must be of weights that only one layer has, got replicas of layers "
            "(layer_replication), which share weights: save the adapter without merging, with "
            "hfscale.save_pretrained"
        )
    return peft_model.merge_and_unload(adapter_names=adapter_names)


def save(runtime: Runtime, model: nn.Module, target: Path) -> bool:
    """Write all adapters that PEFT's own functions have added, with PEFT; return whether there were any."""
    peft_model = found_around(runtime, model)
    if peft_model is not None:
        peft_model.save_pretrained(str(target))
        return True
    if is_adapted_by_host(runtime.model) and runtime.latecomers():
        type(runtime.model).save_pretrained(runtime.model, str(target))
        return True
    return False


def load(peft_model: Any, directory: str) -> None:
    """Read a saved adapter into the active one."""
    from peft import load_peft_weights, set_peft_model_state_dict

    tensors = load_peft_weights(directory, device="cpu")
    set_peft_model_state_dict(peft_model, tensors, adapter_name=peft_model.active_adapter)
