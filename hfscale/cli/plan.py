"""``hfscale plan``: what becomes of every parameter under a layout."""

import argparse
from typing import Any

from .layout import add_layout_arguments, layout_of
from .model import add_model_arguments, auto_class_of, building, load_config, remote_code

HELP = "show what becomes of every parameter under a layout"
DESCRIPTION = (
    "Show, for every parameter of a model, how a layout cuts it, what each rank holds and what is done to its "
    "gradient. Reads only the config: no weights, no processes, no GPU."
)
EXAMPLE = "hfscale plan Qwen/Qwen3-8B --tp 2 --dp-shard 4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``hfscale plan``."""
    add_model_arguments(parser)
    add_layout_arguments(parser)
    parser.add_argument(
        "--quantize",
        choices=("nf4", "fp4", "int8"),
        help="say what bitsandbytes would quantize, and where blocks align",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    from ..build import plan as make_plan
    from ..plan import render, to_json

    layout, auto_class = layout_of(arguments), auto_class_of(arguments.auto_class)
    config = load_config(arguments.model, arguments.trust_remote_code)
    with building(arguments, config):
        chosen: dict[str, Any] = (
            {} if arguments.quantize is None else {"quantization_config": _quantization(arguments.quantize)}
        )
        code: dict[str, Any] = remote_code(arguments)
        planned = make_plan(config, layout, auto_class=auto_class, dtype=arguments.dtype, **chosen, **code)
    print(to_json(planned) if arguments.json else render(planned))
    return 0


def _quantization(kind: str) -> Any:
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind)
