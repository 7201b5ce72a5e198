"""``hfscale memory-ladder``: count a rank's memory as memory-saving features are added one by one."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .amounts import tokens_of
from .look import add_json, check_writable, print_json, table, working
from .model import add_model_arguments, building, check_place, load_config

if TYPE_CHECKING:
    from ..cost.tools.ladder import Step

HELP = "count what a rank holds as one lever after the other is added"
DESCRIPTION = (
    "Add one lever after the other to a run: 16 bits, recomputation, an 8-bit optimizer, its state on the host, LoRA, "
    "LoRA over 4 bits, two tensor ranks, two data ranks. Each runs a step of a small clone of the model on CPU "
    "processes, of which the bytes are counted, beside the estimate for it and the estimate for the model itself. "
    "Needs no weights and no GPU."
)
EXAMPLE = "hfscale memory-ladder meta-llama/Llama-3.1-8B --tokens 4096 --out ladder.png"
_COLOURS = {
    "weights": "#4c566a",
    "adapters": "#a3be8c",
    "gradients": "#0b7285",
    "optimizer": "#d08770",
    "activations": "#ebcb8b",
    "other": "#d8dee9",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--tokens",
        metavar="N",
        default="4096",
        help="tokens in a microbatch of the model itself, as 4096 or 4K (default: 4096)",
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="draw it: a .png or .svg file (needs matplotlib)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    check_writable(arguments.out)
    check_place(arguments.model)
    tokens = tokens_of(arguments.tokens, "--tokens")
    if arguments.out is not None:
        from .schedule_drawing.schedule_plot import check_drawing

        check_drawing(arguments.out)
    import logging

    import transformers

    from ..cost.tools.ladder import climb

    transformers.utils.logging.disable_progress_bar()  # of a clone's few kilobytes
    logging.getLogger("hfscale").setLevel(logging.ERROR)  # weights that train in 16 bits are there to be compared
    config = load_config(arguments.model, arguments.trust_remote_code)
    working(f"training a small {config.model_type} with each of the levers")
    with building(arguments, config):
        steps = climb(config, tokens)
    if arguments.json:
        print_json([step.to_dict() for step in steps])
        return 0
    print(_text(steps, config.model_type, tokens))
    if arguments.out is not None:
        draw(arguments.out, steps, config.model_type, tokens)
    return 0


def _text(steps: "list[Step]", family: str, tokens: int) -> str:
    from ..plan.table import human

    peaks = ["allocator's peak"] if any(step.allocated for step in steps) else []
    head = ["with", *steps[0].counted, "counted", "estimated", "ratio", *peaks, f"{family} itself"]
    rows = []
    for step in steps:
        sizes = [human(size) for size in (*step.counted.values(), *step.totals)]
        peak = [human(step.allocated)] if peaks else []
        model = "-" if step.model is None else human(step.model.total)
        rows.append([step.name, *sizes, f"{step.ratio:.3f}", *peak, model])
    found = table(head, rows, right=range(1, len(head)))
    return (
        f"{found}\n\ncounted and estimated: a small clone, of the rank that holds most, without gathered weights and "
        f"the loss's chunk;\n{family} itself: the estimate of all of it, with {tokens:,} tokens in a microbatch"
    )


def draw(path: Path, steps: "list[Step]", family: str, tokens: int) -> None:
    """Draw stacked bars of the clone, counted beside estimated, and of the model itself."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure: Any = Figure(figsize=(12, 4.6), facecolor="white")
    left, right = figure.subplots(1, 2)
    names = [step.name for step in steps]
    counted = [step.counted for step in steps]
    estimated = [{kind: step.estimated[kind] for kind in step.counted} for step in steps]
    _bars(left, counted, -0.2, 0.38, 2**20, "")
    _bars(left, estimated, 0.2, 0.38, 2**20, "///")
    left.set_title("a small clone: counted, and estimated (hatched)", loc="left", fontsize=10)
    left.set_ylabel("MiB of a rank")
    whole = list[dict[str, int]]()
    for step in steps:
        kinds = {} if step.model is None else step.model.kinds
        shown = {kind: size for kind, size in kinds.items() if kind in step.counted}
        whole.append({**shown, "other": sum(kinds.values()) - sum(shown.values())})
    _bars(right, whole, 0.0, 0.7, 2**30, "")
    right.set_title(f"{family} itself: estimated, {tokens:,} tokens", loc="left", fontsize=10)
    right.set_ylabel("GiB of a rank")
    for axes in (left, right):
        axes.set_xticks(range(len(names)), names, rotation=35, ha="right")
        axes.spines[["top", "right"]].set_visible(False)
    right.legend(
        handles=[Patch(color=colour, label=kind) for kind, colour in _COLOURS.items()], frameon=False, fontsize=8
    )
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    print(f"drawn in {path}")


def _bars(axes: Any, columns: list[dict[str, int]], shift: float, width: float, unit: int, hatch: str) -> None:
    for place, kinds in enumerate(columns):
        below = 0.0
        for kind, size in kinds.items():
            style = {"color": _COLOURS[kind], "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}
            axes.bar(place + shift, size / unit, width, bottom=below, **style)
            below += size / unit
