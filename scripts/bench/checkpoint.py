"""Time and peak memory, per rank, of saving and loading a run's state, beside torch's own ways.

    python scripts/bench/checkpoint.py [--out FILE.json] [--rounds 5] [--hidden 1024]

Two ranks hold one model with AdamW, sharded by FSDP2, and save and load it in every way, in turn and several rounds
long, so that a busy disk or machine meets all of them alike; medians are reported, and the spread. Times are from one
barrier to the next. Memory is a rank's peak of resident memory (VmHWM) over what it had before the call.

    hfscale           save_state, and load_state with and without checksums
    hfscale behind    save_state(asynchronous=True): what the step waits for, beside the copy to the host alone
    dcp               torch.distributed.checkpoint of get_state_dict: what Accelerate and transformers call under FSDP2
    torch.save        one file per rank, its shares, and fsync; no other layout reads it
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

RANKS = 2


def _memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def _measured(work: Callable[[], Any]) -> dict[str, float]:
    import torch.distributed as dist

    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before, start = _memory("VmRSS"), time.perf_counter()
    work()
    dist.barrier()
    return {"seconds": time.perf_counter() - start, "bytes": _memory("VmHWM") - before}


def _run(directory: Path, hidden: int, rounds: int) -> dict[str, Any]:
    """One rank: the measurements by name, and what its share is."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from transformers import LlamaConfig

    import hfscale
    from hfscale.checkpoint.background import on_host
    from hfscale.checkpoint.state_contents import contents_of
    from hfscale.runtime import runtime_of

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=32000,
    )
    model = hfscale.from_config(config, parallel=hfscale.ParallelConfig(dp_shard_size=RANKS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    held = contents_of(runtime_of(model), optimizer).held
    own = directory / f"own-{rank}.pt"

    def save_own() -> None:
        with own.open("wb") as file:
            torch.save(held, file)
            file.flush()
            os.fsync(file.fileno())

    def load_own() -> None:
        for key, tensor in torch.load(own, mmap=True, weights_only=True).items():
            held[key].copy_(tensor)

    def both() -> dict[str, Any]:
        weights, state = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": state}

    def load_dcp() -> None:
        found = both()
        dcp.load(found, checkpoint_id=directory / "dcp")
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    def save_dcp() -> None:
        if rank == 0:
            shutil.rmtree(directory / "dcp", ignore_errors=True)
        dist.barrier()
        dcp.save(both(), checkpoint_id=directory / "dcp")

    def save(**options: Any) -> None:
        hfscale.save_state(model, directory / "state", optimizer=optimizer, **options)

    def load(**options: Any) -> None:
        hfscale.load_state(model, directory / "state", optimizer=optimizer, **options)

    ways: dict[str, Callable[[], Any]] = {
        "hfscale, save": save,
        "dcp, save": save_dcp,
        "torch.save, save": save_own,
        "hfscale, load": load,
        "hfscale, load unverified": lambda: load(verify=False),
        "dcp, load": load_dcp,
        "torch.save, load": load_own,
        "copy to the host": lambda: on_host(held),
        "hfscale behind, stall": lambda: save(asynchronous=True),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(rounds + 1):  # the first warms up
        for name, work in ways.items():
            found[name].append(_measured(work))
            hfscale.wait_for_saves()
            dist.barrier()
    share = sum(tensor.numel() * tensor.element_size() for tensor in held.values())
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    return {"share": share, "largest": largest, "ways": {name: runs[1:] for name, runs in found.items()}}


def main() -> None:
    """Start the ranks, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        told = _run(arguments.child, arguments.hidden, arguments.rounds)
        (arguments.child / f"told-{os.environ['RANK']}.json").write_text(json.dumps(told))
        return
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, __file__, "--child", directory, "--rounds", str(arguments.rounds)]
        ranks = [
            subprocess.Popen(
                [*command, "--hidden", str(arguments.hidden)],
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"},
            )
            for rank in range(RANKS)
        ]
        ended = [process.wait() for process in ranks]
        if any(ended):
            raise SystemExit("a rank failed")
        told = [json.loads((Path(directory) / f"told-{rank}.json").read_text()) for rank in range(RANKS)]
    report: dict[str, Any] = {"share MiB": told[0]["share"] >> 20, "largest MiB": told[0]["largest"] >> 20, "ways": {}}
    for name in told[0]["ways"]:
        seconds = [max(runs) for runs in zip(*([r["seconds"] for r in t["ways"][name]] for t in told), strict=True)]
        peak = max(run["bytes"] for rank in told for run in rank["ways"][name])
        report["ways"][name] = {
            "seconds": round(median(seconds), 3),
            "from": round(min(seconds), 3),
            "to": round(max(seconds), 3),
            "peak MiB over before": round(peak / 2**20, 1),
        }
        print(f"{name:26}", "  ".join(f"{key} {value}" for key, value in report["ways"][name].items()), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
