"""A teacher whose most probable tokens are stored, and read: in any layout, equal to the divergence in one process."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file
from torch import Tensor

import hfscale
from hfscale import ParallelConfig
from hfscale.models.precision import keep_float64
from hfscale.testing import RankError, RankPool, assert_layout_equal
from hfscale.testing.parity import Batch
from hfscale.train.teacher import _texts

from ..distributed.ops.test_divergence import bucketed
from ..refusals import refusal_of
from ..tiny_models import tiny
from .test_distillation import CP2, DP2, PP2, TP2, WIDER, Distilled, Layout

Pools = Callable[[int], RankPool]
SIZE = 67  # of the vocabulary


@dataclass
class Stored(Distilled):
    """A student of what is stored of the teacher, ``top_k`` tokens of each position."""

    directory: str = ""
    top_k: int = SIZE

    def divergence(self, logits: Tensor, taught: Tensor) -> Tensor:
        return bucketed(logits, taught, self.beta, self.temperature, self.top_k)

    def layout_step(self, model: Any, microbatches: list[Batch]) -> Tensor:
        if not hasattr(model, "taught"):
            object.__setattr__(
                model, "taught", hfscale.Teacher.stored(self.directory, model, beta=self.beta)
            )
        return hfscale.train_step(model, microbatches, teacher=model.taught)


def case(directory: Path, **changes: Any) -> Stored:
    config = tiny("llama", num_hidden_layers=4, tie_word_embeddings=False)
    given = {
        "rows": 4,
        "accumulation": 4,
        "temperature": 1.5,
        "directory": str(directory),
        **changes,
    }
    return Stored(config, **given)


def write(layout: Layout, given: list[Batch], directory: Path, top_k: int) -> list[str]:
    teacher = hfscale.from_config(
        WIDER, parallel=ParallelConfig(**layout), dtype=torch.float64, seed=5
    ).train()
    with keep_float64():
        hfscale.Teacher.write(
            teacher, given, directory, top_k=top_k, temperature=1.5, batches_per_shard=3
        )
    assert teacher.training
    return sorted(path.name for path in directory.iterdir())


def batches(case: Stored, world: int) -> list[Batch]:
    """All that the case's steps have, in another order."""
    return [batch for step in case.batches(world) for rank in step for batch in rank][::-1]


@pytest.mark.daily("{'cp_size': 2}-{'dp_shard_size': 2}-5", "{'tp_size': 2}-{'tp_size': 2}-67")
@pytest.mark.parametrize(
    ("writer", "layout", "top_k"),
    [
        (PP2, TP2, 5),
        (CP2, DP2, 5),
        *(
            pytest.param(writer, layout, 5, marks=pytest.mark.slow)
            for writer, layout in ((TP2, PP2), (DP2, CP2))
        ),
        (TP2, TP2, SIZE),
        ({}, TP2, SIZE - 1),
    ],
    ids=str,
)
def test_two_ranks(
    pools: Pools, tmp_path: Path, writer: Layout, layout: Layout, top_k: int
) -> None:
    beta = {"tp_size": 0.5, "dp_shard_size": 0.0, "cp_size": 1.0, "pp_size": 0.1}[
        next(iter(layout))
    ]
    given = case(tmp_path / "stored", top_k=top_k, beta=beta)
    parallel = ParallelConfig(**layout)
    pools(2 if writer else 1).run(
        write, writer, batches(given, parallel.batch_world), tmp_path / "stored", top_k
    )
    assert_layout_equal(given, parallel, pools(2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("writer", "layout"),
    [
        ({"tp_size": 2, "dp_shard_size": 2}, {"pp_size": 2, "tp_size": 2}),
        ({"pp_size": 2, "dp_shard_size": 2}, {"cp_size": 2, "tp_size": 2}),
        ({"cp_size": 2, "dp_replicate_size": 2}, {"pp_size": 2, "dp_shard_size": 2}),
    ],
    ids=str,
)
def test_products(pools: Pools, tmp_path: Path, writer: Layout, layout: Layout) -> None:
    given = case(tmp_path / "stored", top_k=9)
    parallel = ParallelConfig(**layout)
    pools(4).run(write, writer, batches(given, parallel.batch_world), tmp_path / "stored", 9)
    assert_layout_equal(given, parallel, pools(4))


def refusals(directory: Path, given: list[Batch]) -> list[str]:
    """What two data ranks are told, of which one has a text that is not stored."""
    student = hfscale.from_config(
        tiny("llama"), parallel=ParallelConfig(**DP2), dtype=torch.float64
    )
    teacher, rank = hfscale.Teacher.stored(directory, student), hfscale.batch_rank(student)
    other = {**given[7], "input_ids": given[7]["input_ids"].flip(1)}
    return [
        refusal_of(
            lambda: hfscale.train_step(
                student, [given[6], other if rank else given[7]], teacher=teacher
            )
        ),
        refusal_of(
            lambda: hfscale.train_step(student, {"input_ids": other["input_ids"]}, teacher=teacher)
        ),
    ]


def test_every_rank_hears_of_a_batch_that_cannot_be_read(pools: Pools, tmp_path: Path) -> None:
    """The first rank alone reads the texts before the others begin."""
    with pytest.raises(RankError) as caught:
        pools(2).run(
            write,
            TP2,
            [{"input_ids": torch.zeros(2, 5, dtype=torch.long), "labels": [3]}],
            tmp_path,
            4,
        )
    assert str(caught.value).count("cannot be written: rank 0: AttributeError") >= 2


def test_it_goes_on_where_it_stopped_and_refuses_others(pools: Pools, tmp_path: Path) -> None:
    stored = case(tmp_path / "stored")
    given = batches(stored, 2)[:8]
    directory = tmp_path / "stored"
    names = write({}, given, directory, 4)
    assert names == ["00000.safetensors", "00001.safetensors", "00002.safetensors", "teacher.json"]
    kept = {name: (directory / name).read_bytes() for name in names}
    (directory / names[1]).unlink()
    student = hfscale.from_config(tiny("llama"), dtype=torch.float64)
    assert "lacks 1 of 3 shards" in refusal_of(lambda: hfscale.Teacher.stored(directory, student))
    times = {name: (directory / name).stat().st_mtime_ns for name in (names[0], names[2])}
    for told in pools(2).run(write, TP2, given, directory, 4):
        assert told == names
    assert all((directory / name).stat().st_mtime_ns == time for name, time in times.items())
    for name, tensor in load_file(directory / names[1]).items():
        torch.testing.assert_close(tensor, load(kept[names[1]])[name], rtol=1e-12, atol=1e-13)
    assert "holds another teacher (top_k=4)" in refusal_of(lambda: write({}, given, directory, 5))
    assert "holds another teacher (texts=" in refusal_of(
        lambda: write({}, given[::-1], directory, 4)
    )
    assert "more than the vocabulary of 67" in refusal_of(lambda: write({}, given, directory, 68))
    first, second = pools(2).run(refusals, directory, given)
    assert first[0].startswith("another rank has a text that is not stored: store these")
    assert second[0].startswith("4 text(s) of the step are not among those")
    assert "finds texts by input_ids, labels" in first[1]
    smaller = hfscale.from_config(tiny("llama", vocab_size=60))
    assert "67 tokens and the student one of 60" in refusal_of(
        lambda: hfscale.Teacher.stored(directory, smaller)
    )
    assert "has no teacher.json" in refusal_of(
        lambda: hfscale.Teacher.stored(tmp_path / "none", student)
    )
    about = json.loads((directory / "teacher.json").read_text())
    assert (about["top_k"], about["temperature"], about["vocabulary"]) == (4, 1.5, SIZE)
    padded = {
        **given[0],
        "attention_mask": torch.ones_like(given[0]["input_ids"]).index_fill(1, torch.tensor(0), 0),
    }
    padded["labels"] = given[0]["input_ids"]
    assert "cannot predict a token that follows padding" in refusal_of(
        lambda: write({}, [padded], tmp_path / "left", 4)
    )


def test_what_predicts_a_label_on_padding_is_stored() -> None:
    ids = torch.tensor([[5, 6, 7, 9, 9], [5, 6, 9, 9, 9]])  # 9 ends a text and pads it
    labels = torch.tensor([[-100, 6, 7, 9, -100], [-100] * 5])
    batch = {"input_ids": ids, "labels": labels, "attention_mask": (ids != 9).long()}
    assert [(row, places.tolist()) for row, _, places in _texts(batch)] == [(0, [0, 1, 2])]
