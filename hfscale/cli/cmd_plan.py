"""Show for every parameter of a model how a layout shards it, which shard each rank holds, and how its gradient is
reduced. With flags of training, also show the memory of a rank: bytes of weights, gradients, activations and so on.
Reads only the config: no weights, no processes, no GPU.
"""

import argparse
import json
import os
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from . import model_flags as flags
from .look import print_json, show, working

if TYPE_CHECKING:
    from ..config.parallel import ParallelConfig
    from ..cost.model.memory_model import MemoryEstimate
    from ..cost.tools.dry_run import DryRun

HELP = "show how a layout shards every parameter, and whether the model fits"
EXAMPLE = """hfscale plan Qwen/Qwen3-8B --tp 2 --dp-shard 4
hfscale plan meta-llama/Llama-3.1-70B --tp 4 --lora --quantize nf4 --tokens 4096 --recompute
hfscale plan meta-llama/Llama-3.1-405B --tp 8 --sequence-parallel --pp 16 --dp-shard 128 --tokens 8192 --dry-run"""
_TOKENS = 2048
_GB = "80"
_TRAINING = (
    "quantize",
    "lora",
    "rank",
    "tokens",
    "gpu",
    "optimizer",
    "mixed_precision",
    "recompute",
    "tile_tokens",
    "offload",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_model_arguments(parser)
    flags.add_layout_arguments(parser)
    group = parser.add_argument_group(
        "training (any of these flags adds the memory of a rank, by kind, and whether it fits)"
    )
    flags.add_training_arguments(group)
    told = (
        f"tokens of one microbatch of a data-parallel rank, such as 4096 or 4K (default: {_TOKENS})"
    )
    group.add_argument("--tokens", metavar="N", help=told)
    told = f"memory of one GPU, such as 80GB (10^9), 80 or 80GiB (2^30) (default: {_GB}GB)"
    group.add_argument("--gpu", metavar="SIZE", help=told)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="run a step without weights on one rank of each kind of stage, and count the bytes that it sends and "
        "keeps (a microbatch is one sequence of --tokens; a step has --microbatches)",
    )


def run(arguments: argparse.Namespace) -> None:
    tokens = arguments.tokens or _TOKENS
    size = (
        flags.bytes_of(_GB if arguments.gpu is None else arguments.gpu, "--gpu", alone="GB") / 1e9
    )
    # Before torch is imported, which warns about process groups whose ranks do not exist.
    if arguments.dry_run:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from ..api.build import plan as make_plan
    from ..plan.table import render, to_json

    layout = flags.layout_of(arguments)
    config = flags.load_config(arguments.model, arguments.trust_remote_code)
    if arguments.dry_run:
        dry = _dry_run(arguments, config, layout, tokens)
        show(arguments, dry.to_dict(), str(dry))
        return
    planned = make_plan(config, layout, **flags.plan_arguments(arguments))
    memory = None
    if any(getattr(arguments, name) is not None for name in _TRAINING):
        from ..cost.tools.memory_report import memory_estimate

        optimizer = arguments.optimizer or flags.OPTIMIZER
        precision = arguments.mixed_precision
        memory = memory_estimate(planned, optimizer, tokens=tokens, mixed_precision=precision)
    if arguments.json:
        document = json.loads(to_json(planned))
        if memory is not None:
            document["memory"] = {
                **memory.kinds,
                "total": memory.total,
                "fits": memory.total < size * 1e9,
            }
        print_json(document)
    else:
        print(render(planned))
        if memory is not None:
            print(f"\nmemory of a rank in training:\n{memory}\n{describe_fit(size, memory)}")


def _dry_run(
    arguments: argparse.Namespace, config: Any, layout: "ParallelConfig", tokens: int
) -> "DryRun":
    """Return the result of ``--dry-run``: bytes that ranks send and keep. Refuse ``--quantize``, ``--optimizer`` and
    ``--gpu``, because a dry run has neither quantized weights nor an optimizer.
    """
    from ..cost.tools.dry_run import dry_run

    beside = [
        f"--{name}"
        for name in ("quantize", "optimizer", "gpu")
        if getattr(arguments, name) is not None
    ]
    if beside:
        raise ConfigError(
            f"--dry-run takes no quantized weights, optimizer or GPU: leave {', '.join(beside)} out, or use hfscale "
            "estimate"
        )
    working("planning")
    with flags.building(arguments, config):
        return dry_run(
            config, layout, sequence_length=tokens, progress=True, **flags.plan_arguments(arguments)
        )


def describe_fit(size: float, found: "MemoryEstimate") -> str:
    """Return a line that tells whether the bytes ``found`` fit into ``size`` GB and, if they do not, what would
    help.
    """
    total = found.total / 1e9
    if found.total < size * 1e9:
        return f"fits {size:g} GB: yes, {total:.1f} GB of it, without temporary buffers of kernels and collectives"
    kind = max(found.kinds, key=lambda name: found.kinds[name])
    return (
        f"fits {size:g} GB: no, {total:.1f} GB, most of it {kind}: use more ranks, fewer --tokens, --recompute, an "
        "8-bit --optimizer, or --lora over --quantize nf4"
    )
