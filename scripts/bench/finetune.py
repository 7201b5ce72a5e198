"""Bytes that fine-tuning leaves on a rank, against the ideal share of one stock process; and the time of a step.

    python scripts/bench/finetune.py --bytes --out scripts/bench/results/finetune_bytes.json
    python scripts/bench/finetune.py --time [--rounds 7] --out scripts/bench/results/finetune.json
    python scripts/bench/finetune.py --quick          # both, on tiny models: shows that it runs

Bytes. One step of every recipe in every layout of two ranks: weights, adapters, gradients and optimizer state by
storage, each counted once, and what the layers keep for the backward pass, by saved-tensor hooks. The ideal is what the
stock classes (transformers, PEFT, torch, bitsandbytes) hold in one process for the same recipe and the same batch,
divided by the number of ranks: nothing held twice, nothing padded, both ranks alike. Not all of it can be reached:

- a tensor rank has every norm, and of every adapted projection the factor that runs along the dim that is not cut: to
  cut it too would take one more exchange for each projection;
- without ``sequence_parallel`` tensor ranks keep the stream and what norms make of it whole; with it, the gathered
  input of every block; with ``sequence_regather`` that is gathered again, unless an adapter reads it;
- stages are balanced by time and not by bytes: the first has the embedding and, under 1F1B, two microbatches alive, the
  last has the head and one.

The shape is one whose cuts fall between the blocks of 256 entries of 8-bit states, as those of most released models do;
elsewhere such states are whole on every rank. Ratios are those of the rank that holds most. What is kept around the
layers is listed apart and is in no total: stock losses keep logits, hfscale's does not. Of 4-bit mixtures the reference
is hfscale in one process, since the host leaves experts in 16 or 32 bits.

Time. Two rank processes and one single process, each with one thread, train the same batch in turn (forward, backward,
fused AdamW); ratios to the stock classes in the single process are medians of the per-round ratios.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bitsandbytes
import peft
import torch
import transformers
from report import write_report
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

import hfscale
from hfscale.cost.tools.memory_report import held_bytes
from hfscale.features.memory.saved import count_saved
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of

RANKS = 2
GOAL = 1.03
LIBRARIES = (torch, transformers, peft, bitsandbytes, hfscale)
RECIPES = ("full, AdamW", "full, adamw_8bit", "LoRA, AdamW", "QLoRA, adamw_8bit")
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "tp2, sequence": {"tp_size": 2, "sequence_parallel": True},
    "tp2, sequence regathered": {
        "tp_size": 2,
        "sequence_parallel": True,
        "sequence_regather": True,
    },
    "dp_shard2": {"dp_shard_size": 2},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "pp2, even layers": {"pp_size": 2, "num_microbatches": 2, "stage_layers": "even"},
    "ep2": {"ep_size": 2, "dp_shard_size": 2},
}
TIMED = ("tp2", "tp2, sequence", "dp_shard2", "pp2")
REASONS = {
    ("tp", "weights"): "norms are whole on every tensor rank",
    ("tp", "adapters"): "one factor of every adapted projection is whole on every tensor rank",
    (
        "tp",
        "activations",
    ): "between blocks the stream and both norms' values are whole on every tensor rank",
    ("sequence", "activations"): "the gathered input of every block is whole on every tensor rank",
    (
        "pp",
        "weights",
    ): "stages are balanced by time: embedding and head are on different ones, layers may be uneven",
    (
        "pp",
        "activations",
    ): "the first stage has two microbatches alive, and the outputs that it sent",
    ("dp", "weights"): "shards of one size are padded",
    ("ep", "activations"): "the router sends more tokens to one rank's experts than to the other's",
}
_state: dict[str, Any] = {}


@dataclass(frozen=True)
class Size:
    """One model and batch."""

    hidden: int
    sequence: int
    vocabulary: int
    batch: int = 4
    layers: int = 4
    rank: int = 16

    def config(self, mixture: bool = False) -> PreTrainedConfig:
        """The model."""
        common: dict[str, Any] = {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // 32,
            "num_key_value_heads": self.hidden // 64,
            "vocab_size": self.vocabulary,
        }
        if not mixture:
            return LlamaConfig(intermediate_size=3 * self.hidden, **common)
        return Qwen3MoeConfig(
            moe_intermediate_size=self.hidden,
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            **common,
        )


BYTES, MIXTURE = Size(1024, 64, 32000), Size(512, 64, 8192)
TIME = Size(768, 512, 32000)
QUICK = Size(128, 32, 512, layers=2, rank=4)


def adapters(size: Size, mixture: bool) -> Any:
    """LoRA on every projection, those of experts too."""
    kinds: dict[str, Any] = {"target_modules": "all-linear"}
    if mixture:
        attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
        experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        kinds = {"target_modules": attention, "target_parameters": experts}
    return peft.LoraConfig(r=size.rank, lora_alpha=2 * size.rank, task_type="CAUSAL_LM", **kinds)


def load(
    recipe: str, path: str, size: Size, mixture: bool, layout: dict[str, Any] | None
) -> tuple[Any, Any]:
    """A model in this process and its optimizer; of the stock classes where ``layout`` is ``None``."""
    kwargs: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    config = adapters(size, mixture) if "LoRA" in recipe else None
    if "QLoRA" in recipe:
        kwargs["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
    eight = recipe.endswith("8bit")
    if layout is not None:
        if layout.get("stage_layers") == "even":
            layout = {**layout, "stage_layers": [size.layers // RANKS] * RANKS}
        parallel = hfscale.ParallelConfig(**layout)
        model = hfscale.from_pretrained(
            path, parallel=parallel, peft_config=config, **kwargs
        ).train()
        name = "adamw_8bit" if eight else "adamw_torch_fused"
        return model, hfscale.create_optimizer(model, name, lr=1e-4)
    model = AutoModelForCausalLM.from_pretrained(path, **kwargs)
    model = (model if config is None else peft.get_peft_model(model, config)).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if eight:
        return model, bitsandbytes.optim.AdamW8bit(trained, lr=1e-4, weight_decay=0.0)
    return model, torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=True)


def tokens_of(size: Size, model: Any, stock: bool) -> torch.Tensor:
    """This rank's rows of a batch that is the same in all layouts."""
    ids = torch.randint(
        0, size.vocabulary, (size.batch, size.sequence), generator=torch.Generator().manual_seed(0)
    )
    return ids if stock else ids.chunk(hfscale.batch_world(model))[hfscale.batch_rank(model)]


def backward(model: Any, ids: torch.Tensor, stock: bool) -> float:
    """One forward and backward pass; the loss."""
    if not stock:
        return hfscale.train_step(model, {"input_ids": ids, "labels": ids}).item()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    value: float = loss.item()
    return value


def bytes_of(
    recipe: str, path: str, size: Size, mixture: bool, layout: dict[str, Any] | None
) -> dict[str, int]:
    """What this rank holds after a step, and the most that was kept for a backward pass."""
    stock = layout is None
    model, optimizer = load(recipe, path, size, mixture, layout)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = [f"model.layers.{index}" for index in range(size.layers)]
    with count_saved(inner if stock else runtime_of(model).model, layers, "lm_head") as saved:
        loss = backward(model, tokens_of(size, model, stock), stock)
    optimizer.step()
    held = held_bytes(model, optimizer)
    if not torch.isfinite(torch.tensor(loss)):
        raise SystemExit(f"{recipe}: the loss is {loss}")
    del model, optimizer, inner
    gc.collect()
    return {**held, "activations": saved.layers, "around the layers": saved.around + saved.head}


def reason(layout: str, kind: str, ratios: dict[str, float]) -> str:
    """Why a kind misses the ideal."""
    if kind == "optimizer" and ratios[kind] > 1.01 * ratios["gradients"]:
        return "8-bit states of weights whose shares are not whole blocks of 256 entries are whole on every rank"
    axis = "sequence" if kind == "activations" and "sequence" in layout else layout[:2]
    if kind in ("gradients", "optimizer"):
        kind = "adapters" if "adapters" in ratios else "weights"
    return REASONS.get((axis, kind), REASONS.get((axis, "weights"), ""))


def compare(
    recipe: str, layout: str, ideal: dict[str, int], ranks: list[dict[str, int]]
) -> dict[str, Any]:
    """One row: bytes by kind, and what the fullest rank has more than the ideal."""
    kinds = [kind for kind in ideal if kind != "around the layers"]
    for found in (ideal, *ranks):
        found["total"] = sum(found[kind] for kind in kinds)
    ratios = {
        kind: round(max(rank[kind] for rank in ranks) * RANKS / ideal[kind], 4)
        for kind in (*kinds, "total")
        if ideal[kind]
    }
    missed = [kind for kind, ratio in ratios.items() if ratio > GOAL and kind != "total"]
    return {
        "recipe": recipe,
        "layout": layout,
        "stock, one process": dict(ideal),
        "ranks": ranks,
        "fullest rank / ideal": ratios,
        "goal": GOAL,
        "reached": ratios["total"] <= GOAL,
        "reasons": {kind: reason(layout, kind, ratios) for kind in missed},
    }


def measure_bytes(
    pools: dict[int, RankPool], sizes: tuple[Size, Size], recipes: list[str], layouts: list[str]
) -> Iterator[dict[str, Any]]:
    """Every recipe in every layout, one row each."""
    with tempfile.TemporaryDirectory() as directory:
        for mixture, size in zip((False, True), sizes, strict=True):
            path = str(Path(directory) / f"mixture-{mixture}")
            save(size.config(mixture), path)
            chosen = [layout for layout in layouts if (layout == "ep2") == mixture]
            for recipe in recipes if chosen else []:
                alone = {} if mixture and "QLoRA" in recipe else None
                ideal = pools[1].run(bytes_of, recipe, path, size, mixture, alone)[0]
                for layout in chosen:
                    found = pools[RANKS].run(bytes_of, recipe, path, size, mixture, LAYOUTS[layout])
                    row = {"size": asdict(size), **compare(recipe, layout, dict(ideal), found)}
                    ratios = row["fullest rank / ideal"]
                    listed = "  ".join(f"{kind} {ratio:.3f}" for kind, ratio in ratios.items())
                    print(f"{recipe:18} {layout:25} {listed}", flush=True)
                    yield row


def save(config: PreTrainedConfig, path: str) -> None:
    """A checkpoint with random weights."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)


def build(kind: str, recipe: str, path: str, size: Size, layout: dict[str, Any] | None) -> None:
    """Load one candidate into this process."""
    model, optimizer = load(recipe, path, size, False, layout)
    _state[kind] = (model, optimizer, tokens_of(size, model, layout is None), layout is None)


def step(kind: str) -> tuple[float, float]:
    """Seconds and loss of one step."""
    model, optimizer, ids, stock = _state[kind]
    start = time.perf_counter()
    loss = backward(model, ids, stock)
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start, loss


def drop() -> None:
    """Forget the models of this process."""
    _state.clear()
    gc.collect()


def measure_time(
    pools: dict[int, RankPool], size: Size, recipe: str, rounds: int
) -> dict[str, Any]:
    """Interleave stock and every layout; returns medians, ratios and first losses."""
    candidates: dict[str, dict[str, Any] | None] = {"stock": None, "hfscale": {}}
    candidates |= {f"hfscale {name}": LAYOUTS[name] for name in TIMED}
    world = {kind: RANKS if layout else 1 for kind, layout in candidates.items()}
    times: dict[str, list[float]] = {kind: [] for kind in candidates}
    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as path:
        save(size.config(), path)
        for kind, layout in candidates.items():
            pools[world[kind]].run(build, kind, recipe, path, size, layout)
        for index in range(rounds + 2):
            for kind in candidates:
                results = pools[world[kind]].run(step, kind)
                losses.setdefault(kind, results[0][1])
                if index >= 2:  # two rounds of warm-up
                    times[kind].append(max(seconds for seconds, _ in results))
        for pool in pools.values():
            pool.run(drop)
    if max(losses.values()) - min(losses.values()) > 1e-3:
        raise SystemExit(f"first losses differ: {losses}")
    ratios = {
        f"{kind} / stock": round(
            statistics.median(x / y for x, y in zip(found, times["stock"], strict=True)), 3
        )
        for kind, found in times.items()
        if kind != "stock"
    }
    row = {
        "recipe": recipe,
        "size": asdict(size),
        "seconds": {kind: round(statistics.median(found), 4) for kind, found in times.items()},
        **ratios,
        "first loss": losses,
    }
    print(json.dumps(row, indent=1), flush=True)
    return row


def main() -> None:
    """Measure what was asked for, and write one report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bytes", action="store_true", help="only bytes")
    parser.add_argument("--time", action="store_true", help="only the time of a step")
    parser.add_argument("--quick", action="store_true", help="tiny models and one round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument(
        "--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS, help="of the bytes"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    both = arguments.bytes == arguments.time
    pools = {world: RankPool(world, timeout=1800) for world in (1, RANKS)}
    results: list[dict[str, Any]] = []
    try:
        if arguments.bytes or both:
            sizes = (QUICK, QUICK) if arguments.quick else (BYTES, MIXTURE)
            for row in measure_bytes(pools, sizes, arguments.recipes, arguments.layouts):
                results.append(row)
                write_report(arguments.out, results, *LIBRARIES)  # it takes a while
        if arguments.time or both:
            size, rounds = (QUICK, 1) if arguments.quick else (TIME, arguments.rounds)
            timed = [recipe for recipe in arguments.recipes if recipe.endswith("AdamW")]
            results += [measure_time(pools, size, recipe, rounds) for recipe in timed]
    finally:
        for pool in pools.values():
            pool.close()
    write_report(arguments.out, results, *LIBRARIES)


if __name__ == "__main__":
    main()
