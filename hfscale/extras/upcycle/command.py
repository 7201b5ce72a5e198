"""Write a mixture of experts whose experts start as copies of a dense model's MLPs. Targets: llama and mistral become
mixtral, qwen2 qwen2_moe, qwen3 qwen3_moe, olmo2 flex_olmo, granite granitemoe. Runs in one process, with a few tensors
in memory at a time, without a GPU.
"""

import argparse
from pathlib import Path

from ...cli.look import add_output, check_target, show

HELP = "turn a dense checkpoint into a mixture of experts that computes the same"
COUNTS = ("num_experts", "top_k", "every")
EXAMPLE = "hfscale upcycle path/to/dense out --num-experts 8 --top-k 2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="the dense model: a directory with safetensors, or a Hub id"
    )
    parser.add_argument("directory", metavar="OUT", type=Path, help="the directory to write")
    parser.add_argument(
        "--num-experts", type=int, default=8, metavar="N", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=2,
        metavar="N",
        help="experts per token (default: %(default)s)",
    )
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="make every N-th layer a mixture (qwen only)",
    )
    parser.add_argument(
        "--noise",
        type=float,
        default=0.0,
        help="standard deviation of noise, relative to that of each weight matrix",
    )
    parser.add_argument(
        "--reinitialize",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="fraction of each expert's channels to redraw",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of router, noise and channels (default: %(default)s)",
    )
    add_output(parser)


def run(arguments: argparse.Namespace) -> None:
    check_target(arguments.directory, arguments.overwrite, MODEL=arguments.model)
    from .upcycle import upcycle

    names = ("num_experts", "top_k", "every", "noise", "reinitialize", "seed", "max_shard_size")
    given = {name: getattr(arguments, name) for name in names}
    written = upcycle(arguments.model, arguments.directory, **given)
    size = sum(file.stat().st_size for file in written.glob("*.safetensors"))
    text = f"{written}: {arguments.num_experts} experts, {arguments.top_k} per token, {size / 2**20:,.0f} MiB"
    show(arguments, {"directory": str(written), "bytes": size, **given}, text)
