"""Write the table of docs/memory.md that compares what is counted with the estimate, for every lever over every axis.

python scripts/memory_cells.py [--hidden 256] [--levers NAME ...] [--axes NAME ...]

Every cell trains a small model for a step on CPU processes: storages of weights, gradients and the optimizer's state,
saved tensors, and what levers say that they put elsewhere are counted. What a layer or block keeps while it is computed
again is counted in a run that keeps it. The number is the estimate over that, of the rank where it is furthest off:
of everything, and of activations alone. Numbers are kept in scripts/bench/results; all of them are on the page.
"""

import argparse
import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from memory_table import AXES, LEVERS, PAGE, reason
from transformers import LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

import hfscale
from hfscale import MemoryConfig, ParallelConfig
from hfscale.memory import kept_activations
from hfscale.memory.compressed import Here, Stored
from hfscale.memory.kept_activations import KeptActivations
from hfscale.memory.on_host import OnHost
from hfscale.memory.report import SavedBytes, count_saved, held_bytes
from hfscale.runtime import Runtime, runtime_of
from hfscale.testing import RankPool

RESULTS = Path(__file__).parent / "bench" / "results" / "memory_cells.json"
BEGIN, END = "<!-- written by scripts/memory_cells.py -->", "<!-- end of cells -->"
ROWS, LENGTH, LAYERS = 4, 64, 4
HELD = ("weights", "adapters", "gradients", "optimizer")
Bytes = dict[str, float]


def config_of(axes: dict[str, Any], hidden: int) -> PreTrainedConfig:
    """Of that width; a mixture where experts are spread."""
    sizes: dict[str, Any] = {"hidden_size": hidden, "num_hidden_layers": LAYERS, "vocab_size": 512, "head_dim": 64}
    sizes |= {"num_attention_heads": hidden // 64, "num_key_value_heads": max(2, hidden // 128)}
    if "ep_size" in axes:
        return Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=hidden)
    return LlamaConfig(**sizes, intermediate_size=hidden * 11 // 4 // 16 * 16)


def cell(lever: dict[str, Any], axes: dict[str, Any], hidden: int) -> tuple[Bytes, Bytes]:
    """Bytes on this rank, of what stays and of activations: counted, and estimated."""
    memory = dict(lever.get("memory", {}))
    counted, estimated, kept = stepped(lever, memory, axes, hidden)
    if memory.get("recompute") in ("full", ["mlp"], "8GiB"):
        _, _, whole = stepped(lever, {**memory, "recompute": "none"}, axes, hidden)
        counted["activations"] += whole - kept if memory["recompute"] == ["mlp"] else whole
    return counted, estimated


def stepped(
    lever: dict[str, Any], memory: dict[str, Any], axes: dict[str, Any], hidden: int
) -> tuple[Bytes, Bytes, int]:
    """The same of a step, and the most that one layer keeps; but for what is kept while layers are computed again."""
    torch.manual_seed(0)
    memory = dict(memory)
    flush = axes.get("pipeline_schedule") != "pipedream"
    microbatches = 2 if "pp_size" in axes and flush else 1
    if memory.get("recompute") == "8GiB":
        memory["recompute"] = f"{ROWS * LENGTH * hidden * 4 * 40 // 1024}KiB"
    memory |= {name: "1KiB" for name in ("offload_activations", "compress_activations") if name in memory}
    compression = {name: value for name, value in lever.items() if name == "gradient_compression"}
    cut = {"num_microbatches": microbatches} if microbatches > 1 else {}
    model = hfscale.from_config(
        config_of(axes, hidden),
        parallel=ParallelConfig(**axes, **compression, **cut),
        memory=MemoryConfig(**memory),
        mixed_precision=lever.get("mixed_precision", "no"),
        dtype=torch.float32,
        attn_implementation="eager" if memory.get("recompute") == "selective" else "sdpa",
    ).train()
    optimizer = hfscale.create_optimizer(model, "adamw_torch", lr=1e-4)
    runtime = runtime_of(model)
    elsewhere = "offload_activations" in memory or "compress_activations" in memory
    seen = () if elsewhere else runtime.plan.layers
    ids = torch.randint(3, 500, (ROWS * microbatches, LENGTH), generator=torch.Generator().manual_seed(0))
    with (
        count_saved(runtime.model, seen, runtime.plan.head) as saved,
        counted_elsewhere(runtime, saved, elsewhere) as back,
        one_layer(runtime, saved) as left,
    ):
        for _ in range(1 if flush else 3):
            optimizer.zero_grad()
            hfscale.train_step(model, {"input_ids": ids, "labels": ids})
            optimizer.step()
        held = asdict(held_bytes(model, optimizer))
        for _ in hfscale.drain(model):
            optimizer.step()
    found = hfscale.memory_estimate(model, "adamw_torch", tokens=ROWS * LENGTH, num_microbatches=microbatches)
    weights = {planned.name: parameter for planned, parameter in runtime.parameters()}
    head = 2 * weights["lm_head.weight"].numel() if "lm_head.weight" in weights else 0
    copies = found.gathered - head if lever.get("mixed_precision") and runtime.mesh.data_world == 1 else 0
    on_device = sum(found.kinds[kind] for kind in HELD)
    away = found.on_host - (sum(held.values()) - on_device if on_device < sum(held.values()) * 0.99 else 0)
    counted = {"held": sum(held.values()), "activations": saved.around + saved.layers + back.layers}
    estimated = {"held": on_device + found.on_host - away, "activations": found.activations + copies + away}
    return counted, estimated, max(left)


def _at_ends_of_stages(runtime: Runtime, hold: Callable[[torch.Tensor], None]) -> list[Any]:
    """Hooks: what a stage was sent and sends it holds as it is, whatever becomes of what layers keep."""
    if runtime.plan.stages is None:
        return []
    handles = []
    for stage in runtime.plan.stages.of_rank(runtime.mesh.ranks["pp"]):
        first, last = (runtime.model.get_submodule(name) for name in (stage.layers[0], stage.layers[-1]))
        if stage.index:
            handles.append(first.register_forward_pre_hook(lambda _, given: hold(given[0])))
        if stage.index < len(runtime.plan.stages.stages) - 1:
            handles.append(last.register_forward_hook(lambda _, given, output: hold(output)))
    return handles


class _Fetched(OnHost):
    """Counts what was copied back as long as it is there."""

    back = SavedBytes()

    def fetch(self) -> None:
        before = self._here
        super().fetch()
        if before is None and self._here is not None:
            self.back.add("layers", self.size)
            weakref.finalize(self._here, self.back.add, "layers", -self.size)


@contextmanager
def counted_elsewhere(runtime: Runtime, saved: SavedBytes, elsewhere: bool) -> Iterator[SavedBytes]:
    """Within: what is kept in another form or place is counted as long as it is; what was copied back, by itself."""
    part = runtime.part(KeptActivations)
    store, known = part.store, Counter[int]()

    def hold(tensor: torch.Tensor) -> None:
        key = tensor.untyped_storage().data_ptr()
        add(key, tensor.nbytes, 1)
        weakref.finalize(tensor, add, key, tensor.nbytes, -1)

    def add(key: int, size: int, sign: int) -> None:
        known[key] += sign
        if known[key] == (sign > 0):  # the first that keeps this piece of memory, or the last
            saved.add("layers", sign * size)

    def counted(values: int, tensor: torch.Tensor, stays_exact: bool) -> Stored:
        found = store(values, tensor, stays_exact)
        key = id(found) if found is not None else tensor.untyped_storage().data_ptr()
        found = found or Here(tensor)
        add(key, found.size, 1)
        weakref.finalize(found, add, key, found.size, -1)
        return found

    part.store, _Fetched.back = counted, SavedBytes()
    handles = _at_ends_of_stages(runtime, hold) if elsewhere else []
    try:
        with patch.object(kept_activations, "OnHost", _Fetched):
            yield _Fetched.back
    finally:
        part.store = store
        for handle in handles:
            handle.remove()


@contextmanager
def one_layer(runtime: Runtime, saved: SavedBytes) -> Iterator[list[int]]:
    """Within: what every pass through a layer of this rank leaves, beside its input."""
    left, handles = [0], []
    for name in filter(runtime.is_local, runtime.plan.layers):
        layer = runtime.model.get_submodule(name)
        handles.append(layer.register_forward_pre_hook(lambda *_: left.append(-saved.now)))
        handles.append(layer.register_forward_hook(lambda *_: left.append(left.pop() + saved.now)))
    try:
        yield left
    finally:
        for handle in handles:
            handle.remove()


def measure(levers: list[str], axes: list[str], hidden: int) -> dict[str, Any]:
    """Ratios of each cell: of everything, and of activations."""
    found: dict[str, Any] = {}
    with RankPool(2) as pool:
        for axis in axes:
            for name in levers:
                if reason(LEVERS[name], AXES[axis]):
                    continue
                pairs = pool.run(cell, LEVERS[name], AXES[axis], hidden)
                ratios = [
                    (
                        (e["held"] + e["activations"]) / (c["held"] + c["activations"]),
                        e["activations"] / c["activations"],
                    )
                    for c, e in pairs
                ]
                total, kept = (max(column, key=lambda ratio: abs(ratio - 1)) for column in zip(*ratios, strict=True))
                found.setdefault(name, {})[axis] = [round(total, 4), round(kept, 4)]
                print(f"{hidden} {axis} {name} {total:.3f} {kept:.3f}", flush=True)
    return found


def table(results: dict[str, Any]) -> str:
    """In Markdown: of everything, and of activations alone; of the width where it is further off."""
    lines = [f"| | {' | '.join(AXES)} |", "|---" * (len(AXES) + 1) + "|"]
    for name in LEVERS:
        cells = []
        for axis in AXES:
            every = [result[name][axis] for result in results.values() if axis in result.get(name, {})]
            worst = [max(column, key=lambda ratio: abs(ratio - 1)) for column in zip(*every, strict=True)]
            cells.append(f"{worst[0]:.3f}, {worst[1]:.3f}" if worst else "")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, keep, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--levers", nargs="*", default=list(LEVERS))
    parser.add_argument("--axes", nargs="*", default=list(AXES))
    parser.add_argument("--hidden", type=int, default=256)
    given = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, found in measure(given.levers, given.axes, given.hidden).items():
        results.setdefault(str(given.hidden), {}).setdefault(name, {}).update(found)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
