"""Names of attention implementations in configs: transformers' own, and hfscale's, which wrap transformers'."""

from typing import Any

from transformers import PreTrainedConfig

_hosts: dict[str, str] = {}  # name of an hfscale implementation -> the wrapped one


def asks_for_attention(config: Any) -> bool:
    """Return whether a config has an attention implementation."""
    return hasattr(config, "_attn_implementation")


def implementation_of(config: Any) -> str:
    """Return the name of the attention implementation in a config."""
    return str(getattr(config, "_attn_implementation", None))


def set_implementation(config: Any, name: str) -> None:
    """Set the attention implementation of the modules that use ``config``."""
    config._attn_implementation_internal = name


def note_host(name: str, host: str) -> None:
    """Record that hfscale's attention implementation ``name`` wraps transformers' implementation ``host``."""
    _hosts[name] = host


def name_hosts(config: Any) -> None:
    """In a config and the configs inside it, replace the names of hfscale's attention implementations by the names of
    transformers' implementations that they wrap. Some families look up a class by this name while a model is built.
    """
    inside = (getattr(config, name, None) for name in config.sub_configs)
    for each in (config, *(sub for sub in inside if isinstance(sub, PreTrainedConfig))):
        while (name := implementation_of(each)) in _hosts:
            set_implementation(each, _hosts[name])
