"""Random draws: how they are made, judged and made small."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import hfscale
from hfscale import ParallelConfig
from hfscale.features.quantization.quantized_modules import dequantized
from tests.fuzz import Draw, Verdict, choose, choose_crossing, read, shrink
from tests.fuzz.choose_crossing import PROJECTIONS
from tests.fuzz.judge import compared
from tests.fuzz.measures import Yardstick
from tests.fuzz.models import quantization
from tests.fuzz.reference import Record, Step, load, make_start
from tests.fuzz.report_page import page

WRONG = Verdict("wrong", "gradient")


def test_a_draw_follows_from_seed_and_index_and_can_be_read_back() -> None:
    draws = [choose(3, index) for index in range(30)]
    assert draws == [choose(3, index) for index in range(30)]
    assert draws != [choose(4, index) for index in range(30)]
    assert [read(draw.write()) for draw in draws] == draws


def test_draws_reach_every_axis() -> None:
    draws = [choose(0, index) for index in range(250)]
    drawn = {name for draw in draws for name in draw.layout}
    options = {
        f.name for f in fields(ParallelConfig) if not f.name.endswith(("_handler", "_backend"))
    }
    # one that hfscale does not run
    assert options - drawn == {"sp_size"}
    usual = Draw("llama")
    for name in vars(usual):
        assert any(getattr(draw, name) != getattr(usual, name) for draw in draws), name
    assert len({draw.family for draw in draws}) > 100


def test_draws_of_what_is_kept_cross_projections_with_adapters() -> None:
    draws = [choose_crossing(3, index) for index in range(60)]
    assert [read(draw.write()) for draw in draws] == draws
    assert {draw.steps for draw in draws} == {3}
    again = [
        draw for draw in draws if draw.layout.get("sequence_regather") and draw.peft is not None
    ]
    in_the_layer = {family for family, _ in PROJECTIONS["in the layer"]}
    assert in_the_layer & {draw.family for draw in again}
    assert {draw.family for draw in draws} - in_the_layer
    assert any(draw.quantize for draw in draws)


@pytest.mark.parametrize(
    ("fails", "smallest"),
    [
        (lambda d: d.layout.get("tp_size", 1) > 1, {"layout": {"tp_size": 2}}),
        (
            lambda d: "sliding_window" in d.config and d.rows > 1,
            {"config": {"sliding_window": 4}, "rows": 2},
        ),
        (
            lambda d: d.peft is not None and d.family == "opt",
            {"family": "opt", "peft": {"target_modules": ["fc1"]}},
        ),
    ],
)
def test_what_fails_is_made_small(fails: Callable[[Draw], bool], smallest: dict[str, Any]) -> None:
    big = Draw(
        "opt", {"sliding_window": 4, "vocab_size": 71}, 4, {"tp_size": 4, "sequence_parallel": True, "overlap": False},
        rows=3, microbatches=3, lengths=(7, 9), peft={"r": 2, "target_modules": ["fc1", "fc2"]}, resume=True,
    )  # fmt: skip
    verdicts = {True: WRONG, False: Verdict("equal")}
    small = shrink(big, WRONG, lambda draw: verdicts[fails(draw)])
    assert small == Draw(**{"family": "llama", "layers": 1, "rows": 1, "steps": 1, **smallest})


def test_another_failure_is_not_the_same() -> None:
    big = Draw("opt", layout={"tp_size": 2}, rows=3)
    judged = {3: WRONG, 2: Verdict("crash", "build"), 1: Verdict("wrong", "loss")}
    assert shrink(big, WRONG, lambda draw: judged[draw.rows]).rows == 3


def test_ranks_are_compared_with_one_process_and_with_each_other() -> None:
    draw = Draw("llama")
    equal = {"worst": {"loss": [0.5, 1e-16, ""]}, "losses": [1.0], "sums": {"a {}": "x"}}
    assert compared(draw, [equal, equal]).outcome == "equal"
    for change in (
        {"worst": {"loss": [2.0, 1e-3, "step 0"]}},
        {"losses": [2.0]},
        {"sums": {"a {}": "y"}},
    ):
        assert compared(draw, [equal, {**equal, **change}]).outcome == "wrong"


def worst(draw: Draw, kind: str, found: float, narrow: float | None = None) -> float:
    """How far over what is allowed ``found`` is, where float64 has 3e-16 in one tensor beside one of ones.

    Args:
        narrow: of stock code in the draw's type, which is off by 1e-7 in the other.
    """
    ones = torch.ones(4, dtype=torch.float64)
    wanted = torch.full((4,), 3e-16, dtype=torch.float64)
    values = {"big": ones, "zero": wanted}
    record = Record([Step([[1.0]], values, 1.0, values)])
    if narrow is not None:
        near = {"big": ones * (1 + 1e-7), "zero": torch.full_like(ones, narrow)}
        record.narrow = [Step([[1.0]], near, 1.0, near)]
    yardstick = Yardstick(draw, record, aligned=True, mixture=False)
    yardstick.tensors(kind, 0, [("zero", torch.full_like(ones, found), wanted, wanted)])
    return yardstick.worst.ratios[kind][0]


ADAM = Draw("llama", optimizer="AdamW", learning_rate=0.01)
SINGLE = Draw("llama", dtype="float32")


@pytest.mark.parametrize(
    ("draw", "kind", "narrow", "rounding", "wrong"),
    [
        (Draw("llama"), "gradient", None, 8e-15, 1e-13),
        (ADAM, "weight", None, 8e-12, 1e-9),  # 64 roundings over eps
        (ADAM.change(max_norm=0.01), "weight", None, 8e-14, 1e-11),  # clipped before
        (SINGLE, "gradient", 0.0, 1.5e-8, 1e-5),
        (SINGLE.change(dtype="bfloat16"), "gradient", 0.0, 1.5e-7, 1e-3),
        (SINGLE.change(quantize="nf4"), "gradient", None, 1e-7, 1e-3),
    ],
)
def test_what_is_zero_in_truth_is_measured_by_rounding(
    draw: Draw, kind: str, narrow: float | None, rounding: float, wrong: float
) -> None:
    assert worst(draw, kind, rounding, narrow) <= 1
    assert worst(draw, kind, wrong, narrow) > 1


def test_experts_in_few_bits_are_those_of_one_process(tmp_path: Path) -> None:
    wide = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    draw = Draw("qwen3_moe", wide, 1, dtype="float32", quantize="fp4", peft=None)
    make_start(draw, tmp_path)
    stock = load(draw, tmp_path, torch.float32)
    ours = hfscale.from_pretrained(
        str(tmp_path / "start"), dtype=torch.float32, **quantization(draw)
    )
    for name in ("gate_up_proj", "down_proj"):
        experts = stock.model.layers[0].mlp.experts.get_parameter(name)
        assert torch.equal(dequantized(ours.model.layers[0].mlp.experts, name), experts)
        assert not experts.requires_grad


@pytest.mark.timeout(900)  # minutes beside another worker's ranks
@pytest.mark.parametrize(
    ("seed", "draws", "kind"),
    [
        (8, 1, ()),
        (19, 4, ("--crossing",)),
        pytest.param(13, 16, (), marks=pytest.mark.slow),
        pytest.param(13, 100, ("--crossing",), marks=pytest.mark.slow),
    ],
)
def test_draws_are_equal_or_refused(seed: int, draws: int, kind: tuple[str, ...]) -> None:
    """In a process of their own, which forks while no thread runs; a few (1,000 in make test-all)."""
    script = Path(__file__).parents[2] / "scripts" / "layout_fuzz.py"
    command = [
        sys.executable,
        str(script),
        "--seed",
        str(seed),
        "--draws",
        str(draws),
        "--jobs",
        "2",
        *kind,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout or done.stderr
    print(done.stdout)


def test_the_page_counts_every_draw() -> None:
    judged = [
        (Draw("llama", layout={"tp_size": 2}), Verdict("equal")),
        (Draw("opt"), Verdict("refused", "plan: no")),
    ]
    text = page(judged, 5)
    assert "Seed 5, 2 draws: 1 equal, 1 refused" in text
    assert "| tp | 1 | 0 |" in text
    assert "| plan: no | 1 |" in text
