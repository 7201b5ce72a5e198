"""What layers of a model's own class keep, as an estimate counts it, against what hooks see in a real step."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig

import hfscale
from hfscale import MemoryConfig, ParallelConfig
from hfscale.features.memory.saved import count_saved
from hfscale.models.clone import HIDDEN
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of

from ..families import config_of
from ..sweeps import cases, pairs

Pools = Callable[[int], RankPool]
LAYERS = 4
ROWS = 2
LENGTH = 48
FEW = ("gpt2", "mixtral")
NAMED = ("llama", "gpt2", "mixtral", "qwen2_moe", "gemma", "bloom", "falcon")
# Drawn with random.Random(20).sample from the families of docs/families.md that are equal in every column.
DRAWN = ("camembert", "falcon_h1", "lfm2_moe", "mellum", "minimax", "qwen3_5_text", "xlm-roberta")
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "sequence": {"tp_size": 2, "sequence_parallel": True},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "shard2": {"dp_shard_size": 2},
}


def kept(family: str, layout: dict[str, Any], recompute: Any = "none") -> tuple[int, int]:
    """This pipeline rank, and bytes of activations that it kept in a step."""
    parallel = ParallelConfig(**layout)
    memory = MemoryConfig(recompute=recompute)
    config = config_of(family, layers=LAYERS)
    model = hfscale.from_config(
        config, parallel=parallel, memory=memory, dtype=torch.float32
    ).train()
    runtime = runtime_of(model)
    rows = ROWS * parallel.size("pp")
    ids = torch.randint(3, 60, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    with count_saved(runtime.model, runtime.plan.layers, runtime.plan.head) as saved:
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    return runtime.mesh.ranks["pp"], saved.layers + saved.around


def all_kept(families: Sequence[str], layout: dict[str, Any]) -> list[tuple[int, int]]:
    return [kept(family, layout) for family in families]


def estimated(family: str, layout: dict[str, Any], recompute: Any = "none") -> list[int]:
    """Of every pipeline rank."""
    found = hfscale.estimate(
        config_of(family, layers=LAYERS),
        ParallelConfig(**layout),
        sequence_length=LENGTH,
        batch_size=ROWS,
        dtype=torch.float32,
        memory=MemoryConfig(recompute=recompute),
    )
    how = "for this kind of layer" if family in ("llama", "gemma") else "on the model's own layers"
    assert any(f"activations: counted {how}" in note for note in found.notes)
    return [stage.memory.activations for stage in found.stages]


@pytest.mark.parametrize("family", cases([*NAMED, *DRAWN], daily=["gpt2", "mixtral", "falcon"]))
def test_one_process(family: str) -> None:
    assert estimated(family, {})[0] == pytest.approx(kept(family, {})[1], rel=0.03)


@pytest.mark.parametrize(
    ("families", "layout"),
    pairs([FEW, NAMED, DRAWN], LAYOUTS, daily=[(FEW, "sequence"), (FEW, "pp2")]),
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_ranks(pools: Pools, families: Sequence[str], layout: str) -> None:
    # Of these, what goes into the head is alive for a moment beside its gradient: 4.7%.
    if layout == "sequence":
        families = [family for family in families if "ber" not in family]
    expected = [estimated(family, LAYOUTS[layout]) for family in families]
    for found in pools(2).run(all_kept, families, LAYOUTS[layout]):
        for family, (stage, size), wanted in zip(families, found, expected, strict=True):
            assert wanted[stage] == pytest.approx(size, rel=0.03), family


def test_copies_of_frozen_weights_are_no_activations() -> None:
    """Under autocast, adapters' bases are cast in every pass: those copies are among the gathered weights alone."""
    adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    short, long = (
        hfscale.estimate(
            config_of("gemma2", layers=2, hidden_size=128, intermediate_size=512),
            sequence_length=16,
            batch_size=rows,
            mixed_precision="bf16",
            dtype=torch.float32,
            peft_config=adapters,
        )
        .stages[0]
        .memory
        for rows in (1, 2)
    )
    assert long.activations == pytest.approx(2 * short.activations, rel=0.02)
    assert long.gathered == short.gathered > 0


def test_gradients_are_not_kept_in_8_bits() -> None:
    """What one layer's backward pass makes is as large, whether its activations are kept in 8 bits or not."""
    exact, rounded = (
        hfscale.estimate(config_of("gpt2", layers=2), sequence_length=LENGTH, memory=memory)
        .stages[0]
        .memory
        for memory in (None, MemoryConfig(compress_activations="64"))
    )
    assert rounded.activations < 0.6 * exact.activations
    assert rounded.backward == exact.backward


@pytest.mark.parametrize("recompute", ["full", "selective", "elementwise", ("mlp",)], ids=str)
@pytest.mark.parametrize("family", cases(["gpt2", "mixtral"], daily=["gpt2"]))
def test_recomputed(family: str, recompute: Any) -> None:
    """What is recomputed is out of the hooks' sight; of an estimate one layer is part."""
    (_, whole), (_, rest) = kept(family, {}), kept(family, {}, recompute)
    again = 0 if recompute == "selective" else (whole - rest) / LAYERS
    # The layer's input, which it reads once more.
    stream = ROWS * LENGTH * HIDDEN * 4 if recompute == "full" else 0
    assert estimated(family, {}, recompute)[0] == pytest.approx(rest + again + stream, rel=0.03)
