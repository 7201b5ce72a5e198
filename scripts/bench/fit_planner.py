"""Fit the constants of the time and memory models on the 1B and 3B runs of nanotron's sweep.

    python scripts/bench/fit_planner.py --rows nanotron_h100_1b_3b.csv [--models 1B,3B] [--out FILE]

Deterministic: a descent over one constant at a time from a fixed start, in two minutes. Not fitted are the shares of
products, attention and memory, which the runs leave open (docs/decisions), and the bytes of the optimizer.
``--models 1B`` fits on one model, to be tried on the other.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from _nanotron import GIB, Row, memory_of, replicas_filter, time_of
from planner import in_domain, measured_seconds, off, read_rows, row_of

from hfscale.cost.model.machines_known import CONSTANTS, Constants, Machine, find_machine

START = Constants(
    products=0.60,
    attention=0.38,
    memory=0.80,
    elementwise=2.5,
    loss_bytes=25,
    link=0.8,
    far_nic=1.0,
    far_latency=4e-4,
    data_link=0.6,
    nic=0.45,
    spread=0.1,
    hidden=1.0,
    hidden_shards=0.1,
    latency=1e-4,
    latency_shards=4e-4,
    layer_host=4.2e-3,
    ends_host=4e-3,
    hop=1e-3,
    step=0.03,
    update_bytes=36,
    sharpness=8,
)
KEPT = ("products", "attention", "memory", "far_nic", "update_bytes")
SLOW = {"2": 8e-3, "4": 13e-3, "8": 21e-3, "16": 46e-3, "32": 115e-3, "depth": 0.8}
MEMORY = {
    "fixed": 0.3,
    "kept": 1.1,
    "gathered": 1.8,
    "idle": 0.7,
    "busy": 1.2,
    "logits": 8.0,
    "again": 4.0,
    "wide": 6.0,
    "first": 0.7,
}


def loss(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Mean of what predictions are off by, cut at 0.4, and a fifth of its 90th percentile."""
    errors = sorted(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True))
    return (
        sum(min(error, 0.4) for error in errors) / len(errors)
        + 0.2 * errors[int(0.9 * (len(errors) - 1))]
    )


def descend(
    start: dict[str, float], of: Callable[[dict[str, float]], float], rounds: int = 60
) -> dict[str, float]:
    """Change one constant at a time, by steps that grow while they help and shrink where they do not."""
    found = dict(start)
    best = of(start)
    steps = dict.fromkeys(start, 0.2)
    for _ in range(rounds):
        for name in found:
            for sign in (1, -1):
                tried = {**found, name: found[name] * (1 + sign * steps[name])}
                if (now := of(tried)) < best - 1e-6:
                    found = tried
                    best = now
                    steps[name] *= 1.3
                    break
            else:
                steps[name] *= 0.6
        if max(steps.values()) < 2e-3:
            break
    return found


def fit_time(
    rows: list[Row], seconds: list[float], machine: Machine
) -> tuple[Constants, dict[str, float]]:
    """Constants of time, and of slow layers, from the runs that are not stalled.

    First those of tensor ranks on one node, then those of more.
    """
    constants, slow = START, dict(SLOW)

    def fit(which: list[int], of_time: list[str], of_slow: list[str]) -> None:
        nonlocal constants, slow

        def both(found: dict[str, float]) -> tuple[Constants, dict[str, float]]:
            changed: dict[str, Any] = {name: found[name] for name in of_time}
            return replace(constants, **changed), {
                **slow,
                **{name: found[name] for name in of_slow},
            }

        def of(found: dict[str, float]) -> float:
            tried, layers = both(found)
            times = [time_of(rows[i], machine, tried, layers).total for i in which]
            return loss(times, [seconds[i] for i in which])

        start = {
            **{name: asdict(constants)[name] for name in of_time},
            **{name: slow[name] for name in of_slow},
        }
        constants, slow = both(descend(start, of))

    near = [name for name in asdict(START) if name not in (*KEPT, "far_latency")]
    fit([i for i, row in enumerate(rows) if in_domain(row)], near, ["2", "4", "8"])
    far = [i for i, row in enumerate(rows) if row.tp > 8 and row.pp <= 8]
    fit(far, ["far_latency"], ["16", "32", "depth"])
    return constants, slow


def fit_memory(
    rows: list[Row],
    gib: list[float],
    machine: Machine,
    constants: Constants,
    slow: dict[str, float],
) -> dict[str, float]:
    """Constants of memory, from all runs."""

    def likely(row: Row, found: dict[str, float]) -> float:
        return memory_of(row, machine, constants, slow, found).likely(machine)

    return descend(MEMORY, lambda found: loss([likely(row, found) for row in rows], gib))


def main(argv: Sequence[str] | None = None) -> int:
    """Fit, write, and say what the fit is off by on the models it was fitted on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--models", default="1B,3B")
    parser.add_argument("--out", type=Path, default=CONSTANTS)
    arguments = parser.parse_args(argv)
    machine = find_machine("h100")
    chosen = arguments.models.split(",")
    lines = [
        line
        for line in read_rows(arguments.rows)
        if line["model"] in chosen and measured_seconds(line)
    ]
    rows = [row_of(line) for line in lines]
    seconds = [measured_seconds(line) or 0.0 for line in lines]
    gib = [float(line["mem_gb"]) for line in lines]
    good = replicas_filter(rows, seconds)
    clean = [i for i, ok in enumerate(good) if ok and gib[i] * GIB < machine.budget]
    constants, slow = fit_time([rows[i] for i in clean], [seconds[i] for i in clean], machine)
    memory = fit_memory(rows, gib, machine, constants, slow)
    data: dict[str, Any] = {
        "source": f"fitted by scripts/bench/fit_planner.py on {', '.join(chosen)} of the Ultra-Scale Playbook's sweep",
        "time": {name: float(f"{value:.4g}") for name, value in asdict(constants).items()},
        "own": json.loads(CONSTANTS.read_text())["own"],
        "nanotron": {
            "slow": {name: float(f"{value:.4g}") for name, value in slow.items()},
            "memory": {name: float(f"{value:.4g}") for name, value in memory.items()},
        },
    }
    arguments.out.write_text(json.dumps(data, indent=2) + "\n")
    near = [i for i in clean if in_domain(rows[i])]
    print(
        "time",
        off(
            [time_of(rows[i], machine, constants, slow).total for i in near],
            [seconds[i] for i in near],
        ),
    )
    print(
        "memory",
        off(
            [memory_of(row, machine, constants, slow, memory).likely(machine) for row in rows], gib
        ),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
