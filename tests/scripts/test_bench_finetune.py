"""What the benchmark of fine-tuning makes of bytes: ratios to an ideal share, and the reasons it gives."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


@pytest.fixture(scope="module")
def bench() -> Any:
    sys.path.insert(0, str(BENCH))
    try:
        found = importlib.util.spec_from_file_location("bench_finetune", BENCH / "finetune.py")
        assert found is not None
        assert found.loader is not None
        module: ModuleType = importlib.util.module_from_spec(found)
        sys.modules["bench_finetune"] = module  # where its dataclasses look for their types
        found.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCH))
        sys.modules.pop("bench_finetune", None)


def held(
    weights: int, adapters: int, gradients: int, optimizer: int, activations: int
) -> dict[str, int]:
    kinds = {
        "weights": weights,
        "adapters": adapters,
        "gradients": gradients,
        "optimizer": optimizer,
    }
    return {**kinds, "activations": activations, "around the layers": 7}


def test_ratios_are_those_of_the_fullest_rank(bench: Any) -> None:
    row = bench.compare(
        "full, AdamW",
        "pp2",
        held(200, 0, 200, 400, 100),
        [held(90, 0, 90, 180, 60), held(110, 0, 110, 220, 30)],
    )
    assert row["fullest rank / ideal"] == {
        **{"weights": 1.1, "gradients": 1.1, "optimizer": 1.1, "activations": 1.2},
        "total": round(470 * 2 / 900, 4),
    }
    assert not row["reached"]
    assert set(row["reasons"]) == {"weights", "gradients", "optimizer", "activations"}
    assert "two microbatches" in row["reasons"]["activations"]


def test_reasons(bench: Any) -> None:
    lora = {"weights": 1.0, "adapters": 1.4, "gradients": 1.4, "optimizer": 1.4, "activations": 1.1}
    assert "one factor" in bench.reason("tp2", "optimizer", lora)
    assert "gathered input" in bench.reason("tp2, sequence", "activations", lora)
    assert "blocks of 256" in bench.reason("tp2", "optimizer", {"gradients": 1.0, "optimizer": 1.3})
    every = [(layout, kind) for layout in bench.LAYOUTS for kind in lora]
    assert all(
        bench.reason(layout, kind, lora) or layout in ("dp_shard2", "ep2") for layout, kind in every
    )
