"""The arguments of :func:`hfscale.from_pretrained` and its like: what is meant for the host, and what for nobody."""

import inspect
import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from ._host.transformers.classes import classes_by_config
from ._host.transformers.loading import loading_arguments
from .config import ParallelConfig
from .errors import CheckpointError, ConfigError, in_words
from .families.fields import field
from .files.replace import finish_move

# Arguments of from_pretrained that distribute a model by other means.
_EXCLUSIVE = ("device_map", "distributed_config", "tp_plan", "tp_size", "device_mesh", "max_memory", "offload_folder")
# Arguments that choose which files to read a config from, as opposed to what it says.
_CODE = ("trust_remote_code", "code_revision")
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_HUB = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "trust_remote_code")


def check_layout(parallel: ParallelConfig | None, kwargs: Mapping[str, Any]) -> ParallelConfig:
    """The layout that is asked for; one process by default.

    Raises:
        ConfigError: it is none, or ``kwargs`` ask for another way to distribute a model.
    """
    if parallel is not None and not isinstance(parallel, ParallelConfig):
        raise ConfigError(f"parallel={parallel!r} is not a layout: pass hfscale.ParallelConfig(tp_size=...)")
    if kwargs.get("output_loading_info"):
        raise ConfigError(
            "output_loading_info=True asks for a pair, and what is returned here is the model: leave it out; what the "
            "files lack, or have besides, is printed"
        )
    clashing = [name for name in _EXCLUSIVE if kwargs.get(name) is not None]
    if clashing:
        raise ConfigError(
            f"{', '.join(clashing)} would distribute the model a second way: leave it out, and give hfscale the layout "
            "as parallel=hfscale.ParallelConfig(...)"
        )
    return parallel or ParallelConfig()


def load_config(path: str, kwargs: Mapping[str, Any]) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The config as the host would load it, and the arguments it did not use."""
    finish_move(path)
    # The Hub knows nothing of what is written like a path; its own message would speak of repository names.
    if not os.path.exists(path) and (os.path.isabs(path) or path.startswith((".", "~")) or path.count("/") > 1):
        raise CheckpointError(
            f"{path} does not exist: give a directory with a config.json, or a Hub id like owner/name"
        )
    taken = {key: value for key, value in kwargs.items() if key not in ("dtype", "torch_dtype")}
    try:
        config, rest = AutoConfig.from_pretrained(path, return_unused_kwargs=True, **taken)
    except Exception as error:  # any type: of a damaged file, of the Hub, of fields that are checked
        raise CheckpointError(
            f"{path} has no config.json that can be read ({in_words(error)}): give the directory or Hub id of a model"
        ) from error
    rest = {key: value for key, value in rest.items() if key not in _HUB}
    return config, {**rest, **{key: kwargs[key] for key in ("dtype", "torch_dtype", *_CODE) if key in kwargs}}


def arguments_with_config(
    kwargs: Mapping[str, Any], unread: Iterable[str], config: PreTrainedConfig, quantization: Any
) -> dict[str, Any]:
    """Arguments for the host beside a ``config`` in which all of ``kwargs`` but those ``unread`` are already."""
    kept = {key: value for key, value in kwargs.items() if key in {*unread, *_HUB}}
    return {**kept, "config": config, **({} if quantization is None else {"quantization_config": quantization})}


def check_sizes(config: PreTrainedConfig) -> None:
    """Refuse sizes of which the host makes a model without layers, or without words.

    Raises:
        ConfigError: naming it.
    """
    for name in _SIZES:
        size = field(config, name)
        if isinstance(size, int) and size < (0 if name == "num_attention_heads" else 1):
            raise ConfigError(f"{name}={size} of this {config.model_type} config is impossible: use at least 1")


def refuse_unknown(kwargs: Iterable[str], auto_class: Any, config: PreTrainedConfig, taken_here: Iterable[str]) -> None:
    """Of arguments that no field of the config has taken: which nobody would.

    Args:
        taken_here: names of hfscale's own.

    Raises:
        ConfigError: naming one, and what was meant.
    """
    mapping = classes_by_config(auto_class)
    if mapping is not None and type(config) not in mapping:
        return  # a class that comes with the checkpoint
    kind = auto_class if mapping is None else mapping[type(config)]
    kinds = kind if isinstance(kind, list | tuple) else [kind]
    taken = {name for kind in kinds for name in inspect.signature(kind.__init__).parameters}
    ours = list(taken_here)
    known = {*ours, *taken, *_HUB, *_CODE, *_EXCLUSIVE, *loading_arguments()}
    for name in kwargs:
        if name not in known:
            close = get_close_matches(name, sorted(known), n=1)
            hint = f"did you mean {close[0]}?" if close else f"hfscale takes {', '.join(ours[1:-1])}"
            raise ConfigError(
                f"{name}= is no argument of hfscale's, of transformers' or of {kinds[0].__name__}: {hint}"
            )


def code_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Those that choose which code of a model's to run."""
    return {key: kwargs[key] for key in _CODE if key in kwargs}


def known_dtype(kwargs: Mapping[str, Any]) -> Any:
    """The type asked for; ``None`` where the checkpoint decides."""
    dtype = kwargs.get("dtype", kwargs.get("torch_dtype"))
    return None if dtype == "auto" else dtype


def model_arguments(kwargs: Mapping[str, Any], is_auto: bool) -> dict[str, Any]:
    """Those with which a model is built from its config."""
    return {key: value for key, value in kwargs.items() if value is not None and (is_auto or key not in _CODE)}
