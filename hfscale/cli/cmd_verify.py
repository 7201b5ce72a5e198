"""Train a tiny version of a model (same classes, few layers, small widths) twice: in a layout on CPU processes, and in
one process with stock transformers. Compare loss, gradients, gradient norm, weights and checkpoint. Exits with 1 if
anything differs. Needs no weights and no GPU.
"""

import argparse
from dataclasses import asdict

from ..errors import ConfigError
from . import model_flags as flags
from .look import show, working

HELP = "prove a layout on this machine: compare a tiny clone of the model with one process"
EXAMPLE = "hfscale verify Qwen/Qwen3-8B --tp 2 --pp 2 --schedule zbv"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_model_arguments(parser)
    flags.add_layout_arguments(parser)
    flags.add_lora(parser, "train LoRA adapters instead, against stock PEFT")


def run(arguments: argparse.Namespace) -> int:
    import transformers

    from ..config.parallel import AXES
    from ..testing.verify import TOLERANCE, render, verify

    transformers.utils.logging.disable_progress_bar()  # for a clone's few kilobytes
    if arguments.dtype not in (None, "float64"):
        raise ConfigError(
            f"--dtype {arguments.dtype} must be float64, because rounding in other dtypes could hide a wrong layout "
            "from hfscale verify: leave --dtype out"
        )
    auto_class = flags.auto_class_of(arguments.auto_class)
    asked = flags.layout_of(arguments)
    config = flags.load_config(arguments.model, arguments.trust_remote_code)
    other = arguments.auto_class != "AutoModelForCausalLM"
    chosen = {"auto_class": auto_class} if other else {}
    working(f"training a tiny {config.model_type} in {asked.describe()} and in one process")
    with flags.building(arguments, config):
        used, parity = verify(
            config, asked, lora=arguments.lora, **chosen, **flags.remote_code(arguments)
        )
    layout = {axis: used.asked(axis) for axis in AXES}
    result = {**asdict(parity), "tolerance": TOLERANCE, "equal": parity.worst() <= TOLERANCE}
    document = {"family": config.model_type, "layout": layout, "ranks": used.total_size, **result}
    name = arguments.auto_class if other else ""
    show(arguments, document, render(config, asked, used, parity, arguments.lora, name))
    return int(parity.worst() > TOLERANCE)
