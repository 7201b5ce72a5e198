"""Experts that start different, and how much of a model is in memory while they are made."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import hfscale
from hfscale.distributed.files.reader import TensorOnDisk
from hfscale.extras.upcycle.expert_tensors import Variation, open_whole

from ...tensor_memory import follow_memory
from .dense import save_dense, stored


def experts_of(directory: Path, projection: str, layer: int = 0) -> list[torch.Tensor]:
    found = stored(directory)
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight" for expert in range(4)
    ]
    return [found[name] for name in names]


def test_the_dropped_share_is_the_share_and_one_set_of_channels(tmp_path: Path) -> None:
    source = save_dense(tmp_path / "dense", "qwen3")
    target = hfscale.upcycle(source, tmp_path / "mixture", num_experts=4, reinitialize=0.25)
    dense = stored(source)
    changed: dict[str, list[set[int]]] = {}
    for projection, other_dim in (("gate", 1), ("up", 1), ("down", 0)):
        whole = dense[f"model.layers.0.mlp.{projection}_proj.weight"]
        experts = experts_of(target, projection)
        assert all(expert.shape == whole.shape for expert in experts)
        changed[projection] = [
            set((e != whole).any(other_dim).nonzero().flatten().tolist()) for e in experts
        ]
        # A channel is drawn anew whole.
        assert all(
            (e != whole).any(other_dim).sum() == (e != whole).all(other_dim).sum() for e in experts
        )
    assert changed["gate"] == changed["up"] == changed["down"]
    assert [len(channels) for channels in changed["gate"]] == [12] * 4  # of 48
    assert len({frozenset(channels) for channels in changed["gate"]}) == 4
    layers = [experts_of(target, "gate", layer)[0] for layer in (0, 1)]
    assert not torch.equal(*layers)


def test_what_is_drawn_has_the_statistics_of_what_it_replaces() -> None:
    weight = 0.3 + 2 * torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    weight[:256] *= 3  # channels are not alike
    variation = Variation(reinitialize=0.5)
    channels = variation.channels(512, 0, 0)
    varied = variation.apply(weight, "gate", 0, 0)
    assert len(channels) == len(channels.unique()) == 256
    before = weight[channels]
    after = varied[channels]
    assert after.mean().item() == pytest.approx(before.mean().item(), abs=0.1)
    assert after.std().item() == pytest.approx(before.std().item(), rel=0.03)
    # As they are not kept in place, nothing of the old ones is left.
    assert torch.corrcoef(torch.stack([before.flatten(), after.flatten()]))[0, 1].abs() < 0.05
    down = variation.apply(weight.T.contiguous(), "down", 0, 0)
    kept = torch.ones(512, dtype=torch.bool)
    kept[channels] = False
    assert torch.equal(down[:, kept], weight.T[:, kept])
    # Drawn for each projection by itself.
    assert not torch.equal(down[:, channels], varied.T[:, channels])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_noise_is_relative_to_the_weights(dtype: torch.dtype) -> None:
    weight = (5 * torch.randn(256, 256, generator=torch.Generator().manual_seed(0))).to(dtype)
    kept = weight.clone()
    varied = Variation(noise=0.1).apply(weight, "up", 0, 0)
    assert torch.equal(weight, kept)
    assert varied.dtype == dtype
    assert (varied.float() - weight.float()).std().item() == pytest.approx(0.5, rel=0.05)
    assert not torch.equal(varied, Variation(noise=0.1).apply(weight, "up", 0, 1))


@pytest.mark.parametrize(
    "options", [{}, {"noise": 0.01}, {"reinitialize": 0.5, "noise": 0.01}], ids=str
)
def test_a_seed_is_one_mixture(tmp_path: Path, options: dict[str, float]) -> None:
    source = save_dense(tmp_path / "dense", "granite", torch.bfloat16)
    results = [
        stored(hfscale.upcycle(source, tmp_path / str(index), num_experts=4, seed=seed, **options))
        for index, seed in enumerate((3, 3, 4))
    ]
    router = "model.layers.0.block_sparse_moe.router.layer.weight"
    experts = "model.layers.0.block_sparse_moe.input_linear.weight"
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())
    assert not torch.equal(results[0][router], results[2][router])
    assert torch.equal(results[0][experts], results[2][experts]) == (not options)
    assert results[0][router].float().std().item() == pytest.approx(0.02, rel=0.3)


def test_random_numbers_of_the_caller_are_left_alone(tmp_path: Path) -> None:
    source = save_dense(tmp_path / "dense")
    state = torch.get_rng_state()
    hfscale.upcycle(source, tmp_path / "mixture", reinitialize=0.5, noise=0.1)
    assert torch.equal(torch.get_rng_state(), state)


def test_every_tensor_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_dense(tmp_path / "dense", max_shard_size="20KB")
    read: list[int] = []
    original = TensorOnDisk.read

    def count(self: TensorOnDisk, spans: Any) -> torch.Tensor:
        read.append(id(self))
        return original(self, spans)

    monkeypatch.setattr(TensorOnDisk, "read", count)
    opened = open_whole(source)
    # hfscale.upcycle is the function.
    call = importlib.import_module("hfscale.extras.upcycle.upcycle")
    monkeypatch.setattr(call, "open_whole", lambda _: opened)
    hfscale.upcycle(source, tmp_path / "mixture", noise=0.1)
    assert len(read) == len(set(read)) == len(opened.tensors)


@pytest.mark.parametrize(
    ("options", "copies"), [({}, 2), ({"noise": 0.1, "reinitialize": 0.5}, 4)], ids=["", "varied"]
)
def test_a_few_tensors_are_in_memory_at_a_time(
    tmp_path: Path, options: dict[str, float], copies: int
) -> None:
    source = save_dense(tmp_path / "dense", hidden_size=64, intermediate_size=256)
    with follow_memory() as memory:
        hfscale.upcycle(source, tmp_path / "mixture", num_experts=16, **options)
    one = 64 * 256 * 4
    # And a small one beside it; the mixture has 144 such projections.
    assert memory.peak < copies * one + 64 * 67 * 4
    assert (tmp_path / "mixture" / "model.safetensors").stat().st_size > 144 * one
