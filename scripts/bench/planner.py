"""Seconds, memory and a verdict for runs of nanotron's sweep: the time model against what was measured.

    python scripts/bench/planner.py --rows FILE --out FILE

``--rows`` has the columns ``model,nodes,mbs,gradacc,dp,pp,tp,zero`` of the Ultra-Scale Playbook's sweep (others are
kept as they are); ``--out`` gets ``pred_step_s``, ``pred_mem_gb`` and ``verdict`` besides, and ``why`` where a run
would not start. Pure arithmetic, with the constants of ``hfscale/cost/model/constants.json``, which
``scripts/bench/fit_planner.py`` fitted on 1B and 3B models. Where the rows have measured tokens per second, what the
predictions are off by is printed.
"""

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _nanotron import MODELS, SEQUENCE, Row, memory_of, refusal, replicas_filter, time_of, verdict

from hfscale.cost.model.machines_known import CONSTANTS, find_machine, fitted
from hfscale.errors import ConfigError

COLUMNS = ("nodes", "mbs", "gradacc", "dp", "pp", "tp", "zero")


def read_rows(path: Path) -> list[dict[str, str]]:
    """The lines of a table.

    Raises:
        ConfigError: it lacks columns.
    """
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    missing = [name for name in ("model", *COLUMNS) if rows and name not in rows[0]]
    if missing:
        raise ConfigError(f"{path} has no column {', '.join(missing)}")
    return rows


def row_of(line: dict[str, str]) -> Row:
    """A run from its line.

    Raises:
        ConfigError: the model is none of the sweep's.
    """
    if line["model"] not in MODELS:
        raise ConfigError(f"model {line['model']!r} is unknown: the sweep has {', '.join(MODELS)}")
    return Row(model=line["model"], **{name: int(float(line[name])) for name in COLUMNS})


def predictions(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each run what it takes and holds."""
    machine = find_machine("h100")
    constants = fitted()
    own = json.loads(CONSTANTS.read_text())["nanotron"]
    found = []
    for row in rows:
        held = memory_of(row, machine, constants, own["slow"], own["memory"])
        found.append(
            {
                "pred_step_s": round(time_of(row, machine, constants, own["slow"]).total, 5),
                "pred_mem_gb": round(held.likely(machine), 3),
                "verdict": verdict(row, held, machine),
                "why": refusal(row),
            }
        )
    return found


def measured_seconds(line: dict[str, str]) -> float | None:
    """Seconds of a step that ran, from tokens per second and GPU."""
    if not line.get("tok_s_gpu"):
        return None
    ranks = int(line["dp"]) * int(line["pp"]) * int(line["tp"])
    tokens = int(line["dp"]) * int(line["mbs"]) * int(line["gradacc"]) * SEQUENCE
    return tokens / (float(line["tok_s_gpu"]) * ranks)


def off(predicted: Sequence[float], measured: Sequence[float]) -> tuple[float, float]:
    """Median and 90th percentile of ``|predicted / measured - 1|``."""
    errors = sorted(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True))
    return statistics.median(errors), errors[int(0.9 * (len(errors) - 1))]


def in_domain(row: Row) -> bool:
    """Whether the time model is meant for it."""
    return row.tp <= 8 and row.pp <= 8 and row.nodes <= 32


def _report(lines: list[dict[str, str]], rows: list[Row], found: list[dict[str, Any]]) -> None:
    seconds = [measured_seconds(line) for line in lines]
    ran = [index for index, second in enumerate(seconds) if second is not None]
    if not ran:
        return
    clean = replicas_filter([rows[i] for i in ran], [seconds[i] or 0.0 for i in ran])
    chosen = [i for i, ok in zip(ran, clean, strict=True) if ok and in_domain(rows[i])]
    chosen = [i for i in chosen if float(lines[i].get("mem_gb") or 0) < 70]
    sets = {"time": chosen, "time, pp=1": [i for i in chosen if rows[i].pp == 1]}
    for name, which in sets.items():
        if which:
            middle, tail = off(
                [found[i]["pred_step_s"] for i in which], [seconds[i] or 1.0 for i in which]
            )
            print(
                f"{name:14} {len(which):5} runs  median {100 * middle:5.1f}%  p90 {100 * tail:5.1f}%"
            )
    held = [i for i in ran if lines[i].get("mem_gb")]
    for name, which in {
        "memory": held,
        "memory, pp=1": [i for i in held if rows[i].pp == 1],
    }.items():
        if which:
            middle, tail = off(
                [found[i]["pred_mem_gb"] for i in which], [float(lines[i]["mem_gb"]) for i in which]
            )
            print(
                f"{name:14} {len(which):5} runs  median {100 * middle:5.1f}%  p90 {100 * tail:5.1f}%"
            )
    failed = [i for i, line in enumerate(lines) if line.get("status") == "fail"]
    wrong = sum(found[i]["verdict"] == "does not fit" for i in ran)
    caught = sum(found[i]["verdict"] == "does not fit" for i in failed)
    print(
        f"'does not fit': {wrong} of {len(ran)} runs that ran, {caught} of {len(failed)} that failed"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Write the table with its predictions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    try:
        lines = read_rows(arguments.rows)
        rows = [row_of(line) for line in lines]
    except (ConfigError, OSError) as error:
        parser.error(str(error))
    found = predictions(rows)
    with arguments.out.open("w", newline="") as file:
        names = [*(lines[0] if lines else ()), "pred_step_s", "pred_mem_gb", "verdict", "why"]
        writer = csv.DictWriter(file, list(dict.fromkeys(names)))
        writer.writeheader()
        writer.writerows({**line, **more} for line, more in zip(lines, found, strict=True))
    _report(lines, rows, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
