"""Check that hfscale supports a PEFT config."""

import copy
import dataclasses
import os
from typing import Any

from ...distributed.files.replace import finish_move
from ...errors import ConfigError
from ...plan.quantized import QuantizedPlan

_METHODS = ("LORA", "IA3", "LOHA")
# Options of LoRA that are computed from data, or change how often or on which tokens an adapter computes.
_LORA_REFUSED = (
    "layer_replication",
    "trainable_token_indices",
    "megatron_config",
    "lora_ga_config",
    "corda_config",
    "eva_config",
)
_LORA_VARIANTS = ("use_dora",)
_INITS = ("gaussian", "olora", "orthogonal", "loftq")


def config_class(method: str) -> tuple[type, dict[str, Any]]:
    """Return PEFT's config class for ``lora``, ``dora``, ``ia3`` or ``loha``, and the fields that select it."""
    import peft

    classes: dict[str, tuple[type, dict[str, Any]]] = {
        "lora": (peft.LoraConfig, {}),
        "dora": (peft.LoraConfig, {"use_dora": True}),
        "ia3": (peft.IA3Config, {}),
        "loha": (peft.LoHaConfig, {}),
    }
    return classes[method]


def read_config(source: Any) -> tuple[Any, str | None]:
    """Return a PEFT config, and the path or Hub id of the saved adapter it was read from, if any; raise
    :class:`ConfigError` if ``source`` is neither a config nor a readable adapter.
    """
    from peft import PeftConfig

    if isinstance(source, PeftConfig):
        return copy.deepcopy(source), None
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"peft_config must be a PEFT config or the path of a saved adapter, got a {type(source).__name__}: pass "
            "peft.LoraConfig(...)"
        )
    path = str(source)
    finish_move(path)
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, "adapter_config.json")):
        raise ConfigError(f"peft_config={path!r} has no adapter_config.json: give the directory of a saved adapter")
    if not os.path.isdir(path) and (path.count("/") > 1 or path.startswith((".", "/", "~"))):
        raise ConfigError(f"peft_config={path!r} does not exist: give the directory of a saved adapter, or a Hub id")
    try:
        config = PeftConfig.from_pretrained(path)
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"peft_config={path!r} cannot be read as a saved adapter: {reason}") from error
    config.inference_mode = False
    return config, path


def check_config(config: Any) -> None:
    """Raise :class:`ConfigError`, naming the option, if a config is not known to be right over shards."""
    method = getattr(config.peft_type, "value", config.peft_type)
    if method not in _METHODS:
        raise ConfigError(
            f"peft_type {method} is not supported, since hfscale does not know how to shard its parameters: use "
            f"{', '.join(_METHODS)} (LORA includes DoRA, rsLoRA, PiSSA and OLoRA)"
        )
    if method != "LORA":
        return
    variants = [
        field.name
        for field in dataclasses.fields(config)
        if field.metadata.get("is_lora_variant") and field.name not in _LORA_VARIANTS
    ]
    init = config.init_lora_weights
    if isinstance(init, str) and init not in _INITS and not init.startswith("pissa"):
        raise ConfigError(
            f"LoraConfig(init_lora_weights={init!r}) is not known to hfscale: use True, False, "
            f"{', '.join(map(repr, _INITS))}, 'pissa' or 'pissa_niter_[n]'"
        )
    refused = [name for name in dict.fromkeys((*_LORA_REFUSED, *variants)) if getattr(config, name, None)]
    if refused:
        raise ConfigError(f"LoraConfig({refused[0]}=...) is not known to hfscale: leave it out")


def check_over_quantized(config: Any, quantized: QuantizedPlan, batch_world: int) -> None:
    """Raise :class:`ConfigError`, naming the option, if a config is not known to be right over quantized weights."""
    bits = quantized.bits
    method = getattr(config.peft_type, "value", config.peft_type)
    if method == "LOHA":
        raise ConfigError(f"LoHa needs weights of 16 or 32 bits, and these have {bits}: use LoRA or IA3")
    init = getattr(config, "init_lora_weights", True)
    if isinstance(init, str) and init not in ("gaussian", "orthogonal"):
        raise ConfigError(
            f"LoraConfig(init_lora_weights={init!r}) changes the weights, which would be rounded to {bits} bits once "
            "more: use True or 'gaussian', or load the weights in 16 or 32 bits"
        )
    if getattr(config, "use_dora", False) and (bits != 4 or batch_world > 1 or quantized.as_stored):
        raise ConfigError(
            f"LoraConfig(use_dora=True) needs the norms of {bits}-bit weights, which hfscale computes only for 4-bit "
            "weights without data ranks: use LoRA without it, or tp_size and pp_size alone with load_in_4bit=True"
        )


def needs_weights(config: Any) -> bool:
    """Return whether the initial values of adapters depend on the weights that they adapt."""
    init = getattr(config, "init_lora_weights", True)
    return bool(getattr(config, "use_dora", False)) or (isinstance(init, str) and init != "gaussian")
