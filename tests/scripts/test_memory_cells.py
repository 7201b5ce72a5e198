"""The estimate of every lever over every axis is near what is counted."""

import json
from collections.abc import Callable

import memory_cells
import pytest
from memory_cells import MODELS, RESULTS, case_of, ratios
from memory_measured import gpt2, llama, mixture
from memory_table import AXES, LEVERS, PAGE, reason

from hfscale.testing import RankPool

from ..sweeps import cases

FOUND = json.loads(RESULTS.read_text())
CELLS = [
    (model, lever, axis)
    for model, found in FOUND.items()
    for lever, axes in found.items()
    for axis in axes
]
DAILY = [
    ("llama 256", 'recompute=["mlp"]', "tp"),
    ("llama 256", "gradient_compression", "dp_replicate"),
    ("mixture 256", 'mixed_precision="bf16"', "tp"),
    ("gpt2 256", "offload_activations", "pp, 1f1b"),
    ("gpt2 256", "compress_activations", "tp"),
]
SMALL = {"llama": llama(128), "mixture": mixture(128), "gpt2": gpt2(128)}


def test_what_was_measured_is_near() -> None:
    assert len(CELLS) >= 240
    for lever, axis in {(lever, axis) for _, lever, axis in CELLS}:
        assert not reason(LEVERS[lever], AXES[axis])
    for model, lever, axis in CELLS:
        total, kept = FOUND[model][lever][axis]
        assert abs(total - 1) <= 0.03, (model, lever, axis)
        assert abs(kept - 1) <= 0.05, (model, lever, axis)


def test_they_are_written() -> None:
    assert set(FOUND) <= set(MODELS)
    assert memory_cells.tables(FOUND) in PAGE.read_text()


@pytest.mark.daily("gpt2-pp, 1f1b", "llama-tp")
@pytest.mark.parametrize(
    ("model", "axis"), [("llama", "tp"), ("mixture", "dp_shard"), ("gpt2", "pp, 1f1b")]
)
def test_scores_of_eager_attention_are_counted(
    pools: Callable[[int], RankPool], model: str, axis: str
) -> None:
    total, kept = ratios(pools(2), case_of({"attention": "eager"}, AXES[axis], SMALL[model]))
    assert total == pytest.approx(1, abs=0.03)
    assert kept == pytest.approx(1, abs=0.03)


@pytest.mark.daily(
    "gpt2 256-offload_activations-pp, 1f1b", "llama 256-gradient_compression-dp_replicate"
)
@pytest.mark.parametrize(
    ("model", "lever", "axis"),
    cases(
        dict.fromkeys([*(cell for cell in CELLS if cell[2] != "pp, zbv"), *DAILY]),
        daily=DAILY,
    ),
)
def test_a_cell(pools: Callable[[int], RankPool], model: str, lever: str, axis: str) -> None:
    total, _ = ratios(pools(2), case_of(LEVERS[lever], AXES[axis], SMALL[model.split()[0]]))
    assert total == pytest.approx(1, abs=0.03)
