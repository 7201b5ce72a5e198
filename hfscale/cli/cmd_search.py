"""Find the fastest way to train a model on a number of GPUs, by arithmetic: all layouts, pipeline schedules, microbatch
sizes and recomputation settings are compared. Show the fastest setting of each combination of parallel axes, the time
that saving memory costs, and why other combinations do not fit. Reads only the config.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from . import model_flags as flags
from .look import check_writable, print_json, working

HELP = "find the fastest layout of a model on a number of GPUs, before renting them"
EXAMPLE = """hfscale search meta-llama/Llama-3.1-8B --gpus 64 --hardware h100 --tokens-per-step 4M
hfscale search meta-llama/Llama-3.1-70B --gpus 8 --tokens-per-step 256K --lora --quantize nf4 --out recipe.yaml"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_model_arguments(parser)
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="ranks of the run")
    parser.add_argument(
        "--tokens-per-step",
        required=True,
        metavar="N",
        help="tokens per step, in whole sequences: K, M and G are 2^10, 2^20 and 2^30, so 4M is 4 x 2^20",
    )
    parser.add_argument(
        "--max-memory",
        metavar="SIZE",
        help="memory of a rank, such as 60GiB (2^30) or 60GB (10^9) (default: 87.5%% of the GPU's)",
    )
    flags.add_machine_arguments(parser)
    flags.add_training_arguments(parser)
    parser.add_argument(
        "--learning-rate",
        type=float,
        metavar="LR",
        help="a learning rate tuned for --its-tokens-per-step",
    )
    parser.add_argument(
        "--its-tokens-per-step", metavar="N", help="the batch that --learning-rate was tuned for"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a recipe for hfscale train")
    flags.add_reports(parser)


def run(arguments: argparse.Namespace) -> None:
    check_writable(arguments.out, *flags.reports_of(arguments).values())
    from ..cost.model.machines_known import constants_of, evidence, find_machine
    from ..cost.tools.model_summary import summarize
    from ..cost.tools.search import search

    if arguments.quantize is not None and arguments.lora is None:
        raise ConfigError(
            f"--quantize {arguments.quantize} leaves no weights to train: give --lora as well"
        )
    machine = find_machine(arguments.hardware)
    config = flags.load_config(arguments.model, arguments.trust_remote_code)
    dtype = arguments.dtype or ("float32" if arguments.lora is None else "bfloat16")
    optimizer = arguments.optimizer or flags.OPTIMIZER
    tile = arguments.tile_tokens
    given = arguments.mixed_precision
    on_host = tuple(name for name in flags.ON_HOST if name in (arguments.offload or "").split(","))
    asked = {"recompute": arguments.recompute, "tile_tokens": tile, "offload": on_host or None}
    working(f"planning {arguments.model}")
    training: dict[str, Any] = {"dtype": dtype, "optimizer": optimizer}
    more: dict[str, Any] = {**flags.plan_arguments(arguments), **training}
    del more["memory"]  # the search varies memory settings that are not asked for

    def searched(mixed: str) -> Any:
        return search(
            summarize(
                config,
                sequence=arguments.sequence_length,
                tile=tile,
                **{**more, "mixed_precision": mixed},
            ),
            arguments.gpus,
            machine,
            tokens_per_step=arguments.tokens_per_step,
            max_memory=arguments.max_memory,
            only={name: value for name, value in asked.items() if value is not None},
            constants=constants_of(arguments.hardware),
        )

    precisions = (
        (("bf16", "bf16_params") if dtype == "float32" else ("no",)) if given is None else (given,)
    )
    mixed, best = _best(searched, precisions)
    training["mixed_precision"] = mixed
    if arguments.json:
        print_json({**best.to_dict(), **training})
    else:
        print(best)
        rates, seconds = evidence(arguments.hardware)
        print(f"\nweights in {dtype}, mixed precision {mixed}, {optimizer}.\n{rates}.\n{seconds}.")
        print(
            "Prove a layout with `hfscale verify`; see the terms of its time with `hfscale estimate`."
        )
        _print_rules(arguments, best.tokens)
    flags.write_reports(arguments, best, f"{arguments.model} on {best.gpus} x {machine.name}")
    if arguments.out is not None:
        _write(arguments, best, training)


def _best(searched: Callable[[str], Any], precisions: Sequence[str]) -> tuple[str, Any]:
    """Return the mixed precision with which the fastest layout is found, and the result of that search; ``searched``
    runs a search for one precision. Layouts that fit without offload are preferred to those with it.
    """
    tried = dict[str, Any]()
    failed = list[ConfigError]()
    for mixed in precisions:
        try:
            tried[mixed] = searched(mixed)
        except ConfigError as error:
            failed.append(error)
    if not tried:
        raise failed[0]
    return min(
        tried.items(),
        key=lambda item: (item[1].uses_host, item[1].winner.seconds),
    )


def _print_rules(arguments: argparse.Namespace, tokens: int) -> None:
    from ..cost.tools.search import learning_rates

    if (arguments.learning_rate is None) != (arguments.its_tokens_per_step is None):
        raise ConfigError(
            "--learning-rate and --its-tokens-per-step must be given together, got only one of them: give both, or "
            "neither"
        )
    if arguments.learning_rate is None:
        return
    before = arguments.its_tokens_per_step
    print(
        f"\na learning rate of {arguments.learning_rate:g} at {before:,} tokens a step becomes, by rule of thumb"
    )
    for rule in learning_rates(arguments.learning_rate, before, tokens):
        print(f"  {rule.learning_rate:.3g}  {rule.name}: {rule.says}")


def _write(arguments: argparse.Namespace, found: Any, training: dict[str, Any]) -> None:
    from ..cost.tools.search import recipe_of

    more: dict[str, Any] = {"training": training}
    if arguments.lora is not None:
        targets = arguments.lora if arguments.lora == "all-linear" else arguments.lora.split(",")
        more["adapter"] = {"method": "lora", "r": arguments.rank or 16, "target_modules": targets}
    if arguments.quantize is not None:
        more["quantization"] = flags.QUANTIZATIONS.get(
            arguments.quantize, {arguments.quantize: True}
        )
    arguments.out.write_text(recipe_of(found, arguments.model, **more))
    if not arguments.json:
        print(f"\nwrote {arguments.out}")
