"""Changes to a model that its plan does not know of are refused when they are made, on every rank."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale.testing import RankPool

from ...tiny_models import tiny

Pools = Callable[[int], RankPool]


def change(layout: dict[str, int]) -> list[str]:
    model = hfscale.from_config(tiny("llama"), parallel=ParallelConfig(**layout))
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    assert model.resize_token_embeddings(67) is model.get_input_embeddings()
    said = []
    for call in (
        lambda: model.resize_token_embeddings(72),
        lambda: copy.deepcopy(model),
        lambda: AveragedModel(model),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        said.append(str(caught.value))
    ids = torch.arange(12).repeat(2, 1)
    # It goes on as if nothing had been asked.
    hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    return said


@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"dp_shard_size": 2}])
def test_of_several_ranks(pools: Pools, layout: dict[str, int]) -> None:
    for resize, deepcopy, averaged in pools(2).run(change, layout):
        assert "resize_token_embeddings(72) cannot be called on this" in resize
        assert (
            "hfscale.from_pretrained(directory, parallel=..., resize_token_embeddings=72)" in resize
        )
        assert "build a second model with hfscale.from_pretrained" in deepcopy
        assert averaged == deepcopy


def pickled(layout: dict[str, int]) -> list[str]:
    model = hfscale.from_config(tiny("llama"), parallel=ParallelConfig(**layout))
    accelerator = hfscale.Accelerator()
    accelerator.prepare(model)
    said = []
    for call in (
        lambda: pickle.dumps(model),
        lambda: pickle.dumps({"of a script": accelerator}),
        lambda: torch.save(model, io.BytesIO()),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"dp_shard_size": 2}])
def test_it_is_not_pickled(pools: Pools, layout: dict[str, int]) -> None:
    for said in pools(2).run(pickled, layout):
        assert len(said) == 3
        assert all("write it by hfscale.save_pretrained" in each for each in said)


def test_one_process_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model = hfscale.from_config(tiny("llama"))
    ids = torch.arange(12).repeat(2, 1)
    with pytest.raises(
        ConfigError,
        match=r"resize_token_embeddings\(72\) cannot be called on this LlamaForCausalLM",
    ):
        model.resize_token_embeddings(72)
    losses: list[Any] = []
    for one in (model, copy.deepcopy(model)):
        losses.append(hfscale.train_step(one, {"input_ids": ids, "labels": ids}))
    assert torch.equal(*losses)
    assert all(p.grad is not None for p in model.parameters())
