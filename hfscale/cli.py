"""The ``hfscale`` command."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from .config import SCHEDULES, ParallelConfig
from .errors import ConfigError, HFScaleError
from .parallelize import plan as make_plan
from .pipeline import add_schedule_command
from .pipeline.orders import check
from .plan import describe_blueprint, render, to_json
from .version import __version__

_DTYPES = ("float64", "float32", "bfloat16", "float16")
_SIZES = {
    "--tp": "tensor ranks: each layer's matrices are cut",
    "--dp-shard": "sharded-data ranks (ZeRO-3, FSDP2)",
    "--dp-replicate": "replicas of the whole sharded model",
    "--pp": "pipeline stages",
    "--ep": "expert ranks, which are ranks of tp and of the data axes: whole experts on each",
    "--expert-tp": "1 (whole experts) or tp: ranks over which each expert is cut besides, with --ep",
    "--cp": "context ranks: the sequence is cut",
}
# Flag -> field of the layout, what to call the value, help.
_PIPELINE = {
    "--schedule": ("pipeline_schedule", "NAME", f"with --pp: {', '.join(SCHEDULES)}, or a .csv file (default: 1f1b)"),
    "--microbatches": ("num_microbatches", "N", "with --pp: microbatches of one step"),
    "--virtual-stages": ("virtual_stages", "N", "with --pp: stages per pipeline rank"),
    "--stage-layers": ("stage_layers", "N,N,...", "with --pp: layers of each stage (default: balanced by cost)"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command line; returns the exit code: 0, 1 where a check failed, 2 where it cannot be carried out."""
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed the help, the version or what is wrong
        return int(stop.code or 0)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except HFScaleError as error:
        print(f"hfscale {arguments.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hfscale", description="Train stock Hugging Face models at any scale.")
    parser.add_argument("--version", action="version", version=f"hfscale {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    plan = commands.add_parser(
        "plan",
        help="show what becomes of every parameter under a layout",
        description="Show, for every parameter of a model, how a layout cuts it, what each rank holds and what is done "
        "to its gradient. Reads only the config: no weights, no processes, no GPU.",
    )
    _add_model(plan)
    _add_layout(plan)
    plan.add_argument(
        "--quantize",
        choices=("nf4", "fp4", "int8"),
        help="say what bitsandbytes would quantize, and where blocks align",
    )
    plan.add_argument("--json", action="store_true", help="print JSON instead of a table")
    plan.set_defaults(run=_plan)
    verify = commands.add_parser(
        "verify",
        help="prove a layout on this machine: a tiny clone of the model against one process",
        description="Train a tiny clone of a model (same classes, few layers, small widths) in a layout on CPU "
        "processes and in one process with stock transformers, and compare loss, gradients, norm, weights and "
        "checkpoint. Exits with 1 on any difference. Needs no weights and no GPU.",
    )
    _add_model(verify)
    _add_layout(verify)
    verify.add_argument(
        "--lora",
        metavar="TARGETS",
        nargs="?",
        const="all-linear",
        help="train LoRA adapters instead, against stock PEFT: all-linear (the default), or names joined by commas",
    )
    verify.set_defaults(run=_verify)
    blueprint = commands.add_parser(
        "blueprint",
        help="print which parts of a model tensor parallelism cuts, as an entry for hfscale's table of families",
        description="Print the blueprint of a model and where it comes from: hfscale's table, transformers' plan, or "
        "inference, which derives it from a tiny clone and proves it there. Needs no weights and no GPU.",
    )
    _add_model(blueprint)
    blueprint.add_argument("--infer", action="store_true", help="infer it, also where the family is known")
    blueprint.set_defaults(run=_blueprint)
    schedule = commands.add_parser(
        "schedule",
        help="draw what a pipeline schedule does, and beside it how a run went",
        description="Draw the timeline of a pipeline schedule: rows are ranks, the number in a box is the microbatch. "
        "Reads no model and starts no processes.",
    )
    add_schedule_command(schedule)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model directory, a Hub id, or the path of a config.json")
    parser.add_argument("--auto-class", default="AutoModelForCausalLM", help="the Auto class (default: %(default)s)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that comes with the model")
    parser.add_argument("--dtype", choices=_DTYPES, help="type of the weights (default: the config's)")


def _add_layout(parser: argparse.ArgumentParser) -> None:
    # Values stay strings here: ParallelConfig says what is wrong with them, and fills in those left out.
    layout = parser.add_argument_group("layout")
    for flag, text in _SIZES.items():
        layout.add_argument(flag, metavar="N", help=text)
    layout.add_argument(
        "--sequence-parallel", action="store_true", default=None, help="cut norms and residuals over tp"
    )
    for flag, (_, metavar, text) in _PIPELINE.items():
        layout.add_argument(flag, metavar=metavar, help=text)


def _layout(arguments: argparse.Namespace) -> ParallelConfig:
    def of(flag: str) -> str | None:
        value: str | None = getattr(arguments, flag[2:].replace("-", "_"))
        return value

    sizes: dict[str, Any] = {f"{flag[2:].replace('-', '_')}_size": of(flag) for flag in _SIZES}
    pipeline: dict[str, Any] = {name: of(flag) for flag, (name, _, _) in _PIPELINE.items()}
    layout = ParallelConfig(**sizes, **pipeline, sequence_parallel=arguments.sequence_parallel)
    pp_size, schedule = layout.size("pp"), str(layout.pipeline_schedule)
    given = [flag for flag in _PIPELINE if of(flag) is not None]
    if pp_size == 1 and given:
        raise ConfigError(f"{', '.join(given)} is about pipeline stages, and there is one: give --pp 2 or more as well")
    if pp_size > 1 and not schedule.endswith(".csv"):
        check(schedule, pp_size, layout.num_microbatches or 2 * pp_size, int(layout.virtual_stages or 1))
    return layout


def _verify(arguments: argparse.Namespace) -> int:
    from .testing.verify import TOLERANCE, render, verify

    transformers.utils.logging.disable_progress_bar()  # of a clone's few kilobytes
    asked, config = _layout(arguments), _load_config(arguments.model, arguments.trust_remote_code)
    used, parity = verify(config, asked, lora=arguments.lora, **_code(arguments))
    print(render(config, asked, used, parity, arguments.lora))
    return int(parity.worst() > TOLERANCE)


def _plan(arguments: argparse.Namespace) -> int:
    layout, auto_class = _layout(arguments), _auto_class(arguments.auto_class)
    config = _load_config(arguments.model, arguments.trust_remote_code)
    with _building(arguments, config):
        chosen = {} if arguments.quantize is None else {"quantization_config": _quantization(arguments.quantize)}
        planned = make_plan(config, layout, auto_class=auto_class, dtype=arguments.dtype, **chosen, **_code(arguments))
    print(to_json(planned) if arguments.json else render(planned))
    return 0


def _quantization(kind: str) -> Any:
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind)


def _blueprint(arguments: argparse.Namespace) -> int:
    auto_class = _auto_class(arguments.auto_class)
    config = _load_config(arguments.model, arguments.trust_remote_code)
    with _building(arguments, config), torch.device("meta"):
        model = auto_class.from_config(config, **_code(arguments))
    print(describe_blueprint(model, arguments.infer))
    return 0


def _code(arguments: argparse.Namespace) -> dict[str, bool]:
    return {"trust_remote_code": True} if arguments.trust_remote_code else {}


@contextmanager
def _building(arguments: argparse.Namespace, config: Any) -> Iterator[None]:
    """Within: the host's word for "no such architecture under this Auto class" becomes ours."""
    try:
        yield
    except HFScaleError:
        raise
    except ValueError as error:
        raise ConfigError(
            f"{arguments.auto_class} cannot build a {config.model_type!r} model: {_first_line(error)} Choose another "
            "--auto-class"
        ) from error


def _auto_class(name: str) -> Any:
    found = getattr(transformers, name, None) if name.startswith("AutoModel") else None
    if not hasattr(found, "from_config"):
        known = [known for known in dir(transformers) if known.startswith("AutoModel")]
        raise ConfigError(
            f"--auto-class {name} is not one of transformers' Auto classes: use one of {', '.join(known)}"
        )
    return found


def _load_config(model: str, trusted: bool = False) -> Any:
    path = Path(model)
    if not path.exists() and (path.is_absolute() or model.startswith(".") or len(path.parts) > 2):
        raise ConfigError(f"{model} does not exist: give a model directory, a config.json or a Hub id (owner/name)")
    if path.is_dir() and not (path / "config.json").exists():
        raise ConfigError(f"{model} has no config.json: give the directory of a Hugging Face model")
    try:
        return transformers.AutoConfig.from_pretrained(model, trust_remote_code=trusted)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"no config could be read from {model}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
