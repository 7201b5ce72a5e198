"""Refuse methods of PEFT's model that would change, or write, one rank's shards as if they were the full model."""

from collections.abc import Callable
from typing import Any

from torch import nn

from ..._compat.peft import ask_before_state_dicts
from ...errors import ConfigError
from ...train.runtime import find_runtime

_MERGE = "call hfscale.merge_and_unload(model), on every rank"
_ONE = "a model has one adapter: merge it with hfscale.merge_and_unload(model), or load the model again"
_REFUSED = {
    "merge_and_unload": _MERGE,
    "merge_adapter": _MERGE,
    "unmerge_adapter": _MERGE,
    "unload": "load the model again without peft_config",
    "add_adapter": _ONE,
    "load_adapter": _ONE,
    "delete_adapter": _ONE,
    "add_weighted_adapter": _ONE,
}
_OF_STOCK = ("add_adapter", "load_adapter", "delete_adapter")  # methods of transformers' models too
_SAVE = "save_pretrained"


def guard_methods(peft_model: Any, whole: Any, ranks: int) -> None:
    """Replace methods that would bypass the plan by errors, and let PEFT count the parameters of the full model."""
    stock = peft_model.get_base_model()
    for name, instead in _REFUSED.items():
        for holder in (peft_model, peft_model.base_model, *([stock] if name in _OF_STOCK else ())):
            if hasattr(type(holder), name):
                setattr(holder, name, _refusing(name, instead))
    if ranks > 1:
        ask_before_state_dicts(_refuse_parts)
        setattr(peft_model, _SAVE, _refusing(_SAVE, "call hfscale.save_pretrained(model, directory), on every rank"))
    peft_model.get_nb_trainable_parameters = whole.get_nb_trainable_parameters


def _refuse_parts(model: Any) -> None:
    """Refuse PEFT's ``get_peft_model_state_dict``, often called on one rank alone, if it would return shards."""
    runtime = find_runtime(model)
    if runtime is None:
        return
    plan = runtime.plan
    if plan.stages is not None or any(plan.by_name[adapter.name].cuts for adapter in plan.adapters):
        raise ConfigError(
            f"{plan.layout.describe()}: PEFT's get_peft_model_state_dict would return only this rank's shard of the "
            "adapter: call hfscale.save_pretrained(model, directory), on every rank, which writes the full one in "
            "PEFT's format; hfscale.stream_weights(model, adapters_only=True) yields its tensors by PEFT's keys"
        )


def give_back_methods(stock: nn.Module) -> None:
    """Restore the stock model's own methods, and remove its PEFT config."""
    for name in (*_OF_STOCK, "peft_config"):
        stock.__dict__.pop(name, None)


def _refusing(name: str, instead: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ConfigError(f"PEFT's {name} does not work on a sharded model: {instead}")

    return refuse
