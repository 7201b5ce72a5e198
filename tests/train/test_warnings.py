"""What stock code does in silence, and is hardly meant, is told once."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import hfscale
from hfscale import ParallelConfig
from hfscale.testing import RankPool
from hfscale.train.packed_rows import facts
from hfscale.train.runtime import batches

from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
Batch = dict[str, Tensor]
IDS = torch.arange(12).view(2, 6) + 3
TELLING: tuple[Any, ...] = (batches, facts)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    for module in TELLING:
        module._tell_once.cache_clear()
    yield
    for module in TELLING:
        module._tell_once.cache_clear()


def given(mask: Any = None, labels: Tensor = IDS, **more: Tensor) -> Batch:
    batch = {"input_ids": IDS, "labels": labels, **more}
    return batch if mask is None else {**batch, "attention_mask": torch.tensor(mask)}


COUNTED = [[1, 1, 1, 2, 2, 0], [1, 1, 2, 2, 3, 3]]
PADDED = [[1, 1, 1, 1, 0, 0], [1] * 6]
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2]]).expand(2, -1)


@pytest.mark.parametrize("way", ["train_step", "eval_step", "plain"])
@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (given(COUNTED), "numbered the documents"),
        (given(COUNTED, position_ids=POSITIONS), ""),
        (given(PADDED), ""),
        (given(), ""),
        (given(torch.tensor(PADDED, dtype=torch.bool).tolist()), ""),
        (given(labels=torch.full_like(IDS, -100)), "no label of this step counts"),
    ],
)
def test_told_once(batch: Batch, words: str, way: str, caplog: pytest.LogCaptureFixture) -> None:
    model = hfscale.from_config(tiny("llama"))
    ways = {"train_step": hfscale.train_step, "eval_step": hfscale.eval_step}
    for _ in range(2):
        ways[way](model, batch) if way in ways else model(**batch)
    told = [each for each in caplog.messages if "documents" in each or "counts" in each]
    if way == "plain" and "label" in words:
        words = ""  # its loss is NaN, which says it
    assert len(told) == bool(words)
    assert words in "".join(told)


def told_on(layout: dict[str, int], batches_of_ranks: list[Batch]) -> list[str]:
    logged: list[str] = []
    model = hfscale.from_config(tiny("llama"), parallel=ParallelConfig(**layout))
    kept = [module._tell_once for module in TELLING]
    for module in TELLING:
        module._tell_once = logged.append
    try:
        hfscale.train_step(model, batches_of_ranks[hfscale.batch_rank(model)])
    finally:
        for module, tell in zip(TELLING, kept, strict=True):
            module._tell_once = tell
    return logged


def test_told_by_one_rank(pools: Pools) -> None:
    unlabelled = given(labels=torch.full_like(IDS, -100))
    first, second = pools(2).run(told_on, {"tp_size": 2}, [given(COUNTED)])
    assert (len(first), len(second)) == (1, 0)
    first, second = pools(2).run(told_on, {"dp_replicate_size": 2}, [given(), given(COUNTED)])
    assert (len(first), len(second)) == (0, 1)
    first, second = pools(2).run(told_on, {"dp_shard_size": 2}, [unlabelled, unlabelled])
    assert (len(first), len(second)) == (1, 0)
    assert pools(2).run(told_on, {"dp_shard_size": 2}, [unlabelled, given()]) == [[], []]
