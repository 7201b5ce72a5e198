"""Check the arguments of :func:`hfscale.from_pretrained` and similar functions, and load the config."""

import copy
import inspect
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from .. import errors
from .._compat.transformers.classes import classes_by_config, made_or_explained
from .._compat.transformers.loading import FILE, HUB_ARGUMENTS, loading_arguments
from ..config.parallel import ParallelConfig
from ..distributed.files.replace import finish_move
from ..distributed.files.sources import find_source, refuse_foreign, written_elsewhere
from ..models.fields import field
from .located import located, reachable

# Arguments of transformers' from_pretrained that distribute a model by other means.
_EXCLUSIVE = (
    "device_map",
    "distributed_config",
    "tp_plan",
    "tp_size",
    "device_mesh",
    "max_memory",
    "offload_folder",
)
# Arguments that choose the files of a config, but do not change the config's values.
_CODE = ("trust_remote_code", "code_revision")
# Field of a config -> the largest value that is accepted; no real model has more.
_SIZES = {
    "num_hidden_layers": 10**4,
    "num_attention_heads": 10**5,
    "num_key_value_heads": 10**5,
    "head_dim": 10**6,
    "hidden_size": 10**7,
    "intermediate_size": 10**8,
    "vocab_size": 10**8,
}
# The largest numbers of layers and experts, for configs of any part of a model.
_MOST_BY_WORD = {
    "layer": 10**4,
    "depth": 10**4,
    "expert": 10**5,
}
_MAY_BE_NONE = ("num_attention_heads", "num_key_value_heads")
_DTYPES = ("float32", "bfloat16", "float16", "float64")


def check_layout(parallel: ParallelConfig | None, kwargs: Mapping[str, Any]) -> ParallelConfig:
    """Return the requested layout, by default a layout of one process. Raise :class:`ConfigError` for arguments that
    would distribute the model in another way, and for ``state_dict`` and ``output_loading_info``.
    """
    if parallel is not None and not isinstance(parallel, ParallelConfig):
        raise errors.ConfigError(
            f"parallel must be a hfscale.ParallelConfig, got {parallel!r}: pass hfscale.ParallelConfig(tp_size=...)"
        )
    if kwargs.get("output_loading_info"):
        raise errors.ConfigError(
            "output_loading_info=True would return a pair of the model and its loading info, but hfscale returns only "
            "the model: leave output_loading_info out; missing and unexpected weights are printed"
        )
    if kwargs.get("state_dict") is not None:
        raise errors.ConfigError(
            "state_dict= would replace the checkpoint's weights, but every rank reads its shards from the "
            "checkpoint's files: leave state_dict out"
        )
    clashing = [name for name in _EXCLUSIVE if kwargs.get(name) is not None]
    if clashing:
        raise errors.ConfigError(
            f"{', '.join(clashing)} would distribute the model in another way than hfscale does: leave these arguments "
            "out, and give the layout as parallel=hfscale.ParallelConfig(...)"
        )
    return parallel or ParallelConfig()


def load_config(path: str, kwargs: Mapping[str, Any]) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """Return the config that transformers loads, and the arguments that the config did not use."""
    path, kwargs = located(path, kwargs)
    refuse_missing(path)
    finish_move(path)
    if "trust_remote_code" in kwargs:
        errors.check_switch("trust_remote_code", kwargs["trust_remote_code"])
    taken = {
        key: value
        for key, value in reachable(path, kwargs).items()
        if key not in ("dtype", "torch_dtype")
    }
    given = taken.pop("config", None)
    file = taken.pop(FILE, None)
    if given is None and file is not None:
        taken[FILE] = file
    elif given is None:
        refuse_weights_alone(Path(path, kwargs.get("subfolder") or ""))
    elif not isinstance(given, PreTrainedConfig | str | os.PathLike):
        raise errors.ConfigError(
            f"config must be a transformers config, got {given!r}: leave it out, or pass one, such as "
            "transformers.AutoConfig.from_pretrained(...)"
        )
    if isinstance(given, PreTrainedConfig):
        config = copy.deepcopy(given)
        rest = taken
    else:
        config, rest = _read_config(path, given or path, taken)
    rest = {key: value for key, value in rest.items() if key not in (*HUB_ARGUMENTS, FILE)}
    return config, {
        **rest,
        **{key: kwargs[key] for key in ("dtype", "torch_dtype", *_CODE) if key in kwargs},
    }


def _read_config(path: str, source: Any, taken: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the config that ``from_pretrained`` reads from ``source``, and the arguments ``taken`` without those that
    the config used. ``path`` is where the weights are, which may differ from ``source``.
    """
    file = os.path.join(path, taken.get(FILE) or "config.json")
    try:
        with made_or_explained(file if os.path.isdir(path) else path):
            told, _ = PreTrainedConfig.get_config_dict(source, **taken)
            # Config classes create lists of this length, so a huge number would fill the memory.
            refuse_endless(told, source)
            config, rest = AutoConfig.from_pretrained(source, return_unused_kwargs=True, **taken)
    except errors.ConfigError as error:
        if os.path.exists(path) or not taken.get("local_files_only"):
            raise
        raise errors.CheckpointError(
            f"{path} is neither a directory nor in the cache of the Hub, and the Hub cannot be reached: give a "
            "directory with a config.json, or a Hub id that is in the cache"
        ) from error
    return config, rest


def refuse_weights_alone(directory: Path) -> None:
    """Raise :class:`CheckpointError` for a directory with another library's weights but no config: users must pass
    one.
    """
    source = find_source(directory)
    if source is not None and not (directory / "config.json").exists():
        raise errors.CheckpointError(
            f"{directory} must have a config.json, but holds only weights ({source.form}): pass the model's config as "
            "config=: a directory, a Hub id or a transformers config"
        )


def refuse_endless(told: Mapping[str, Any], path: Any) -> None:
    """Raise :class:`ConfigError` if a config's fields ``told``, as read from the file at ``path``, give an impossibly
    large number of layers or experts.
    """
    for name, value in told.items():
        if isinstance(value, Mapping):
            refuse_endless(value, path)
        most = next((most for word, most in _MOST_BY_WORD.items() if word in name), None)
        if isinstance(value, int) and most is not None and value > most:
            raise errors.ConfigError(
                f"{name}={value} in the config of {path} is impossibly large: use at most {most:,}"
            )


def check_place(path: Any, subfolder: str = "") -> None:
    """Raise :class:`CheckpointError` for a ``path`` that holds no checkpoint, or another library's checkpoint."""
    errors.check_path("path", path)
    if os.path.isfile(path):
        trainer = written_elsewhere(Path(path))
        told = "" if trainer is None else f", of {trainer}"
        raise errors.CheckpointError(
            f"{path} must be the directory of a checkpoint, but is a file{told}: give a directory with a config.json"
        )
    refuse_missing(str(path))
    refuse_foreign(Path(path, subfolder))


def refuse_missing(path: str) -> None:
    """Raise :class:`CheckpointError` for a missing path; the Hub's own error would complain about a repository name."""
    if not os.path.exists(path) and errors.written_like_a_path(path):
        raise errors.CheckpointError(
            f"{path} does not exist: give a directory with a config.json, or a Hub id like owner/name"
        )


def arguments_with_config(
    kwargs: Mapping[str, Any], unread: Iterable[str], config: PreTrainedConfig, quantization: Any
) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained``: ``config``, and those of ``kwargs`` that ``config`` left
    ``unread``.
    """
    kept = {
        key: value
        for key, value in kwargs.items()
        if key
        in {
            *unread,
            *HUB_ARGUMENTS,
            FILE,
        }
    }
    by_host = {} if isinstance(quantization, str | None) else {"quantization_config": quantization}
    return {**kept, "config": config, **by_host}


def check_sizes(config: PreTrainedConfig) -> None:
    """Raise :class:`ConfigError` for sizes of zero layers or an empty vocabulary, or impossibly large sizes."""
    for name, most in _SIZES.items():
        size = field(config, name)
        least = 0 if name in _MAY_BE_NONE else 1
        if isinstance(size, int) and not least <= size <= most:
            use = f"use at least {max(least, 1)}" if size < least else f"use at most {most:,}"
            raise errors.ConfigError(
                f"{name}={size} of this {config.model_type} config is invalid: {use}"
            )


def check_tokens(tokens: object) -> None:
    """Refuse an invalid vocabulary size."""
    errors.check_count("resize_token_embeddings", tokens)
    if isinstance(tokens, int) and tokens > _SIZES["vocab_size"]:
        raise errors.ConfigError(
            f"resize_token_embeddings={tokens} is larger than any supported vocabulary: use len(tokenizer), at most "
            f"{_SIZES['vocab_size']:,}"
        )


def refuse_unknown(
    kwargs: Iterable[str], auto_class: Any, config: PreTrainedConfig, taken_here: Iterable[str]
) -> None:
    """Refuse arguments that neither the config, the model class, transformers nor hfscale (``taken_here``) takes."""
    kind = isinstance(auto_class, type)
    if not kind or not (
        hasattr(auto_class, "from_config") or issubclass(auto_class, PreTrainedModel)
    ):
        raise errors.ConfigError(
            f"auto_class must be an Auto class or a model class of transformers, got {auto_class!r}: pass one, such as "
            "transformers.AutoModelForCausalLM"
        )
    mapping = classes_by_config(auto_class)
    if mapping is not None and type(config) not in mapping:
        return  # a class that comes with the checkpoint
    kind = auto_class if mapping is None else mapping[type(config)]
    kinds = kind if isinstance(kind, list | tuple) else [kind]
    taken = {name for kind in kinds for name in inspect.signature(kind.__init__).parameters}
    ours = list(taken_here)
    known = {*ours, *taken, *HUB_ARGUMENTS, *_CODE, *_EXCLUSIVE, *loading_arguments()}
    for name in kwargs:
        if name not in known:
            close = errors.meant(name, sorted(known))
            hint = f"did you mean {close}?" if close else f"hfscale takes {', '.join(ours[1:-1])}"
            raise errors.ConfigError(
                f"{name}= is not an argument of hfscale, transformers or {kinds[0].__name__}: {hint}"
            )


def code_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for a model's own code: whether the code may run, and its revision."""
    return {key: kwargs[key] for key in _CODE if key in kwargs}


def known_dtype(kwargs: Mapping[str, Any]) -> Any:
    """Return the requested dtype of the weights, or ``None`` if the checkpoint decides."""
    dtype = kwargs.get("dtype", kwargs.get("torch_dtype"))
    # transformers also accepts a dict with one dtype per submodel.
    for asked in dtype.values() if isinstance(dtype, dict) else [dtype]:
        if asked is None or asked == "auto":
            continue
        kind = getattr(torch, asked, None) if isinstance(asked, str) else asked
        if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
            hint = errors.did_you_mean(asked, _DTYPES)
            raise errors.ConfigError(
                f"dtype={asked!r} is not a floating-point dtype for weights: {hint}use 'auto' or one of "
                f"{', '.join(_DTYPES)}"
            )
    return None if dtype == "auto" else dtype


def model_arguments(kwargs: Mapping[str, Any], is_auto: bool) -> dict[str, Any]:
    """Return the arguments with which a model is built from its config."""
    return {
        key: value
        for key, value in kwargs.items()
        if value is not None and (is_auto or key not in _CODE)
    }
