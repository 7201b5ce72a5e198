"""Names of attention implementations in configs: transformers' own, and those of ours in front of them."""

from typing import Any

from transformers import PreTrainedConfig

_hosts: dict[str, str] = {}  # name of an implementation of ours -> the one behind it


def asks_for_attention(config: Any) -> bool:
    """Return whether a config names an attention implementation."""
    return hasattr(config, "_attn_implementation")


def implementation_of(config: Any) -> str:
    """Return the name of a config's attention implementation."""
    return str(getattr(config, "_attn_implementation", None))


def set_implementation(config: Any, name: str) -> None:
    """Set the attention implementation of the modules that share ``config``."""
    config._attn_implementation_internal = name


def note_host(name: str, host: str) -> None:
    """Note that the implementation ``name`` stands in front of ``host``."""
    _hosts[name] = host


def name_hosts(config: Any) -> None:
    """Let a config, and those inside it, name the implementations that stood there before ours: some families look a
    class up by that name as a model is made.
    """
    inside = (getattr(config, name, None) for name in config.sub_configs)
    for each in (config, *(sub for sub in inside if isinstance(sub, PreTrainedConfig))):
        while (name := implementation_of(each)) in _hosts:
            set_implementation(each, _hosts[name])
