"""Tensors and files of a checkpoint that the stock class does not load reach the next checkpoint unchanged."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ParallelConfig
from hfscale.cli import main
from hfscale.testing import RankPool
from hfscale.testing.parity import stored

from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
DRAFTER = {
    "mtp.fc.weight": (4, 6),
    "mtp.layers.0.mlp.experts.0.up_proj.weight": (3, 2),
    "mtp.norm.weight": (5,),
}
FILES = {
    "tokenizer.json": "{}",
    "chat_template.jinja": "hello",
    "spiece.model": "1",
    "tokenization_mine.py": "A = 1",
}


def checkpoint(directory: Path, family: str = "llama") -> dict[str, torch.Tensor]:
    """A checkpoint with a drafter in bfloat16 in a file of its own, and files that are no weights."""
    AutoModelForCausalLM.from_config(tiny(family)).save_pretrained(directory)
    drafter = {name: torch.randn(shape).bfloat16() for name, shape in DRAFTER.items()}
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    save_file(drafter, directory / "model-00002-of-00002.safetensors", {"format": "pt"})
    names = {file.name: load_file(file) for file in directory.glob("*.safetensors")}
    index = {
        "metadata": {},
        "weight_map": {key: file for file, tensors in names.items() for key in tensors},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, text in FILES.items():
        (directory / name).write_text(text)
    return drafter


def again(source: str, target: str, layout: ParallelConfig) -> None:
    model = hfscale.from_pretrained(source, parallel=layout, dtype=torch.float32)
    hfscale.save_pretrained(model, target)


@pytest.mark.parametrize(
    "layout", [{}, {"tp_size": 2}, {"pp_size": 2}, {"dp_shard_size": 2}], ids=str
)
def test_nothing_of_a_checkpoint_is_lost(
    pools: Pools, tmp_path: Path, layout: dict[str, int]
) -> None:
    source = tmp_path / "in"
    target = tmp_path / "out"
    parallel = ParallelConfig(**layout)
    drafter = checkpoint(source)
    target.mkdir()
    (target / "chat_template.jinja").write_text("my own")
    args = (str(source), str(target), parallel)
    again(*args) if parallel.total_size == 1 else pools(parallel.total_size).run(again, *args)
    before = stored(source)
    after = stored(target)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
        assert name not in drafter or after[name].dtype == torch.bfloat16
    assert {name: (target / name).read_text() for name in FILES} == {
        **FILES,
        "chat_template.jinja": "my own",
    }
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"].keys()
    assert index == before.keys()


def streamed(source: str, layout: ParallelConfig) -> dict[str, torch.Tensor]:
    model = hfscale.from_pretrained(source, parallel=layout, dtype=torch.float32)
    return {name: tensor.clone() for name, tensor in hfscale.stream_weights(model, ranks=(1,))}


def test_an_engine_gets_it_too(pools: Pools, tmp_path: Path) -> None:
    drafter = checkpoint(tmp_path / "in")
    nothing, found = pools(2).run(streamed, str(tmp_path / "in"), ParallelConfig(tp_size=2))
    assert not nothing
    assert found.keys() == stored(tmp_path / "in").keys()
    assert list(found)[-len(drafter) :] == sorted(drafter)
    assert all(torch.equal(found[name], tensor) for name, tensor in drafter.items())


def states(source: str, target: str, layout: ParallelConfig) -> None:
    hfscale.save_state(
        hfscale.from_pretrained(source, parallel=layout, dtype=torch.float32), target
    )


def test_a_state_remembers_where_it_is(pools: Pools, tmp_path: Path) -> None:
    source = tmp_path / "in"
    out = tmp_path / "out"
    checkpoint(source)
    pools(2).run(states, str(source), str(tmp_path / "state"), ParallelConfig(tp_size=2))
    assert main(["convert", str(tmp_path / "state"), str(out)]) == 0
    before = stored(source)
    after = stored(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert {name: (out / name).read_text() for name in FILES} == FILES


def test_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint(tmp_path / "in")
    model = hfscale.from_pretrained(str(tmp_path / "in"), dtype=torch.float32)
    caplog.clear()
    with caplog.at_level(logging.INFO, "hfscale"):
        hfscale.save_pretrained(model, tmp_path / "in")  # over the source, twice
        hfscale.save_pretrained(model, tmp_path / "in", max_shard_size="20KB")
        said = [record.getMessage().partition(" are copied")[0] for record in caplog.records]
        assert said == 2 * ["3 tensors that LlamaForCausalLM does not load"]
        caplog.clear()
        for file in (tmp_path / "in").glob("*.safetensors"):
            file.unlink()
        hfscale.save_pretrained(model, tmp_path / "out")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "no longer has them" in record.getMessage()
    assert not DRAFTER.keys() & stored(tmp_path / "out").keys()


def test_another_class_takes_nothing_along(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    checkpoint(tmp_path / "in")
    options = {"auto_class": AutoModelForSequenceClassification, "pad_token_id": 0}
    model = hfscale.from_pretrained(str(tmp_path / "in"), dtype=torch.float32, **options)
    hfscale.save_pretrained(model, tmp_path / "out")
    found = stored(tmp_path / "out")
    assert "score.weight" in found
    assert not {"lm_head.weight", *DRAFTER} & found.keys()
