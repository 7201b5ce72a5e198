"""Write the weights of a training state, which hfscale.save_state wrote in any layout, as an ordinary Hugging Face
directory; if the model has adapters, write an adapter directory. Also converts FSDP2's shards (torch DCP, Accelerate,
Trainer) and transformers' distributed checkpoints. Runs in one process, with one tensor in memory at a time, without a
GPU. With --adapter-for, DIR is a saved adapter of experts that are stacked in one tensor, and OUT gets separate
matrices for each expert, as inference engines load them.
"""

import argparse
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .look import add_conversion, check_directory, check_target, conversion_of, show

HELP = "write a saved state as a Hugging Face directory"
ENGINES = ("vllm", "sglang")
EXAMPLE = "hfscale convert states/step-500 out"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "state",
        metavar="DIR",
        type=Path,
        help="a state, a directory of states (the newest complete one counts), another trainer's shards, or an adapter",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="the directory to write")
    parser.add_argument(
        "--adapter-for", choices=ENGINES, help="DIR is an adapter: write one that this engine loads"
    )
    parser.add_argument(
        "--base",
        metavar="BASE",
        type=Path,
        help="with --adapter-for: the checkpoint that the adapter was trained on",
    )
    parser.add_argument(
        "--config",
        metavar="BASE",
        type=Path,
        help="for another trainer's shards: the directory with the model's config.json",
    )
    add_conversion(parser)


def run(arguments: argparse.Namespace) -> None:
    check_target(arguments.out, arguments.overwrite, DIR=arguments.state)
    if arguments.adapter_for:
        _convert_adapter(arguments)
        return
    from ..checkpoint.convert import convert_state
    from ..distributed.files.sources import find_source

    if (source := find_source(arguments.state)) is not None:
        _convert_source(source, arguments)
        return
    index = convert_state(arguments.state, arguments.out, **conversion_of(arguments))
    what = "an adapter" if index.adapter else "a model"
    at = "" if index.step is None else f" of step {index.step}"
    result = {
        "directory": arguments.out,
        "holds": what,
        "step": index.step,
        "tensors": len(index.stored),
    }
    show(arguments, result, f"{arguments.out}: {what}{at}, {len(index.stored)} tensors")


def _convert_source(source: Any, arguments: argparse.Namespace) -> None:
    from ..checkpoint.convert_source import convert_source

    written = convert_source(
        source,
        arguments.out,
        arguments.config,
        max_shard_size=arguments.max_shard_size,
        trust_remote_code=arguments.trust_remote_code,
    )
    result = {"directory": arguments.out, "holds": "a model", "tensors": written}
    show(arguments, result, f"{arguments.out}: a model, {written} tensors, from {source.form}")


def _convert_adapter(arguments: argparse.Namespace) -> None:
    if arguments.base is None:
        raise ConfigError(
            "--adapter-for needs --base, the directory of the adapter's base checkpoint"
        )
    check_directory(arguments.base, "the checkpoint that the adapter was trained on")
    check_directory(arguments.state, "an adapter (with adapter_config.json)")
    from ..api.adapter_files import adapter_for_engine

    written = adapter_for_engine(
        arguments.base,
        arguments.state,
        arguments.out,
        trust_remote_code=arguments.trust_remote_code,
    )
    result = {"directory": arguments.out, "holds": "an adapter", "tensors": written}
    show(
        arguments,
        result,
        f"{arguments.out}: an adapter for {arguments.adapter_for}, {written} tensors",
    )
