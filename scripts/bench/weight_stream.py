"""Time, messages and bytes of the weights that ranks send to an engine: in buckets, and tensor by tensor.

    python scripts/bench/weight_stream.py [--out FILE.json] [--rounds 7] [--layers 24]

Two ranks hold a mixture of many small tensors and stream it to rank 0, in both ways in turn: in buckets as large as the
largest tensor, as :func:`hfscale.stream_weights` does, and with a message for each tensor. Medians and ratios are
reported; messages and bytes are counted on the rank that sends.
"""

import argparse
import json
import os
import platform
import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {"tp_size": 2},
    "ep2": {"ep_size": 2},
    "pp2": {"pp_size": 2},
}


def measure(layout: dict[str, int], layers: int, rounds: int) -> dict[str, Any]:
    """One rank: seconds of each way, and what it sent."""
    import torch.distributed as dist
    from transformers import Qwen3MoeConfig

    import hfscale
    from hfscale.train.runtime import full_tensors as full

    sizes = {
        "hidden_size": 64,
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "num_hidden_layers": layers,
    }
    config = Qwen3MoeConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=512
    )
    model = hfscale.from_config(config, parallel=hfscale.ParallelConfig(**layout))
    seconds: dict[str, list[float]] = {"buckets": [], "tensors": []}
    sent: dict[str, list[int]] = {}
    send = dist.isend

    def counted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        sent[way].append(tensor.nbytes)
        return send(tensor, *args, **kwargs)

    for _ in range(rounds):
        for way, buckets in (
            ("buckets", full._buckets),
            ("tensors", lambda entries: ([entry] for entry in entries)),
        ):
            sent[way] = []
            dist.barrier()
            start = time.perf_counter()
            with patch.object(full, "_buckets", buckets), patch.object(full.dist, "isend", counted):
                for _ in hfscale.stream_weights(model):
                    pass
                dist.barrier()
            seconds[way].append(time.perf_counter() - start)
    held = sum(parameter.nbytes for parameter in model.parameters())
    return {
        "seconds": {way: median(found) for way, found in seconds.items()},
        "messages": {way: len(found) for way, found in sent.items()},
        "bytes": {way: sum(found) for way, found in sent.items()},
        "held": held,
    }


def main() -> None:
    """Run every layout, print and write what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=24)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    from hfscale.testing import RankPool

    found: dict[str, Any] = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "layouts": {},
    }
    with RankPool(2) as pool:
        for name, layout in LAYOUTS.items():
            first, second = pool.run(measure, layout, arguments.layers, arguments.rounds)
            row = {key: second[key] for key in ("messages", "bytes", "held")} | {
                "seconds": first["seconds"]
            }
            row["ratio"] = first["seconds"]["buckets"] / first["seconds"]["tensors"]
            found["layouts"][name] = row
            print(name, json.dumps(row))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
