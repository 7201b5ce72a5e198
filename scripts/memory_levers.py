"""Write the tables of docs/memory.md that say what each lever holds in each layout, beside what it ideally would.

python scripts/memory_levers.py [--models NAME ...] [--levers NAME ...] [--layouts NAME ...]

Small models train for a step on CPU processes (:mod:`memory_measured`): weights, adapters, gradients, the optimizer's
state and what is kept for the backward pass are counted, on the device and on the host. Ideally two ranks hold half of
what one holds of the same lever and batch; replicas hold all of it but half of the activations. Seconds are the
processor's, of steps in turn with those of the same layout without the lever: the least of several over the least of
several.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from memory_measured import Case, comparable, estimated, gpt2, llama, mixture, seen
from memory_table import PAGE
from transformers import AutoModelForCausalLM, PreTrainedConfig

import hfscale
from hfscale.testing import RankPool

RESULTS = Path(__file__).parent / "bench" / "results" / "memory_levers.json"
BEGIN = "<!-- written by scripts/memory_levers.py -->"
END = "<!-- end of levers -->"
ROWS = 8
LENGTH = 32
STEPS = 3
_TENSOR = {"tp_size": 2, "sequence_parallel": True, "sequence_regather": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": _TENSOR,
    "pp2": {"pp_size": 2},
    "dp_shard2": {"dp_shard_size": 2},
    "dp_replicate2": {"dp_replicate_size": 2},
    "cp2": {"cp_size": 2},
    "ep2": {"ep_size": 2, "dp_shard_size": 2},
    "tp2, ep2": {**_TENSOR, "ep_size": 2},
}
MODELS: dict[str, tuple[str, Callable[[], PreTrainedConfig]]] = {
    "llama": ("Llama, four layers, hidden 512, MLP of 1,408", partial(llama, 512)),
    "wide": ("Llama, two layers, hidden 1,024, MLP of 4,096", partial(llama, 1024, 2, 4096)),
    "mixture": ("Mixture of four experts, four layers, hidden 256", partial(mixture, 256)),
    "gpt2": ("GPT-2, four layers, hidden 256", partial(gpt2, 256)),
}
_TIMED = "llama"
_LORA: dict[str, Any] = {"r": 8, "target_modules": "all-linear"}
_EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
_BF16 = {"dtype": torch.bfloat16}
LEVERS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16 over float32 weights": {"mixed_precision": "bf16"},
    "fp16 over float32 weights": {"mixed_precision": "fp16"},
    "fp8 over float32 weights": {"mixed_precision": "fp8"},
    "bf16 weights, stochastic rounding": {**_BF16, "stochastic_rounding": True},
    "recompute full": {"memory": {"recompute": "full"}},
    "recompute every 2nd": {"memory": {"recompute": 2}},
    "recompute to a budget": {"memory": {"recompute": "budget"}},
    "eager attention": {"attention": "eager"},
    "recompute selective": {"memory": {"recompute": "selective"}, "attention": "eager"},
    "offload activations": {"memory": {"offload_activations": "1KiB"}},
    "compress activations": {"memory": {"compress_activations": "1KiB"}},
    "offload optimizer": {"memory": {"offload_optimizer": True}},
    "8-bit optimizer": {"optimizer": "adamw_8bit"},
    "gradients in bf16": {"gradient_compression": "bf16"},
    "gradients by PowerSGD": {"gradient_compression": "powersgd"},
    "LoRA": {"lora": _LORA},
    "QLoRA": {"lora": _LORA, "quantized": True},
}
_BESIDE = {"recompute selective": "eager attention"}
"""What a lever is compared with, if not with none."""
_BUDGET = {"llama": 0.75}
"""Of what one process keeps, by family: the layers of others than LLaMA's are chosen by an estimate from above."""


def case_of(
    name: str, layout: str, config: PreTrainedConfig, budget: int, path: str | None
) -> Case | None:
    """The step of a cell; ``None`` where there is none: refused, or nothing that the lever is about."""
    lever = dict(LEVERS[name])
    axes = LAYOUTS[layout]
    experts = hasattr(config, "num_experts")
    needs = (
        ("gradient_compression" in lever, layout == "dp_replicate2"),
        ("ep_size" in axes, experts),
        (name == "recompute selective", "cp_size" not in axes),
    )
    if any(asked and not there for asked, there in needs):
        return None
    if name == "recompute to a budget":
        lever["memory"] = {"recompute": f"{budget // (1024 if layout == 'one' else 2048)}KiB"}
    if "lora" in lever and experts:
        lever["lora"] = {
            **_LORA,
            **_EXPERTS,
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        }
    halves = layout not in ("one", "cp2") and "tp_size" not in axes
    return Case(
        config,
        lever,
        axes,
        rows=ROWS // 2 if halves else ROWS,
        length=LENGTH
        if config.model_type == "llama"
        else LENGTH + 4,  # as long as no weight is wide
        microbatches=2 if "pp_size" in axes else 1,
        path=path if "quantized" in lever else None,
    )


_BUILT: dict[Any, tuple[Any, Any]] = {}


def seconds(case: Case, beside: Case) -> float:
    """Of a step over those of a step beside it, on this rank."""
    key = repr((beside.lever, beside.axes, beside.config.to_dict()))
    if key not in _BUILT:
        _BUILT.clear()
        _BUILT[key] = beside.built()
    runs = [_BUILT[key], case.built()]
    least = [float("inf"), float("inf")]
    for _ in range(STEPS):
        for number, (model, optimizer) in enumerate(runs):
            begin = time.process_time()
            hfscale.train_step(model, case.batch())
            optimizer.step()
            optimizer.zero_grad()
            least[number] = min(least[number], time.process_time() - begin)
    return least[1] / least[0]


def measured(pool: RankPool, case: Case, beside: Case, timed: bool) -> dict[str, Any]:
    """Bytes by kind of the fullest rank, the estimate of their sum, and the time of a step."""

    def run(function: Callable[..., Any], *given: Any) -> list[Any]:
        return pool.run(function, *given) if case.axes else [function(*given)]

    fullest = max(run(seen, case), key=lambda rank: rank.total)
    total, _ = comparable(case, estimated(case, fullest.stage, fullest.chosen), fullest.head)
    found: dict[str, Any] = {"counted": fullest.bytes, "estimated": total}
    return {**found, "time": round(max(run(seconds, case, beside)), 3)} if timed else found


def ideal(one: dict[str, int], layout: str) -> float:
    """Bytes of a rank of two."""
    states = sum(size for kind, size in one.items() if kind != "activations")
    return one["activations"] / 2 + (states if layout == "dp_replicate2" else states / 2)


def table(results: dict[str, Any], model: str) -> str:
    """In Markdown: bytes over the ideal, the estimate over them, and the time of a step."""
    found = results[model]
    layouts = [layout for layout in LAYOUTS if any(layout in cells for cells in found.values())]
    lines = [
        f"{MODELS[model][0]}:",
        "",
        f"| | {' | '.join(layouts)} |",
        "|---" * (len(layouts) + 1) + "|",
    ]
    for name in (name for name in LEVERS if name in found):
        alone = found[name if "one" in found[name] else "none"]["one"]["counted"]
        plain = found[_BESIDE.get(name, "none")]["one"]["counted"]
        cells = []
        for layout in layouts:
            cell = found[name].get(layout)
            total = sum(cell["counted"].values()) if cell else 0
            best = sum(plain.values()) if layout == "one" else ideal(alone, layout)
            numbers = [f"{total / best:.3f}", f"{cell['estimated'] / total:.3f}"] if cell else []
            numbers += [f"{cell['time']:.2f}"] if cell and "time" in cell else []
            cells.append(", ".join(numbers))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tables(results: dict[str, Any]) -> str:
    """One for each model."""
    return "\n\n".join(table(results, model) for model in MODELS if model in results)


def main() -> None:
    """Measure, keep, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--levers", nargs="*", default=list(LEVERS))
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS))
    parser.add_argument("--missing", action="store_true", help="only what was not measured yet")
    parser.add_argument(
        "--untimed", action="store_true", help="bytes alone; times stay as they were"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    for model in given.models:
        config = MODELS[model][1]()
        with tempfile.TemporaryDirectory() as path, RankPool(2, timeout=600) as pool:
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(path)
            whole = case_of("none", "one", config, 0, None)
            assert whole is not None
            budget = round(_BUDGET.get(config.model_type, 2.0) * seen(whole).bytes["activations"])
            for layout in given.layouts:
                for name in given.levers:
                    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
                    if given.missing and layout in results.get(model, {}).get(name, {}):
                        continue
                    case = case_of(name, layout, config, budget, path)
                    beside = case_of(_BESIDE.get(name, "none"), layout, config, budget, path)
                    if case is None or beside is None:
                        continue
                    found = measured(pool, case, beside, model == _TIMED and not given.untimed)
                    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
                    cells = results.setdefault(model, {}).setdefault(name, {})
                    before = (
                        {"time": cells[layout]["time"]} if "time" in cells.get(layout, {}) else {}
                    )
                    cells[layout] = {**before, **found}
                    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
                    print(model, layout, name, found, flush=True)
    results = json.loads(RESULTS.read_text())
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables(results)}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
