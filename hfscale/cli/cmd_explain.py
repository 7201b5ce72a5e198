"""``hfscale explain``: tabulate the memory of training a model, by the formulas of the papers."""

import argparse
from typing import Any

from ..errors import ConfigError
from .amounts import tokens_of
from .look import add_json, show
from .model import add_model_arguments, auto_class_of, load_config, remote_code
from .model_flags import add_sequence_length

HELP = "show where the memory of training a model goes, by the papers' own formulas"
DESCRIPTION = (
    "The accounting tables of the sources for one model: 16 bytes per parameter under mixed precision, the stages of "
    "ZeRO, activations with and without recomputation, LoRA and QLoRA. Reads only the config."
)
EXAMPLE = "hfscale explain meta-llama/Llama-3.1-8B --data-ranks 64 --tp 8"
_SIZES = {"--data-ranks": (64, "that ZeRO shares over"), "--tp": (8, "tensor ranks")}
_SIZES |= {"--batch-size": (1, "sequences of a microbatch"), "--rank": (16, "of LoRA's factors")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    for flag, (default, text) in _SIZES.items():
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    add_sequence_length(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from ..cost.tools.explain import explain
    from ..cost.tools.model_summary import summarize

    sizes = {flag: getattr(arguments, flag[2:].replace("-", "_")) for flag in _SIZES}
    for flag, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{flag} {size} is invalid: use a whole number of at least 1")
    sequence = tokens_of(arguments.sequence_length, "--sequence-length")
    config = load_config(arguments.model, arguments.trust_remote_code)
    dtype = arguments.dtype or "float32"
    more: dict[str, Any] = remote_code(arguments)
    more |= {"auto_class": auto_class_of(arguments.auto_class), "dtype": dtype}
    found = explain(
        summarize(config, mixed_precision="bf16" if dtype == "float32" else "no", sequence=sequence, **more),
        ranks=arguments.data_ranks,
        tp=arguments.tp,
        sequence=sequence,
        batch=arguments.batch_size,
        rank=arguments.rank,
    )
    rows = [[dict(zip(("name", "bytes", "how"), row, strict=True)) for row in table.rows] for table in found]
    document = [{"title": table.title, "rows": each} for table, each in zip(found, rows, strict=True)]
    show(arguments, document, "\n\n".join(map(str, found)))
    return 0
