"""The time and memory models against public runs: models fitted on smaller ones, and other stacks."""

import csv
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hfscale import ParallelConfig
from hfscale.cost.model.job import Job
from hfscale.cost.model.machines_known import (
    CONSTANTS,
    Constants,
    find_machine,
    fitted,
    read_constants,
)
from hfscale.cost.model.model_shape import ModelShape
from hfscale.cost.model.step_time import Seconds, head_seconds, layer_seconds, step_time

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "cost" / "data"
RUNS = DATA / "nanotron_h100_1b_3b.csv"
H100 = find_machine("h100")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "scripts" / "bench"))
    import fit_planner
    import planner

    yield planner, fit_planner
    sys.path.remove(str(ROOT / "scripts" / "bench"))
    for name in ("planner", "fit_planner", "_nanotron"):
        sys.modules.pop(name, None)


class Judged:
    """Predictions for the runs of some models, by the constants of a file."""

    def __init__(self, bench: Any, constants: Path, models: Sequence[str]) -> None:
        self.planner = planner = bench[0]
        own = json.loads(constants.read_text())["nanotron"]
        self.lines = [line for line in planner.read_rows(RUNS) if line["model"] in models]
        self.rows = [planner.row_of(line) for line in self.lines]
        time = read_constants(constants)
        self.seconds = [planner.time_of(row, H100, time, own["slow"]).total for row in self.rows]
        self.held = [
            planner.memory_of(row, H100, time, own["slow"], own["memory"]) for row in self.rows
        ]
        self.gib = [held.likely(H100) for held in self.held]
        self.measured = [planner.measured_seconds(line) for line in self.lines]
        self.ran = [i for i, second in enumerate(self.measured) if second]
        clean = planner.replicas_filter(
            [self.rows[i] for i in self.ran], [self.measured[i] for i in self.ran]
        )
        self.clean = [i for i, good in zip(self.ran, clean, strict=True) if good]
        held = [i for i in self.clean if float(self.lines[i]["mem_gb"]) < 70]
        self.domain = [i for i in held if planner.in_domain(self.rows[i])]

    def time(self, which: Sequence[int]) -> tuple[float, float]:
        return self.planner.off([self.seconds[i] for i in which], [self.measured[i] for i in which])

    def memory(self, which: Sequence[int]) -> tuple[float, float]:
        return self.planner.off(
            [self.gib[i] for i in which], [float(self.lines[i]["mem_gb"]) for i in which]
        )

    def refused(self, which: Sequence[int]) -> float:
        found = [self.planner.verdict(self.rows[i], self.held[i], H100) for i in which]
        return found.count("does not fit") / len(found)

    def cells(self) -> Iterator[list[int]]:
        """Runs of one model on as many nodes."""
        for key in sorted({(self.rows[i].model, self.rows[i].nodes) for i in self.clean}):
            yield [i for i in self.clean if (self.rows[i].model, self.rows[i].nodes) == key]

    def order(self, cell: Sequence[int]) -> float:
        """Spearman's correlation of predicted and measured seconds."""
        places = [sorted(cell, key=of.__getitem__) for of in (self.seconds, self.measured)]
        return statistics.correlation(*([order.index(i) for i in cell] for order in places))

    def chosen(self, cell: Sequence[int], best_of: int) -> float:
        """Speed of the best of so many layouts, those that are predicted to be fastest, over the best measured."""
        fits = [i for i in cell if self.planner.verdict(self.rows[i], self.held[i], H100) == "fits"]
        first = sorted(fits, key=lambda i: self.seconds[i])[:best_of]
        return min(self.measured[i] for i in cell) / min(self.measured[i] for i in first)


def test_models_that_it_was_not_fitted_on(bench: Any) -> None:
    """3B, by constants fitted on 1B alone: the goals of held-out runs."""
    found = Judged(bench, DATA / "fitted_on_1b.json", ["3B"])
    middle, tail = found.time(found.domain)
    assert (middle <= 0.035, tail <= 0.125) == (True, True)  # goals: 6% and 18%
    middle, tail = found.time([i for i in found.domain if found.rows[i].pp == 1])
    assert (middle <= 0.03, tail <= 0.07) == (True, True)  # goals: 5% and 10%
    middle, tail = found.memory(found.ran)
    assert (middle <= 0.04, tail <= 0.115) == (True, True)  # goals: 8% and 17%
    near = [i for i in found.ran if found.planner.in_domain(found.rows[i])]
    middle, tail = found.memory([i for i in near if found.rows[i].pp == 1])
    assert (middle <= 0.035, tail <= 0.10) == (True, True)  # goals: 4% and 10%
    assert found.refused(found.ran) <= 0.002  # goal: 0.5%


def test_layouts_that_it_chooses(bench: Any) -> None:
    found = Judged(bench, CONSTANTS, ["1B", "3B"])
    cells = list(found.cells())
    assert len(cells) == 14
    assert statistics.median(map(found.order, cells)) >= 0.97  # goal: 0.95
    assert statistics.median(found.chosen(cell, 1) for cell in cells) >= 0.99  # goal: 0.97
    # Goal: 0.95. Missed in one cell: of its first three, one took twice as long as its twins.
    best = sorted(found.chosen(cell, 3) for cell in cells)
    assert (best[0] >= 0.945, best[1] >= 0.99) == (True, True)
    assert found.refused(found.ran) <= 0.002  # goal: 0.5%
    # Goal: 78%.
    assert (
        found.refused([i for i, line in enumerate(found.lines) if line["status"] == "fail"])
        >= 0.785
    )


@pytest.mark.slow
def test_constants_are_what_the_fit_gives(bench: Any, tmp_path: Path) -> None:
    bench[1].main(["--rows", str(RUNS), "--out", str(tmp_path / "fitted.json")])
    again = json.loads((tmp_path / "fitted.json").read_text())
    assert again == json.loads(CONSTANTS.read_text())


def test_a_table_with_predictions(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text(
        "model,nodes,mbs,gradacc,gbs,dp,pp,tp,zero,status\n"
        "8B,1,1,64,256,4,1,2,1,ok\n8B,1,16,4,256,4,1,2,0,fail\n80B,64,1,4,256,8,8,8,1,ok\n80B,8,1,4,4,1,8,8,1,ok\n"
    )
    assert bench[0].main(["--rows", str(rows), "--out", str(tmp_path / "out.csv")]) == 0
    with (tmp_path / "out.csv").open() as file:
        found = list(csv.DictReader(file))
    assert [row["verdict"] for row in found] == [
        "fits",
        "does not fit",
        "does not fit",
        "does not fit",
    ]
    assert found[2]["why"] == found[3]["why"] == "4 microbatches for 8 stages"
    assert 0.3 < 8 * 6 * 8e9 * 4096 * 256 / (float(found[0]["pred_step_s"]) * 64 * 989.4e12) < 0.5
    with pytest.raises(SystemExit):
        bench[0].main(
            ["--rows", str(DATA / "megatron_a100.csv"), "--out", str(tmp_path / "out.csv")]
        )
    assert "has no column model" in capsys.readouterr().err


def _megatron(row: dict[str, str], products: float) -> float:
    """Seconds of a step of Megatron-LM on A100s over those measured."""
    number = {key: float(value) for key, value in row.items() if key not in ("table", "recompute")}
    count = {key: int(value) for key, value in number.items()}
    hidden = count["hidden"]
    pp = count["pp"]
    tp = count["tp"]
    shape = ModelShape(
        count["layers"],
        hidden,
        hidden,
        hidden,
        count["ffn"],
        count["vocab"],
        gated=False,
        tied=True,
    )
    job = Job(
        ParallelConfig(
            tp_size=tp, pp_size=pp, dp_replicate_size=count["dp"], virtual_stages=count["vp"]
        ),
        sequence=count["seq"],
        batch=count["micro_bs"],
        microbatches=count["global_bs"] // (count["dp"] * count["micro_bs"]),
        sequence_parallel=bool(count["sequence_parallel"]),
        recompute=float(row["recompute"] == "full"),
        attention_again=True,
        causal=False,
    )
    machine = replace(find_machine("a100-80"), products=products)
    constants = read_constants(CONSTANTS)
    layers = layer_seconds(shape, job, machine, constants) * (shape.layers / pp)
    head = head_seconds(shape, job, machine, constants)
    stages = [layers + (head if stage == pp - 1 else Seconds()) for stage in range(pp)]
    weights = [(shape.layers / pp * shape.layer_weights + shape.table_weights) / tp] * pp
    return step_time(stages, weights, job, machine, constants).total / number["seconds"]


@pytest.mark.parametrize(
    ("table", "runs", "bound"), [("PTD-P Table 1", 10, 0.03), ("Korthikanti Table 5", 8, 0.065)]
)
def test_another_stack_with_one_constant(table: str, runs: int, bound: float) -> None:
    """Each run by the share of products that suits the others best; goals: 8% and 11% in the median."""
    with (DATA / "megatron_a100.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["table"] == table]
    assert len(rows) == runs
    shares = [share / 100 for share in range(60, 100, 2)]
    errors = {share: [abs(_megatron(row, share) - 1) for row in rows] for share in shares}
    left_out = []
    for index in range(len(rows)):
        others = {s: statistics.median(e[:index] + e[index + 1 :]) for s, e in errors.items()}
        left_out.append(errors[min(others, key=others.__getitem__)][index])
    assert statistics.median(left_out) <= bound


def test_terms_add_up_and_a_pipeline_waits_for_its_slowest() -> None:
    constants: Constants = fitted()
    job = Job(ParallelConfig(pp_size=4), sequence=1024, batch=1, microbatches=8)
    stages = [Seconds(products=p) for p in (1.0, 3.0, 1.0, 1.0)]
    found = step_time(stages, [0, 0, 0, 0], job, H100, replace(constants, hop=0.0, step=0.0))
    assert found.total == pytest.approx(6.0 + 7 * 3.0)
    assert (found.products, found.bubble) == (pytest.approx(24.0), pytest.approx(3.0))
    assert found.total == pytest.approx(sum(found.terms.values()))
