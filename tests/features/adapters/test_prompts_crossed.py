"""Prompts trained by ``hfscale.Accelerator``, and in front of 4-bit bases, equal one process in every layout."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig

import hfscale
from hfscale import ParallelConfig
from hfscale.testing import RankPool

from ...layouts import named
from ...sweeps import cases
from ...tiny_models import tiny
from ..quantization.models import four_bits, load, save
from .test_prompts import KINDS, in_float64

pytestmark = [
    # PEFT 0.21 knows the cache by its name before transformers 5.24 alone.
    pytest.mark.filterwarnings("ignore:.*`past_key_values`:FutureWarning"),
]
Pools = Callable[[int], RankPool]
LAYOUTS = named("tp2", "sequence", "shard2", "replicate2", "1f1b", "cp2", "ep2")
STEP_ROWS = 4  # rows of one step, over all ranks


def rows() -> list[dict[str, Tensor]]:
    """Rows of three steps; some are padded, and some labels are ignored."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for index in range(3 * STEP_ROWS):
        ids = torch.randint(3, 60, (9,), generator=generator)
        labels = ids.masked_fill(torch.rand(9, generator=generator) < 0.3, -100)
        mask = torch.ones_like(ids)
        if index % 3 == 0:
            mask[-2:] = 0
            labels[-2:] = -100
        made.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return made


def _losses_and_norms(
    adapted: Any, layout: dict[str, Any], accumulation: int | None
) -> list[tuple[float, float]]:
    """Train three steps; with ``accumulation``, by Accelerate, over this many batches a step."""
    optimizer = hfscale.create_optimizer(adapted, "sgd", lr=0.5)
    world = ParallelConfig(**layout).batch_world
    loader: Any = DataLoader(rows(), batch_size=STEP_ROWS // world)  # type: ignore[arg-type]
    told = []
    if accumulation is None:
        rank = hfscale.batch_rank(adapted)
        for batch in list(loader)[rank::world]:
            loss = hfscale.train_step(adapted, batch)
            told.append((float(loss), float(hfscale.clip_grad_norm_(adapted, 0.5))))
            optimizer.step()
            optimizer.zero_grad()
        return told
    AcceleratorState._reset_state(reset_partial_state=True)  # another test's precision
    accelerator = hfscale.Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    adapted, optimizer, loader = accelerator.prepare(adapted, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(adapted):
            loss = hfscale.train_step(adapted, batch)
            norm = 0.0
            if accelerator.sync_gradients:
                norm = float(accelerator.clip_grad_norm_(adapted.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
        told.append((float(loss), norm))
    return told


def _by_accelerate(
    directory: str, kind: str, layout: dict[str, Any], accumulation: int
) -> list[tuple[float, float]]:
    with in_float64():
        model = hfscale.from_pretrained(directory, parallel=ParallelConfig(**layout))
        torch.manual_seed(5)
        adapted = hfscale.get_peft_model(model, copy.deepcopy(KINDS[kind])).train()
        return _losses_and_norms(adapted, layout, accumulation)


@pytest.mark.parametrize(
    ("kind", "layout", "accumulation"),
    cases(
        [
            (kind, layout, accumulation)
            for kind in ("prompt", "encoder", "prefix")
            for layout in LAYOUTS
            for accumulation in (1, 2)
            if layout != "ep2" and (kind, layout) != ("prefix", "cp2")
        ],
        daily=[("prompt", "cp2", 2), ("encoder", "shard2", 1), ("prefix", "sequence", 2)],
    ),
)
def test_accelerate(
    pools: Pools, tmp_path: Path, kind: str, layout: str, accumulation: int
) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float64).save_pretrained(tmp_path)
    expected = pools(2).alone(_by_accelerate, str(tmp_path), kind, {}, accumulation)
    assert len(set(expected)) == 3
    for found in pools(2).run(_by_accelerate, str(tmp_path), kind, LAYOUTS[layout], accumulation):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)


def _in_front_of_four_bits(
    path: str, kind: str, layout: dict[str, Any]
) -> list[tuple[float, float]]:
    model = load(path, layout, four_bits())
    torch.manual_seed(5)
    config: peft.PeftConfig = copy.deepcopy(KINDS[kind])
    return _losses_and_norms(hfscale.get_peft_model(model, config).train(), layout, None)


def _config(family: str) -> PreTrainedConfig:
    """A model whose shards are whole quantization blocks of 64 values, so that they quantize alike in every layout."""
    sizes = {"hidden_size": 256, "intermediate_size": 256}
    if family == "llama":
        return tiny("llama", **sizes)
    return MixtralConfig(
        **sizes,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=67,
        max_position_embeddings=64,
        num_local_experts=4,
        num_experts_per_tok=2,
    )


@pytest.mark.parametrize(
    ("family", "kind", "layout"),
    cases(
        [
            (family, kind, layout)
            for family in ("llama", "mixtral")
            for kind in ("prompt", "encoder", "prefix")
            for layout in LAYOUTS
            if (layout != "ep2" or family == "mixtral") and (kind, layout) != ("prefix", "cp2")
        ],
        daily=[("mixtral", "encoder", "ep2"), ("llama", "prefix", "tp2")],
    ),
)
def test_four_bits(pools: Pools, tmp_path: Path, family: str, kind: str, layout: str) -> None:
    path = save(_config(family), tmp_path)
    expected = pools(2).alone(_in_front_of_four_bits, path, kind, {})
    assert len(set(expected)) == 3
    for found in pools(2).run(_in_front_of_four_bits, path, kind, LAYOUTS[layout]):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
