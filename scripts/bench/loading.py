"""Peak memory and time of loading, per rank, beside stock loading.

    python scripts/bench/loading.py [--out scripts/bench/results/loading.json]

Every measurement is a fresh process: its peak resident memory (VmHWM, mapped files included) over what it had after
importing torch, transformers and hfscale, once loaded and written to. The goal is a peak of at most 1.2 x (the rank's
own shard + the largest tensor), which is what a loader must hold that reads one tensor at a time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LAYOUTS: dict[str, dict[str, int]] = {
    "one process": {},
    "tp2": {"tp_size": 2},
    "dp_shard2": {"dp_shard_size": 2},
    "tp2 x dp_shard2": {"tp_size": 2, "dp_shard_size": 2},
}


def _memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def load(kind: str, path: str, layout: dict[str, int], store: str, base: str) -> None:
    """The measured process: one rank; ``base``: a directory with the config, if it is another."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    import hfscale
    from hfscale.train.runtime import local_tensor

    torch.set_num_threads(1)
    parallel = hfscale.ParallelConfig(**layout)
    rank = int(os.environ["RANK"])
    world = parallel.total_size
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    AutoModelForCausalLM  # noqa: B018  # resolve the lazy import before the baseline
    hfscale.plan(base or path, parallel)
    given = {"config": base} if base else {}
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    baseline = _memory("VmRSS")
    start = time.perf_counter()
    if kind == "stock":
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    elif kind == "native":
        from transformers.distributed import DistributedConfig

        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, distributed_config=DistributedConfig(tp_size=2)
        )
    else:
        model = hfscale.from_pretrained(path, parallel=parallel, dtype=torch.float32, **given)
    seconds = time.perf_counter() - start
    # Stock loading maps the file and touches nothing yet: write every weight once, as the first optimizer step does.
    with torch.no_grad():
        for parameter in model.parameters():
            local_tensor(parameter).mul_(1.0)
    peak = _memory("VmHWM") - baseline
    shard = sum(local_tensor(parameter.detach()).numel() * 4 for parameter in model.parameters())
    if rank == 0:
        print(
            "RESULT " + json.dumps({"peak": peak, "shard": shard, "seconds": seconds}), flush=True
        )
    if world > 1:
        dist.barrier()


def measure(kind: str, path: str, layout: dict[str, int], base: str = "") -> dict[str, Any]:
    """Start the ranks of one layout; returns what rank 0 measured."""
    world = 1
    for size in layout.values():
        world *= size
    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable,
            __file__,
            "--child",
            kind,
            path,
            json.dumps(layout),
            f"{directory}/store",
            base,
        ]
        ranks = [
            subprocess.Popen(
                command,
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "TQDM_DISABLE": "1",
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(world)
        ]
        outputs = [process.communicate()[0] for process in ranks]
    line = next(line for line in outputs[0].splitlines() if line.startswith("RESULT "))
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result


def main() -> None:
    """Write a checkpoint, load it every way, print a table."""
    if "--child" in sys.argv:
        kind, path, layout, store, base = sys.argv[-5:]
        load(kind, path, json.loads(layout), store, base)
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=32000,
    )
    rows = []
    with tempfile.TemporaryDirectory() as path:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(path, max_shard_size="300MB")
        largest = max(parameter.numel() * 4 for parameter in model.parameters())
        total = sum(parameter.numel() * 4 for parameter in model.parameters())
        del model
        candidates = [("stock", "one process"), ("native", "tp2")] + [
            ("hfscale", name) for name in LAYOUTS
        ]
        for kind, name in candidates:
            found = measure(kind, path, LAYOUTS[name])
            rows.append(shown({"loader": kind, "layout": name}, found, largest))
    size = {"model MiB": round(total / 2**20, 1)}
    write_report(arguments.out, rows, largest, goal=1.2, **size)


def shown(about: dict[str, str], found: dict[str, float], largest: int) -> dict[str, Any]:
    """Print and return the row of one load: its bytes, and the peak over its shard and the largest tensor."""
    row = {
        **about,
        "shard MiB": round(found["shard"] / 2**20, 1),
        "peak MiB": round(found["peak"] / 2**20, 1),
        "peak / (shard + largest)": round(found["peak"] / (found["shard"] + largest), 3),
        "seconds": round(found["seconds"], 2),
    }
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def write_report(
    out: Path | None, rows: list[dict[str, Any]], largest: int, goal: float, **model: float
) -> None:
    """Write the rows of loads to ``out``, if there is one, with versions and the goal."""
    import torch
    import transformers

    import hfscale

    report = {
        **model,
        "largest tensor MiB": round(largest / 2**20, 1),
        "goal for peak / (shard + largest)": goal,
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "hfscale": hfscale.__version__,
        },
        "results": rows,
    }
    if out:
        out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
