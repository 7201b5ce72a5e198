"""Dropout under tensor parallelism (trap T16)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ParallelConfig
from hfscale._compat.transformers.computing import enable_checkpointing
from hfscale.testing import RankPool, keep_float64
from hfscale.train.runtime.shards import local_tensor
from tests.tiny_models import tiny

Pools = Callable[[int], RankPool]
IDS = torch.randint(0, 67, (2, 12), generator=torch.Generator().manual_seed(4))


def step(
    path: str, layout: dict[str, int], seed: int, checkpointing: bool
) -> tuple[float, torch.Tensor]:
    """Loss, and this rank's gradient of the attention input projection, of one step with dropout."""
    model = hfscale.from_pretrained(
        path, parallel=ParallelConfig(**layout), dtype=torch.float64
    ).train()
    if checkpointing:
        enable_checkpointing(model)
    torch.manual_seed(seed)
    loss = hfscale.train_step(model, {"input_ids": IDS, "labels": IDS})
    return loss.item(), local_tensor(model.transformer.h[0].attn.c_attn.weight.grad).clone()


def save(path: Path, **dropout: float) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny("gpt2", **dropout), dtype=torch.float64).save_pretrained(
        path
    )
    return str(path)


def test_replicated_dropout_equals_one_process(pools: Pools, tmp_path: Path) -> None:
    path = save(tmp_path, resid_pdrop=0.3, embd_pdrop=0.2)
    expected, _ = step(path, {}, 7, False)
    other, _ = step(path, {}, 8, False)
    assert expected != pytest.approx(other, abs=1e-6), "dropout does nothing"
    for loss, _ in pools(2).run(step, path, {"tp_size": 2}, 7, False):
        assert loss == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_recomputation_sees_the_same_masks(
    pools: Pools, tmp_path: Path, implementation: str
) -> None:
    path = save(tmp_path, resid_pdrop=0.3, embd_pdrop=0.2, attn_pdrop=0.3)
    plain = pools(2).run(step, path, {"tp_size": 2}, 7, False)
    recomputed = pools(2).run(step, path, {"tp_size": 2}, 7, True)
    for (loss, gradient), (again, gradient_again) in zip(plain, recomputed, strict=True):
        assert loss == again
        torch.testing.assert_close(gradient, gradient_again, rtol=1e-6, atol=1e-9)


def attention_masks(
    path: str, layout: dict[str, int], seeds: list[int]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per attention call: which weights survived dropout; per MLP call: which outputs did."""
    model = hfscale.from_pretrained(
        path, parallel=ParallelConfig(**layout), dtype=torch.float64, attn_implementation="eager"
    ).train()
    seen: dict[str, list[torch.Tensor]] = {"attn_dropout": [], "dropout": []}

    def watch(name: str) -> Callable[..., None]:
        return lambda module, args, output: seen[name].append((output == 0) & (args[0] != 0))

    for layer in model.transformer.h:
        layer.mlp.dropout.register_forward_hook(watch("dropout"))
    original = torch.nn.functional.dropout

    def dropout(
        x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        result = original(x, p, training, inplace)
        if x.ndim == 4:
            seen["attn_dropout"].append((result == 0) & (x != 0))
        return result

    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    torch.manual_seed(seeds[rank])
    torch.nn.functional.dropout = dropout  # type: ignore[assignment]
    try:
        hfscale.train_step(model, {"input_ids": IDS, "labels": IDS})
    finally:
        torch.nn.functional.dropout = original  # type: ignore[assignment]
    return list(zip(seen["attn_dropout"], seen["dropout"], strict=True))


@pytest.mark.parametrize("seeds", [[7, 7, 7, 7], [1, 2, 3, 4]])
def test_masks(pools: Pools, tmp_path: Path, seeds: list[int]) -> None:
    """Whole activations: one mask per tensor group. Cut ones: a mask per rank. Other batches: other masks."""
    path = save(tmp_path, resid_pdrop=0.3, attn_pdrop=0.3)
    a0, a1, b0, b1 = pools(4).run(attention_masks, path, {"tp_size": 2, "dp_shard_size": 2}, seeds)
    for (cut0, whole0), (cut1, whole1) in [*zip(a0, a1, strict=True), *zip(b0, b1, strict=True)]:
        assert torch.equal(whole0, whole1)
        assert not torch.equal(cut0, cut1)
    assert not torch.equal(a0[0][1], b0[0][1])
    assert not torch.equal(a0[0][0], b0[0][0])
    assert not torch.equal(a0[0][0], a0[1][0]), "two layers drew the same attention mask"


def test_keep_float64_covers_dropout_free_parts() -> None:
    with keep_float64():
        assert torch.ones(1, dtype=torch.float64).float().dtype == torch.float64


def agreed(path: str) -> Any:
    model = hfscale.from_pretrained(path, parallel=ParallelConfig(tp_size=2)).train()
    torch.manual_seed(torch.distributed.get_rank())
    return [hfscale.train_step(model, {"input_ids": IDS, "labels": IDS}).item() for _ in range(3)]


def test_ranks_seeded_apart_stay_together(pools: Pools, tmp_path: Path) -> None:
    first, second = pools(2).run(agreed, save(tmp_path, resid_pdrop=0.5))
    assert first == second
    assert len(set(first)) == 3
