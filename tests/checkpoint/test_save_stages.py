"""Checkpoints out of pipeline stages: whole, in any number of files, and good for every layout (traps T9, T24)."""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ParallelConfig
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of

from ..tensor_memory import follow_memory
from .test_stages import FAMILIES_CUT, LAYOUTS, Layout, experts, four_layers

Pools = Callable[[int], RankPool]


def files(directory: Path) -> dict[str, Tensor]:
    """Everything that the files of a checkpoint hold; no name twice."""
    found: dict[str, Tensor] = {}
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        assert not tensors.keys() & found.keys()
        found.update(tensors)
    return found


def stock_model(family: str, tied: bool) -> Any:
    """Norms, biases and the buffers of routers are not all ones and zeros."""
    config = experts(family) if family == "deepseek_v3" else four_layers(family, tied)
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for tensor in stock.parameters():
            if tensor.ndim == 1:
                tensor.copy_(torch.rand(tensor.shape))
    for module in stock.modules():
        if hasattr(module, "e_score_correction_bias"):  # which the host keeps in float32
            module.e_score_correction_bias = torch.rand(module.e_score_correction_bias.shape)
    return stock


def load_and_save(source: str, target: str, layout: Layout) -> None:
    model = hfscale.from_pretrained(source, parallel=ParallelConfig(**layout))
    hfscale.save_pretrained(model, target, max_shard_size="12KB")


@pytest.mark.daily("deepseek_v3-False-zbv", "gpt2-True-pp2-shard2")
@pytest.mark.parametrize(("family", "tied", "layout"), FAMILIES_CUT)
def test_round_trip_is_bit_exact(
    pools: Pools, tmp_path: Path, family: str, tied: bool, layout: str
) -> None:
    parallel = LAYOUTS[layout]
    if family == "deepseek_v3" and "tp_size" in parallel:
        pytest.skip("no blueprint")
    stock = stock_model(family, tied)
    stock.save_pretrained(tmp_path / "in")
    pool = pools(ParallelConfig(**parallel).total_size)
    pool.run(load_and_save, str(tmp_path / "in"), str(tmp_path / "out"), parallel)
    expected = files(tmp_path / "in")
    found = files(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())[
        "weight_map"
    ].keys() == (found.keys())
    assert found.keys() == expected.keys()
    assert ("lm_head.weight" in found) != tied
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert found[name].dtype == value.dtype, name
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16
    ).state_dict()
    for name, value in stock.state_dict().items():
        assert torch.equal(plain[name], value), name
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / file).read_text()) == json.loads(
            (tmp_path / "in" / file).read_text()
        )


@pytest.mark.slow
def test_from_stages_to_tensor_ranks_to_one_process(pools: Pools, tmp_path: Path) -> None:
    stock_model("gpt2", True).save_pretrained(tmp_path / "0")
    steps: list[Layout] = [
        LAYOUTS["interleaved"],
        {"tp_size": 2},
        {"pp_size": 4},
        LAYOUTS["pp2-tp2"],
    ]
    steps += [{"pp_size": 2, "dp_replicate_size": 2}, {"dp_shard_size": 2}, {}]
    for step, layout in enumerate(steps):
        source = str(tmp_path / str(step))
        target = str(tmp_path / str(step + 1))
        if layout:
            pools(ParallelConfig(**layout).total_size).run(load_and_save, source, target, layout)
        else:
            load_and_save(source, target, layout)
    expected = files(tmp_path / "0")
    found = files(tmp_path / str(len(steps)))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def save_in_place(source: str, target: str, layout: Layout) -> None:
    whole = AutoModelForCausalLM.from_pretrained(source)
    hfscale.save_pretrained(hfscale.parallelize(whole, ParallelConfig(**layout)), target)


@pytest.mark.parametrize("family", ["gpt2", "deepseek_v3"])
def test_a_model_that_was_in_memory(pools: Pools, tmp_path: Path, family: str) -> None:
    stock_model(family, family == "gpt2").save_pretrained(tmp_path / "in")
    pools(2).run(save_in_place, str(tmp_path / "in"), str(tmp_path / "out"), LAYOUTS["pp2"])
    expected = files(tmp_path / "in")
    found = files(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def trained(layout: Layout, out: str) -> dict[str, Tensor]:
    """A tied model after a step of AdamW, saved; what this rank has under each of the tied tensor's names."""
    model = hfscale.from_config(
        four_layers("gpt2", tied=True), parallel=ParallelConfig(**layout), dtype=torch.float32
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ids = torch.randint(0, 67, (4, 9), generator=torch.Generator().manual_seed(1))
    hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    optimizer.step()
    hfscale.save_pretrained(model, out)
    found = dict(model.named_parameters(remove_duplicate=False))
    return {
        name: found[name].detach()
        for name in ("transformer.wte.weight", "lm_head.weight")
        if name in found
    }


def test_a_tied_tensor_is_saved_once_and_is_every_stages(pools: Pools, tmp_path: Path) -> None:
    first, last = pools(2).run(trained, LAYOUTS["pp2"], str(tmp_path))
    stored = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in stored
    assert (list(first), list(last)) == (["transformer.wte.weight"], ["lm_head.weight"])
    assert torch.equal(stored["transformer.wte.weight"], first["transformer.wte.weight"])
    assert torch.equal(stored["transformer.wte.weight"], last["lm_head.weight"])


def saved(source: str, target: str, layout: Layout) -> tuple[dict[str, int], int]:
    model = hfscale.from_pretrained(source, parallel=ParallelConfig(**layout))
    gc.collect()
    with follow_memory() as memory:
        hfscale.save_pretrained(model, target)
    return runtime_of(model).mesh.ranks, memory.peak


@pytest.mark.daily("pp2-tp2")
@pytest.mark.parametrize("layout", ["pp2", "pp2-tp2", "pp2-shard2"])
def test_no_rank_holds_more_than_one_whole_tensor(
    pools: Pools, tmp_path: Path, layout: str
) -> None:
    """Rank 0 holds one, and one share of it; the others send views of what they have."""
    stock = AutoModelForCausalLM.from_config(four_layers("llama", tied=False), dtype=torch.float32)
    stock.save_pretrained(tmp_path / "in")
    largest = max(p.numel() * 4 for p in stock.parameters())
    pool = pools(ParallelConfig(**LAYOUTS[layout]).total_size)
    for ranks, peak in pool.run(
        saved, str(tmp_path / "in"), str(tmp_path / "out"), LAYOUTS[layout]
    ):
        small = 16384  # what ranks tell each other about tensors
        assert peak <= (small if any(ranks.values()) else 2 * largest + small)
