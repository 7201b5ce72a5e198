"""Checkpoints of ``pytorch_model.bin``, whole or in parts: the bits of safetensors, and each rank's slices alone."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

import hfscale
from hfscale import CheckpointError, ParallelConfig
from hfscale.distributed.files.weight_files import open_tensors
from hfscale.testing import RankPool

from ..mixtures import qwen3_moe
from ..tiny_models import tiny

Pools = Callable[[int], RankPool]

CONFIGS: dict[str, Any] = {
    "llama": tiny("llama", tie_word_embeddings=False),
    "tied": tiny("llama", tie_word_embeddings=True),
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=67, n_positions=32),
    "experts": qwen3_moe(),
}


def write(directory: Path, config: Any, parts: int) -> None:
    """Write a model as older repositories hold it, and beside it as safetensors."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory / "safe")
    old = directory / "old"
    old.mkdir()
    model.config.save_pretrained(old)
    state = {name: tensor.detach() for name, tensor in _stored(directory / "safe").items()}
    if config.tie_word_embeddings:
        name = next(name for name in state if name.endswith(("embed_tokens.weight", "wte.weight")))
        state["lm_head.weight"] = state[name]
    names = sorted(state)
    if parts == 1:
        torch.save(state, old / "pytorch_model.bin")
        return
    files = {
        name: f"pytorch_model-{1 + i % parts:05}-of-{parts:05}.bin" for i, name in enumerate(names)
    }
    for file in set(files.values()):
        torch.save({name: state[name] for name in names if files[name] == file}, old / file)
    index = {"metadata": {}, "weight_map": files}
    (old / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def _stored(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor[...]
        for name, tensor in open_tensors(sorted(directory.glob("*.safetensors"))).items()
    }


def loaded(directory: str, layout: dict[str, int]) -> tuple[dict[str, torch.Tensor], int]:
    """The full weights, on the first rank, and the bytes that this rank has read."""
    count = 0
    stock = os.preadv

    def preadv(*args: Any) -> int:
        nonlocal count
        done = stock(*args)
        count += done
        return done

    with mock.patch.object(os, "preadv", preadv):
        model = hfscale.from_pretrained(directory, parallel=ParallelConfig(**layout))
    return dict(hfscale.stream_weights(model)), count


@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"pp_size": 2}, {"dp_shard_size": 2}], ids=str)
@pytest.mark.parametrize(
    ("family", "parts"), [("llama", 2), ("tied", 1), ("gpt2", 1), ("experts", 3)]
)
def test_bits_and_bytes_are_those_of_safetensors(
    pools: Pools, tmp_path: Path, family: str, parts: int, layout: dict[str, int]
) -> None:
    write(tmp_path, CONFIGS[family], parts)
    wanted = pools(2).run(loaded, str(tmp_path / "safe"), layout)
    found = pools(2).run(loaded, str(tmp_path / "old"), layout)
    assert wanted[0][0].keys() == found[0][0].keys()
    for name, tensor in wanted[0][0].items():
        assert torch.equal(found[0][0][name], tensor), name
    head = CONFIGS[family].vocab_size * 32 * 4
    again = 2 * head if CONFIGS[family].tie_word_embeddings else 0  # such a file has it twice
    for (_, few), (_, count) in zip(wanted, found, strict=True):
        assert few <= count <= few + again


def test_one_process_and_any_stride(tmp_path: Path) -> None:
    x = torch.arange(24.0, dtype=torch.float64).view(4, 6)
    state = {
        "t": x.t(),
        "part": x[1:, ::2],
        "narrow": torch.ones(3, dtype=torch.bfloat16),
        "one": x[0, 0],
    }
    torch.save({**state, "step": 3}, tmp_path / "pytorch_model.bin")
    found = open_tensors([tmp_path / "pytorch_model.bin"])
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(found[name][...], tensor)
        assert found[name].dtype == tensor.dtype
    assert torch.equal(found["t"].read(((1, 3), (0, 2))), x.t()[1:3, :2])
    assert torch.equal(found["part"].read(((1, 3), (1, 2))), x[1:, ::2][1:3, 1:2])


class Secret:
    """A type that is not made."""


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("old format", "since 1.6"),
        ("cut short", "must hold tensors"),
        ("type", "Secret"),
        ("list", "list"),
    ],
)
def test_files_that_are_not_read(tmp_path: Path, kind: str, said: str) -> None:
    path = tmp_path / "pytorch_model.bin"
    content: Any = {"w": torch.ones(4, 4)}
    content = {"type": {"w": Secret()}, "list": [torch.ones(2)]}.get(kind, content)
    torch.save(content, path, _use_new_zipfile_serialization=kind != "old format")
    if kind == "cut short":
        path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match=said) as refused:
        open_tensors([path])
    assert "convert it once" in str(refused.value)


def test_a_train_step_from_an_old_checkpoint_and_a_save(tmp_path: Path) -> None:
    write(tmp_path, CONFIGS["llama"], 2)
    model = hfscale.from_pretrained(str(tmp_path / "old")).train()
    ids = torch.arange(3, 15).view(2, 6)
    hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    hfscale.save_pretrained(model, tmp_path / "old")  # its files are replaced
    assert not list((tmp_path / "old").glob("*.bin*"))
    again = _stored(tmp_path / "old")
    for name, tensor in _stored(tmp_path / "safe").items():
        assert torch.equal(again[name], tensor)
