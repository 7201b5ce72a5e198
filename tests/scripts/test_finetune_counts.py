"""What a layer of a LoRA or QLoRA step launches, moves and keeps, over stock HF and PEFT, counted in one run."""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
MOVED = "bytes a token beside base products"
MOST: dict[str, dict[str, float]] = {
    "llama": {"launches": 0.70, MOVED: 0.50, "kept bytes a token": 0.64},
    "falcon": {"launches": 0.80, MOVED: 0.50, "kept bytes a token": 0.70},
    "gpt2": {"launches": 0.70, MOVED: 0.52, "kept bytes a token": 0.80},
}


@pytest.fixture(scope="module")
def per_layer() -> Any:
    """The script's function, which counts each side once."""
    sys.path.insert(0, str(BENCH))
    try:
        from finetune_counts import per_layer
    finally:
        sys.path.remove(str(BENCH))
    return cache(per_layer)


@pytest.mark.filterwarnings("ignore")  # of stock code, about its own defaults
@pytest.mark.parametrize(
    ("recipe", "family"),
    [("lora", "llama"), ("qlora", "llama"), ("lora", "falcon"), ("lora", "gpt2")],
)
def test_a_layer_takes_less_than_stock(per_layer: Any, recipe: str, family: str) -> None:
    stock, found = (per_layer(side, recipe, family) for side in ("stock", "hfscale"))
    for name, most in MOST[family].items():
        assert found[name] <= most * stock[name], name
    assert found["base products launched"] == stock["base products launched"]
    assert found["attention launched"] == stock["attention launched"]
    assert found["dequantized launched"] == stock["dequantized launched"]
    # Of the norms alone: none for adapters. Outputs in 4 bits are not cloned.
    assert found["float32 copies"] <= {"llama": 4, "falcon": 4, "gpt2": 0}[family]
    assert found["copies launched"] <= {"llama": 1, "falcon": 5, "gpt2": 0}[family]


@pytest.mark.filterwarnings("ignore")
def test_weights_in_4_bits_are_dequantized_as_often_in_checkpointed_layers(per_layer: Any) -> None:
    plain, repeated, stock = (
        per_layer(side, "qlora", "llama")["dequantizations"]
        for side in ("hfscale", "hfscale, checkpointed", "stock, checkpointed")
    )
    assert plain == repeated == 14
    assert stock == 21


@pytest.mark.filterwarnings("ignore")
def test_elementwise_recomputation_repeats_little(per_layer: Any) -> None:
    stock, plain, found = (
        per_layer(side, "lora", "llama") for side in ("stock", "hfscale", "hfscale, elementwise")
    )
    assert found["kept bytes a token"] <= 0.33 * stock["kept bytes a token"]
    assert found[MOVED] <= 1.15 * plain[MOVED]
    for kind in ("base products", "thin products", "attention"):
        assert found[f"{kind} launched"] == plain[f"{kind} launched"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_move_and_keep_a_third(per_layer: Any) -> None:
    """By the products of GPUs: nothing but elementwise operators is repeated, and no copy in float32 is kept."""
    stock, found = (
        per_layer(side, "lora", "llama") for side in ("stock", "hfscale, compiled, pieces")
    )
    assert found["kept bytes a token"] <= 0.33 * stock["kept bytes a token"]
    assert found[MOVED] <= 0.30 * stock[MOVED]
    for kind in ("base products", "thin products", "attention"):
        assert found[f"{kind} launched"] == stock[f"{kind} launched"]
