"""Time and peak memory, per rank, of saving and loading a run's state, beside torch's own ways.

    python scripts/bench/checkpoint.py [--out FILE.json] [--rounds 5] [--hidden 1024]

Two ranks hold one model with AdamW, sharded by FSDP2, and save and load it in every way, in turn and several rounds
long, so that a busy disk or machine meets all of them alike; medians are reported, and the spread. Times are from one
barrier to the next; "busy" is the time that the calling thread itself computes, which a busy machine changes less.
Memory is a rank's peak of resident memory (VmHWM) over what it had before the call.

    hfscale           save_state, and load_state with and without checksums
    hfscale behind    save_state(asynchronous=True): what the step waits for, beside the copy to the host alone
    accelerate        what accelerator.save_state and load_state call under FSDP2, which it applies on GPUs only
    transformers      save_pretrained(distributed_checkpoint=True)'s weights, and its save_optimizer_distributed
    torch.save        state_dict() of both, one file per rank, and fsync; no other layout reads it
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
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
    before = _memory("VmRSS")
    start = time.perf_counter()
    busy = time.thread_time()
    work()
    busy = time.thread_time() - busy
    dist.barrier()
    return {
        "seconds": time.perf_counter() - start,
        "busy": busy,
        "bytes": _memory("VmHWM") - before,
    }


def _run(directory: Path, hidden: int, rounds: int) -> dict[str, Any]:
    """One rank: the measurements by name, and what its share is."""
    import torch
    import torch.distributed as dist
    import transformers.distributed as theirs
    from accelerate import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils
    from transformers import LlamaConfig

    import hfscale
    from hfscale.checkpoint.state import on_host
    from hfscale.checkpoint.state_save import contents_of
    from hfscale.train.runtime import runtime_of

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS
    )
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
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())

    def load_own() -> None:
        found = torch.load(own, weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])

    def fresh(name: str) -> Path:
        if rank == 0:
            shutil.rmtree(directory / name, ignore_errors=True)
        dist.barrier()
        return directory / name

    # Asked for, not used.
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "LOCAL_RANK": str(rank),
    }
    PartialState(cpu=True)  # for its logging
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = SimpleNamespace(
        num_processes=RANKS,
        process_index=rank,
        is_main_process=rank == 0,
        is_fsdp2=True,
        wait_for_everyone=dist.barrier,
    )

    def save_accelerate() -> None:
        target = fresh("accelerate")
        fsdp_utils.save_fsdp_model(plugin, accelerator, model, target)
        fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, target)

    def load_accelerate() -> None:
        fsdp_utils.load_fsdp_model(plugin, accelerator, model, directory / "accelerate")
        fsdp_utils.load_fsdp_optimizer(
            plugin, accelerator, optimizer, model, directory / "accelerate"
        )

    def save_transformers() -> None:
        target = fresh("transformers")
        theirs._save_model_checkpoint_distributed(model, target)
        theirs.save_optimizer_distributed(model, optimizer, target / "optimizer")

    def load_transformers() -> None:
        theirs._load_model_checkpoint_distributed(model, directory / "transformers")
        theirs.load_optimizer_distributed(
            model, optimizer, directory / "transformers" / "optimizer"
        )

    def save(**options: Any) -> None:
        hfscale.save_state(model, directory / "state", optimizer=optimizer, **options)

    def load(**options: Any) -> None:
        hfscale.load_state(model, directory / "state", optimizer=optimizer, **options)

    ways: dict[str, Callable[[], Any]] = {
        "hfscale, save": save,
        "accelerate, save": save_accelerate,
        "transformers, save": save_transformers,
        "torch.save, save": save_own,
        "hfscale, load": load,
        "hfscale, load unverified": lambda: load(verify=False),
        "accelerate, load": load_accelerate,
        "transformers, load": load_transformers,
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
    return {
        "share": share,
        "largest": largest,
        "ways": {name: runs[1:] for name, runs in found.items()},
    }


def _report(told: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds of the slower rank, and of the ratios of what was measured in the same round."""
    report: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {RANKS} processes x 1 thread, gloo",
        "share MiB": told[0]["share"] >> 20,
        "largest tensor MiB": told[0]["largest"] >> 20,
        "ways": {},
        "ratios": {},
    }
    rounds: dict[str, dict[str, list[float]]] = {"seconds": {}, "busy": {}}
    for name in told[0]["ways"]:
        runs = [each["ways"][name] for each in told]
        for kind, found in rounds.items():
            found[name] = [max(run[kind] for run in ranks) for ranks in zip(*runs, strict=True)]
        seconds = rounds["seconds"][name]
        report["ways"][name] = {
            "seconds": round(median(seconds), 3),
            "from": round(min(seconds), 3),
            "to": round(max(seconds), 3),
            "busy": round(median(rounds["busy"][name]), 3),
            "peak MiB over before": round(
                max(run["bytes"] for ranks in runs for run in ranks) / 2**20, 1
            ),
        }
    others = ("accelerate", "transformers", "torch.save")
    pairs = [(f"hfscale, {way}", f"{other}, {way}") for way in ("save", "load") for other in others]
    for mine, other in [*pairs, ("hfscale behind, stall", "copy to the host")]:
        ratios = {
            kind: round(median(a / b for a, b in zip(found[mine], found[other], strict=True)), 3)
            for kind, found in rounds.items()
        }
        fastest = min(rounds["seconds"][mine]) / min(rounds["seconds"][other])
        report["ratios"][f"{mine} / {other}"] = {**ratios, "fastest rounds": round(fastest, 3)}
    return report


def main() -> None:
    """Start the ranks, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
        command = [
            sys.executable,
            __file__,
            "--child",
            directory,
            "--rounds",
            str(arguments.rounds),
        ]
        ranks = [
            subprocess.Popen(
                [*command, "--hidden", str(arguments.hidden)],
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(RANKS),
                    "OMP_NUM_THREADS": "1",
                },
            )
            for rank in range(RANKS)
        ]
        ended = [process.wait() for process in ranks]
        if any(ended):
            raise SystemExit("a rank failed")
        told = [
            json.loads((Path(directory) / f"told-{rank}.json").read_text()) for rank in range(RANKS)
        ]
    report = _report(told)
    for name, measured in (report["ways"] | report["ratios"]).items():
        print(f"{name:40}", measured, flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
