"""``hfscale plan``: print how a layout places every parameter."""

import argparse
import json
import os

from . import plan_dry_run as dry_run
from .layout import add_layout_arguments, layout_of
from .look import add_json, print_json
from .model import add_model_arguments, auto_class_of, check_place, load_config, remote_code
from .model_flags import plan_arguments
from .plan_memory import add_training_arguments, check_amounts, describe_fit, estimate, fits, is_asked

HELP = "show what becomes of every parameter under a layout, and whether it fits"
DESCRIPTION = (
    "Show, for every parameter of a model, how a layout cuts it, what each rank holds and what is done to its "
    "gradient; and what a rank holds in training, by kind. Reads only the config: no weights, no processes, no GPU."
)
EXAMPLE = """hfscale plan Qwen/Qwen3-8B --tp 2 --dp-shard 4
hfscale plan meta-llama/Llama-3.1-70B --tp 4 --lora --quantize nf4 --tokens 4096 --recompute
hfscale plan meta-llama/Llama-3.1-405B --tp 8 --sequence-parallel --pp 16 --dp-shard 128 --tokens 8192 --dry-run"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``hfscale plan``."""
    add_model_arguments(parser)
    add_layout_arguments(parser)
    add_training_arguments(parser)
    dry_run.add_dry_run_arguments(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    check_place(arguments.model)
    check_amounts(arguments)
    if arguments.dry_run:  # before torch is imported: it warns of groups of ranks that are not there
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from ..api.build import plan as make_plan
    from ..plan import render, to_json

    layout, auto_class = layout_of(arguments), auto_class_of(arguments.auto_class)
    config = load_config(arguments.model, arguments.trust_remote_code)
    if arguments.dry_run:
        return dry_run.run(arguments, config)
    chosen = plan_arguments(arguments) | remote_code(arguments)
    planned = make_plan(config, layout, auto_class=auto_class, dtype=arguments.dtype, **chosen)
    memory = estimate(arguments, planned) if is_asked(arguments) else None
    if arguments.json:
        document = json.loads(to_json(planned))
        if memory is not None:
            document["memory"] = {**memory.kinds, "total": memory.total, "fits": fits(arguments, memory)}
        print_json(document)
    else:
        print(render(planned))
        if memory is not None:
            print(f"\nwhat a rank holds in training:\n{memory}\n{describe_fit(arguments, memory)}")
    return 0
