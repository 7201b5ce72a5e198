"""Arguments that name a model, and the config and class that they select."""

import argparse
import difflib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..distributed.files.replace import finish_move
from ..errors import ConfigError, written_like_a_path

_DTYPES = ("float64", "float32", "bfloat16", "float16")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, its Auto class, its dtype, and whether its own code may run."""
    parser.add_argument("model", metavar="MODEL", help="a model directory, a Hub id, or the path of a config.json")
    parser.add_argument("--auto-class", default="AutoModelForCausalLM", help="the Auto class (default: %(default)s)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that comes with the model")
    parser.add_argument("--dtype", choices=_DTYPES, help="type of the weights (default: the config's)")


def remote_code(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return keyword arguments that let the model's own code run, if requested."""
    return {"trust_remote_code": True} if arguments.trust_remote_code else {}


def building(arguments: argparse.Namespace, config: Any) -> AbstractContextManager[None]:
    """Explain transformers' errors about a model that it cannot build inside the ``with`` block."""
    from .._compat.transformers.classes import built_or_explained

    return built_or_explained(auto_class_of(arguments.auto_class), config)


def auto_class_of(name: str) -> Any:
    """Return the Auto class of this name."""
    import transformers

    from .._compat.transformers.classes import auto_classes

    found = getattr(transformers, name, None) if name.startswith("AutoModel") else None
    if not hasattr(found, "from_config"):
        close = difflib.get_close_matches(name, auto_classes(), n=3) or ["AutoModelForCausalLM"]
        raise ConfigError(f"--auto-class {name} is not one of transformers' Auto classes: use {', '.join(close)}, ...")
    return found


def load_config(model: str, trusted: bool = False) -> Any:
    """Return the config of MODEL."""
    check_place(model)
    from ..api import arguments

    config, _ = arguments.load_config(model, {"trust_remote_code": trusted})
    arguments.check_sizes(config)
    return config


def check_place(model: str) -> None:
    """Refuse a MODEL that is written like a path and does not exist, without slow imports."""
    path = Path(model)
    finish_move(path)
    if not path.exists() and written_like_a_path(model):
        raise ConfigError(f"{model} does not exist: give a model directory, a config.json or a Hub id (owner/name)")
    if path.is_dir() and not (path / "config.json").exists():
        raise ConfigError(f"{model} has no config.json: give the directory of a Hugging Face model")
