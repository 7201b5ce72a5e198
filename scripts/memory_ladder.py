"""Measure and estimate a rank's memory as memory-saving options are added one by one.

    python scripts/memory_ladder.py meta-llama/Llama-3.1-8B [--tokens 4096] [--json] [--out ladder.png]

16 bits, recomputation, an 8-bit optimizer, its state on the host, LoRA, LoRA over 4 bits, two tensor ranks, two data
ranks: a small clone of the model takes a step with each on CPU processes (storages of parameters, gradients and the
optimizer's state; saved tensors), beside the estimate for that clone, and the estimate for the model itself, which
nothing runs. Needs no weights and no GPU.
"""

import argparse
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from hfscale._compat.torch_device import device_module, is_accelerator
from hfscale._compat.transformers.classes import from_config as host_from_config
from hfscale.api.build import from_pretrained, plan
from hfscale.cli.look import check_writable
from hfscale.cli.model_flags import tokens_of
from hfscale.config.memory import MemoryConfig
from hfscale.config.parallel import ParallelConfig
from hfscale.cost.model.memory_model import MemoryEstimate
from hfscale.cost.tools.memory_report import held_bytes, memory_estimate
from hfscale.errors import PlanError
from hfscale.features.memory.saved import SavedBytes, count_saved
from hfscale.models.clone import tiny_clone
from hfscale.optim import create_optimizer
from hfscale.plan.columns import aligned
from hfscale.plan.table import human
from hfscale.testing.pool import RankPool
from hfscale.train.runtime import runtime_of
from hfscale.train.step import batch_world, train_step

_COLOURS = {
    "weights": "#4c566a",
    "adapters": "#a3be8c",
    "gradients": "#0b7285",
    "optimizer": "#d08770",
    "activations": "#ebcb8b",
    "other": "#d8dee9",
}
ROWS = 8
LENGTH = 64
_LAYERS = 4
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_SIZES |= {"head_dim": 64, "vocab_size": 2048, "max_position_embeddings": 256}


@dataclass(frozen=True)
class Rung:
    """Describe a run with all options up to one."""

    name: str  # of the lever that is added
    dtype: torch.dtype = torch.bfloat16  # of the weights
    recompute: str = "none"
    optimizer: str = "adamw_torch_fused"
    on_host: bool = False  # whether the optimizer's state is there
    lora: bool = False  # whether adapters train
    quantized: bool = False  # over a base in 4 bits
    sizes: Mapping[str, Any] = field(default_factory=dict)  # of the layout

    def options(self) -> dict[str, Any]:
        """Return the optimizer's options: stochastic rounding in bf16, where small updates would be lost."""
        return {"stochastic_rounding": self.dtype == torch.bfloat16 and not self.lora}

    def choices(self) -> dict[str, Any]:
        """Return the arguments of ``from_pretrained`` and of ``plan``."""
        memory = MemoryConfig(recompute=self.recompute, offload_optimizer=self.on_host)
        found: dict[str, Any] = {
            "parallel": ParallelConfig(**self.sizes),
            "memory": memory,
            "dtype": self.dtype,
        }
        if self.lora:
            from peft import LoraConfig

            found["peft_config"] = LoraConfig(
                r=8, target_modules="all-linear", task_type="CAUSAL_LM"
            )
        if self.quantized:
            from transformers import BitsAndBytesConfig

            found["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4"
            )
        return found


_EIGHT: dict[str, Any] = {"recompute": "full", "optimizer": "adamw_8bit"}
LADDER = (
    Rung("float32", torch.float32),
    Rung("bf16"),
    Rung("recompute", recompute="full"),
    Rung("8-bit optimizer", **_EIGHT),
    Rung("offload", **_EIGHT, on_host=True),
    Rung("LoRA", **_EIGHT, lora=True),
    Rung("QLoRA", **_EIGHT, lora=True, quantized=True),
    Rung("tp2", **_EIGHT, lora=True, quantized=True, sizes={"tp_size": 2}),
    Rung("fsdp2", **_EIGHT, lora=True, quantized=True, sizes={"tp_size": 2, "dp_shard_size": 2}),
)
"""In turn. Adapters leave so little state to the optimizer that it comes back from the host with them."""


@dataclass(frozen=True)
class Step:
    """Hold the result of one rung, for the rank that holds most."""

    name: str  # of the lever that is added
    counted: dict[str, int]  # bytes by kind, of the clone
    estimated: dict[str, int]  # of the same
    on_host: int  # bytes of the clone's optimizer that were counted on the host
    allocated: int  # the allocator's peak, on a GPU; 0 elsewhere
    # The estimate for the model itself; None where it does not fit the layout.
    model: MemoryEstimate | None = None

    @property
    def totals(self) -> tuple[int, int]:
        """Bytes of all counted kinds: counted, and estimated."""
        return sum(self.counted.values()), sum(self.estimated[kind] for kind in self.counted)

    @property
    def ratio(self) -> float:
        """The estimate divided by the count."""
        counted, estimated = self.totals
        return estimated / counted

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain numbers and strings."""
        names = ("counted", "estimated", "on_host", "allocated", "ratio")
        model = None if self.model is None else {**self.model.kinds, "total": self.model.total}
        return {"lever": self.name, **{name: getattr(self, name) for name in names}, "model": model}


def climb(
    config: PreTrainedConfig, tokens: int = 2048, rungs: Sequence[Rung] = LADDER
) -> list[Step]:
    """Measure a step of each rung on a small clone; ``tokens`` are those of a microbatch of one batch rank."""
    known = config.to_dict()
    found = list[Step]()
    clone = tiny_clone(
        config,
        layers=_LAYERS,
        **{k: size for k, size in _SIZES.items() if known.get(k) is not None},
    )
    with tempfile.TemporaryDirectory() as directory:
        host_from_config(AutoModelForCausalLM, clone, dtype=torch.float32).save_pretrained(
            directory
        )
        for rung in rungs:
            ranks = ParallelConfig(**rung.sizes).total_size
            with RankPool(ranks) if ranks > 1 else nullcontext() as pool:
                steps = (
                    [_measured(directory, rung)]
                    if pool is None
                    else pool.run(_measured, directory, rung)
                )
            fullest = max(steps, key=lambda step: step.totals[0])
            found.append(replace(fullest, model=_of_model(config, rung, tokens)))
    return found


def _measured(directory: str, rung: Rung) -> Step:
    """Run a step of the clone with the options of a rung."""
    held, estimated, kept, peak = _stepped(directory, rung)
    # Saved-tensor hooks do not see what a layer keeps while it is recomputed.
    if rung.recompute != "none":
        _, _, whole, _ = _stepped(directory, replace(rung, recompute="none"))
        kept = replace(kept, around=kept.around + whole.layers // _LAYERS)
    on_host = held["optimizer"] if rung.on_host else 0
    counted = {
        **held,
        "optimizer": held["optimizer"] - on_host,
        "activations": kept.layers + kept.around,
    }
    return Step(rung.name, counted, estimated, on_host, peak)


def _stepped(directory: str, rung: Rung) -> tuple[dict[str, int], dict[str, int], SavedBytes, int]:
    """Return the bytes held, estimated and saved in a step of the clone, and the allocator's peak."""
    model = from_pretrained(directory, **rung.choices()).train()
    runtime = runtime_of(model)
    device = runtime.mesh.device
    rows = ROWS // batch_world(model)
    optimizer = create_optimizer(model, rung.optimizer, lr=1e-4, **rung.options())
    if is_accelerator(device):
        device_module(device).reset_peak_memory_stats(device)
    ids = torch.randint(3, model.config.get_text_config().vocab_size, (rows, LENGTH)).to(device)
    with count_saved(runtime.model, runtime.plan.layers, runtime.plan.head) as saved:
        train_step(model, {"input_ids": ids, "labels": ids})
    optimizer.step()
    estimated = memory_estimate(
        model, rung.optimizer, tokens=rows * LENGTH, optim_args=rung.options()
    ).kinds
    peak = device_module(device).max_memory_allocated(device) if is_accelerator(device) else 0
    return held_bytes(model, optimizer), estimated, saved, peak


def _of_model(config: PreTrainedConfig, rung: Rung, tokens: int) -> MemoryEstimate | None:
    try:
        planned = plan(config, **rung.choices())
    except PlanError:
        return None
    return memory_estimate(planned, rung.optimizer, tokens=tokens, optim_args=rung.options())


def _text(steps: list[Step], family: str, tokens: int) -> str:
    peaks = ["allocator's peak"] if any(step.allocated for step in steps) else []
    head = ["with", *steps[0].counted, "counted", "estimated", "ratio", *peaks, f"{family} itself"]
    rows = []
    for step in steps:
        sizes = [human(size) for size in (*step.counted.values(), *step.totals)]
        peak = [human(step.allocated)] if peaks else []
        model = "-" if step.model is None else human(step.model.total)
        rows.append([step.name, *sizes, f"{step.ratio:.3f}", *peak, model])
    found = "\n".join(aligned([head, *rows], ruled=True))
    return (
        f"{found}\n\ncounted and estimated: a small clone, of the rank that holds most, without gathered weights and "
        f"the loss's chunk;\n{family} itself: the estimate of all of it, with {tokens:,} tokens in a microbatch"
    )


def draw(path: Path, steps: list[Step], family: str, tokens: int) -> None:
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
        handles=[Patch(color=colour, label=kind) for kind, colour in _COLOURS.items()],
        frameon=False,
        fontsize=8,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    print(f"drawn in {path}")


def _bars(
    axes: Any, columns: list[dict[str, int]], shift: float, width: float, unit: int, hatch: str
) -> None:
    for place, kinds in enumerate(columns):
        below = 0.0
        for kind, size in kinds.items():
            style = {
                "color": _COLOURS[kind],
                "hatch": hatch,
                "edgecolor": "white",
                "linewidth": 0.4,
            }
            axes.bar(place + shift, size / unit, width, bottom=below, **style)
            below += size / unit


def main(argv: list[str] | None = None) -> None:
    """Climb the ladder, print the table, and draw it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a directory with a config, or a name on the Hub")
    parser.add_argument(
        "--tokens", default="4096", help="in a microbatch of the model itself, as 4096 or 4K"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="draw it: a .png or .svg file (needs matplotlib)")
    arguments = parser.parse_args(argv)
    check_writable(arguments.out)
    transformers.utils.logging.disable_progress_bar()  # of a clone's few kilobytes
    # Weights that train in 16 bits are there to be compared.
    logging.getLogger("hfscale").setLevel(logging.ERROR)
    config = AutoConfig.from_pretrained(arguments.model)
    tokens = tokens_of(arguments.tokens, "--tokens")
    steps = climb(config, tokens)
    print(
        json.dumps([step.to_dict() for step in steps])
        if arguments.json
        else _text(steps, config.model_type, tokens)
    )
    if arguments.out is not None:
        draw(arguments.out, steps, config.model_type, tokens)


if __name__ == "__main__":
    main()
