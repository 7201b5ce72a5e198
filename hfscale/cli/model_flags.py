"""Define the flags that several subcommands share: the model, its layout, training options and the machine."""

import argparse
import difflib
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.declared import declared
from ..config.layout import LayoutFields
from ..config.memory import byte_count
from ..config.sections import ESTIMATED_PRECISIONS
from ..distributed.files.replace import finish_move
from ..errors import ConfigError, written_like_a_path
from ..extensions import added, provided
from .parser import Adds

if TYPE_CHECKING:
    from ..config.parallel import ParallelConfig


OPTIMIZER = "adamw_torch_fused"  # the default optimizer: HF Trainer's own
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
"""Map each value of ``--quantize`` to the fields of a recipe's ``quantization`` section that have the same effect."""
ON_HOST = ("parameters", "optimizer", "activations")
_TOKENS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
_DTYPES = ("float64", "float32", "bfloat16", "float16")


def bytes_of(text: str, flag: str, alone: str = "") -> int:
    """Parse a size: ``"60GB"`` and ``"60G"`` -> 60,000,000,000 bytes, ``"60GiB"`` -> 60 x 2^30. A number without a unit
    is in the unit ``alone``. Errors name ``flag``.
    """
    count = byte_count(f"{text}{alone}" if text.strip()[-1:].isdigit() else text)
    if not count:
        raise ConfigError(
            f"{flag} {text} is no size: write a positive number and KiB, MiB or GiB (2^10, 2^20, 2^30), or KB, MB "
            "or GB (10^3, 10^6, 10^9), such as 60GiB"
        )
    return count


def tokens_of(text: str, flag: str) -> int:
    """Parse a number of tokens, in which K, M and G are powers of 1024: ``"4M"`` -> 4,194,304. Errors name ``flag``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)", text.strip().lower())
    count = 0.0 if match is None else float(match[1]) * _TOKENS[match[2]]
    if not count or not count.is_integer():
        raise ConfigError(
            f"{flag} {text} is no number of tokens: use a whole number of at least 1, alone or with K, M or G "
            "(2^10, 2^20, 2^30), such as 4194304 or 4M"
        )
    return int(count)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument MODEL to a subcommand, and flags for the model's Auto class, its dtype, and whether its own code
    may run.
    """
    parser.add_argument(
        "model", metavar="MODEL", help="a model directory, a Hub id, or the path of a config.json"
    )
    parser.add_argument(
        "--auto-class", default="AutoModelForCausalLM", help="the Auto class (default: %(default)s)"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the code that comes with the model"
    )
    parser.add_argument(
        "--dtype", choices=_DTYPES, help="dtype of the weights (default: the config's)"
    )


def remote_code(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments for ``from_config`` that let the model's own code run, if ``--trust-remote-code`` is
    given.
    """
    return {"trust_remote_code": True} if arguments.trust_remote_code else {}


def building(arguments: argparse.Namespace, config: Any) -> AbstractContextManager[None]:
    """Return a context manager in which the model of ``config`` is built. If transformers cannot build it, the error of
    transformers is raised with an explanation.
    """
    from .._compat.transformers.classes import built_or_explained

    return built_or_explained(auto_class_of(arguments.auto_class), config)


def auto_class_of(name: str) -> Any:
    """Return the Auto class ``name`` of transformers, such as ``AutoModelForCausalLM``."""
    import transformers

    from .._compat.transformers.classes import auto_classes

    auto_class = getattr(transformers, name, None) if name.startswith("AutoModel") else None
    if not hasattr(auto_class, "from_config"):
        close = difflib.get_close_matches(name, auto_classes(), n=3) or ["AutoModelForCausalLM"]
        raise ConfigError(
            f"--auto-class {name} is not one of transformers' Auto classes: use one of them, such as {', '.join(close)}"
        )
    return auto_class


def load_config(model: str, trusted: bool = False) -> Any:
    """Return the config of ``model``: a directory, a Hub id, or the path of a ``config.json``. If ``trusted``, the
    model's own code may run.
    """
    from ..api import arguments

    config, _ = arguments.load_config(model, {"trust_remote_code": trusted})
    arguments.check_sizes(config)
    return config


def check_place(model: str) -> None:
    """Refuse ``model`` if it looks like a path but does not exist, or is a directory without a model; this runs before
    torch is imported.
    """
    path = Path(model)
    finish_move(path)
    if not path.exists() and written_like_a_path(model):
        raise ConfigError(
            f"{model} does not exist: give a model directory, a config.json or a Hub id (owner/name)"
        )
    if path.is_dir() and not (path / "config.json").exists():
        from ..distributed.files.sources import ask_added

        if ask_added("locate", model, {}) is None:
            raise ConfigError(
                f"{model} has no config.json: give the directory of a Hugging Face model"
            )


def add_lora(parser: Adds, what: str) -> None:
    """Add the flag ``--lora``, whose help text begins with ``what``."""
    told = f"{what}: all-linear (the default), or module names joined by commas"
    parser.add_argument("--lora", metavar="TARGETS", nargs="?", const="all-linear", help=told)


def add_training_arguments(parser: Adds) -> None:
    """Add the flags for adapters, quantized weights, optimizer, precision and memory; :func:`plan_arguments` reads most
    of them.
    """
    parser.add_argument(
        "--quantize",
        choices=(*QUANTIZATIONS, *added("quantizations")),
        help="the quantization format in which weights are kept",
    )
    add_lora(parser, "train LoRA adapters")
    parser.add_argument("--rank", type=int, metavar="R", help="rank of the adapters (default: 16)")
    parser.add_argument(
        "--optimizer",
        metavar="NAME",
        help=f"name of the optimizer in HF Trainer (default: {OPTIMIZER})",
    )
    told = "compute in bfloat16 over weights of their own dtype, or layer products in 8 bits"
    parser.add_argument("--mixed-precision", choices=ESTIMATED_PRECISIONS, help=told)
    told = "none, elementwise, selective, full (default), a number n: every n-th layer, or a memory budget such as 8GiB"
    parser.add_argument("--recompute", metavar="HOW", nargs="?", const="full", help=told)
    parser.add_argument(
        "--tile-tokens", type=int, metavar="N", help="run norms and MLPs in tiles of N tokens"
    )
    parser.add_argument(
        "--offload",
        metavar="WHAT,...",
        help=f"keep on the host (CPU memory): any of {', '.join(ON_HOST)}",
    )


def plan_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of :func:`hfscale.plan` that the flags set: class, dtype, adapters, quantization,
    precision and memory.
    """
    from transformers import BitsAndBytesConfig

    from ..config.memory import MemoryConfig

    on_host = list(filter(None, (arguments.offload or "").split(",")))
    if unknown := set(on_host).difference(ON_HOST):
        raise ConfigError(
            f"--offload {unknown.pop()} is unknown: use activations, parameters or optimizer, or several of these, "
            "separated by commas"
        )
    again = arguments.recompute or "none"
    away = dict[str, Any]((f"offload_{name}", True) for name in on_host)
    memory = MemoryConfig(
        int(again) if again.isdigit() else again, tile_tokens=arguments.tile_tokens, **away
    )
    given: dict[str, Any] = {"memory": memory, "mixed_precision": arguments.mixed_precision or "no"}
    fields = QUANTIZATIONS.get(arguments.quantize)
    given |= {
        "quantization_config": BitsAndBytesConfig(**fields) if fields else arguments.quantize,
        "auto_class": auto_class_of(arguments.auto_class),
        "dtype": arguments.dtype,
        **remote_code(arguments),
    }
    rank = arguments.rank
    if rank is not None and (rank < 1 or arguments.lora is None):
        raise ConfigError(
            f"--rank must be a whole number of at least 1, and needs --lora, got --rank {rank}: give both, or leave "
            "--rank out"
        )
    if arguments.lora is not None:
        from ..features.adapters.storage import config_class

        names = arguments.lora if arguments.lora == "all-linear" else arguments.lora.split(",")
        given["peft_config"] = config_class("lora")[0](
            r=rank or 16, target_modules=names, task_type="CAUSAL_LM"
        )
    return given


def add_machine_arguments(parser: Adds) -> None:
    """Add ``--hardware``, the kind of GPU for which to estimate, and ``--sequence-length``."""
    told = "h100, b200, l40s, rtx-4090, mi300x, ... (an unknown name lists all), or a calibration's JSON"
    parser.add_argument("--hardware", default="h100", metavar="NAME", help=told)
    told = "tokens per sequence, such as 8192 or 8K (default: 4K)"
    parser.add_argument("--sequence-length", default="4096", metavar="N", help=told)


def add_reports(parser: Adds) -> None:
    """Add one flag per kind of report that an extension provides; its value is the file to which :func:`write_reports`
    writes.
    """
    for name in sorted(added("reports")):
        parser.add_argument(
            f"--{name}", type=Path, metavar="FILE", help="write a page with pictures in addition"
        )


def reports_of(arguments: argparse.Namespace) -> dict[str, Path]:
    """Return the files of the requested reports, by the report's kind."""
    asked = {name: getattr(arguments, name) for name in sorted(added("reports"))}
    return {name: target for name, target in asked.items() if target is not None}


def write_reports(arguments: argparse.Namespace, found: Any, title: str) -> None:
    """Write the requested reports of ``found``, the result of an estimate or of a search."""
    for name, target in reports_of(arguments).items():
        target.write_text(provided("reports", name)(found, title))


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each field of :class:`hfscale.ParallelConfig`."""
    # Values stay strings here: ParallelConfig checks them, and sets the defaults of fields that are left out.
    layout = parser.add_argument_group("layout")
    for field in declared(LayoutFields):
        if field.kind is bool:
            layout.add_argument(field.flag, action=argparse.BooleanOptionalAction, help=field.help)
        else:
            metavar = "NAME" if field.choices else "N" if field.kind is int else "N,N,..."
            layout.add_argument(field.flag, metavar=metavar, help=field.help)


def layout_of(arguments: argparse.Namespace) -> "ParallelConfig":
    """Return the layout that the command line's flags describe. Raise :class:`ConfigError` for a flag that has no
    effect in it.
    """
    from ..config.parallel import ParallelConfig
    from ..parallel.pipeline.orders import check_layout

    known = declared(LayoutFields)
    layout = ParallelConfig(**{field.name: getattr(arguments, field.dest) for field in known})
    axes = {field.flag: field.text for field in known}
    for axis in filter(None, dict.fromkeys(field.needs for field in known)):
        given = [
            field.flag
            for field in known
            if field.needs == axis and getattr(arguments, field.dest) is not None
        ]
        if given and layout.asked(axis) == 1:
            raise ConfigError(
                f"{', '.join(given)} can be used only with several {axes[f'--{axis}']}: give --{axis} 2 or more as "
                "well"
            )
    check_layout(layout)
    return layout
