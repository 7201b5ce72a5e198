"""What a step reads of its batches, and what ranks that share one find out about them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale._compat.transformers.packed_rows import within_packing
from hfscale.testing import RankPool
from hfscale.train.runtime.batches import Counts, Microbatch, agree, look_at, to_device

from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
IDS = torch.arange(3, 27).view(2, 12)
SAME = {"input_ids": IDS, "labels": IDS}


def _other(what: str) -> Any:
    swapped = IDS.clone()
    swapped[0, 3:5] = swapped[0, 3:5].flip(0)
    return {
        "ids": {**SAME, "input_ids": swapped},
        "labels": {**SAME, "labels": torch.where(IDS == 5, -100, IDS)},
        "mask": {**SAME, "attention_mask": torch.ones_like(IDS)},
        "shape": {"input_ids": IDS[:, :7], "labels": IDS[:, :7]},
        "number": [SAME, SAME],
        "no labels": {"input_ids": IDS},
        "none": [],
        "outside": {**SAME, "labels": IDS + 1000},
    }[what]


def _mismatches(layout: dict[str, int], whats: list[str], odd: int) -> list[str]:
    model = hfscale.from_config(
        tiny("llama"), parallel=ParallelConfig(**layout, num_microbatches=2)
    ).train()
    found = []
    for what in whats:
        try:
            hfscale.train_step(model, _other(what) if dist.get_rank() == odd else SAME)
            found.append("")
        except ConfigError as error:
            found.append(str(error))
    assert hfscale.train_step(model, SAME).isfinite()  # and nothing is left behind
    return found


@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"pp_size": 2}, {"tp_size": 2, "pp_size": 2}])
def test_ranks_with_one_batch_notice_that_theirs_differ(
    pools: Pools, layout: dict[str, int]
) -> None:
    whats = ["ids", "labels", "mask", "shape", "number", "no labels"]
    world = ParallelConfig(**layout).total_size
    for rank, found in enumerate(pools(world).run(_mismatches, layout, whats, world - 1)):
        for what, error in zip(whats[:5], found, strict=False):
            # Cut into as many microbatches, of other rows.
            if what == "number" and "pp_size" in layout:
                assert "given different batches" in error
            assert "given different batches" in error, what
            assert "hfscale.batch_rank(model) pass the same batch" in error
        assert (
            "needs 'labels'" if rank == world - 1 else f"rank(s) {world - 1}, which share"
        ) in found[5]


@pytest.mark.parametrize(
    "layout", [{"dp_shard_size": 2}, {"tp_size": 2}, {"dp_shard_size": 2, "tp_size": 2}]
)
def test_what_one_rank_refuses_reaches_all(pools: Pools, layout: dict[str, int]) -> None:
    world = ParallelConfig(**layout).total_size
    found = pools(world).run(_mismatches, layout, ["none", "no labels", "outside"], world - 1)
    own = (
        "empty list",
        "needs 'labels'",
        "different batches" if "tp_size" in layout else "outside of the vocabulary",
    )
    assert all(words in error for words, error in zip(own, found[-1], strict=True))
    assert all(
        "refused" in error or "different batches" in error for each in found[:-1] for error in each
    )


def _plain_loop() -> str:
    model = hfscale.from_config(tiny("llama"), parallel=ParallelConfig(tp_size=2)).train()
    with pytest.raises(ConfigError) as caught:
        model(**(_other("ids") if dist.get_rank() else SAME))
    model(**(_other("ids") if dist.get_rank() else SAME))  # asked once only
    return str(caught.value)


def test_plain_loops_compare_their_first_batch(pools: Pools) -> None:
    assert all("given different batches" in error for error in pools(2).run(_plain_loop))


def known(batch: dict[str, Any], counts: Counts) -> Microbatch:
    microbatch = Microbatch(batch)
    microbatch.learn(counts)
    return microbatch


def test_a_look_at_several_microbatches() -> None:
    packed = {**SAME, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]] * 2)}
    unpacked = {**SAME, "position_ids": torch.arange(12)[None]}
    strange = {**SAME, "pixels": torch.ones(2, 3)}
    batches = [SAME, packed, unpacked, strange]
    seen = look_at(
        batches, lambda batch: (batch["labels"].sum(), batch["labels"].sum() * 0), hashed=False
    )
    rows, told = agree(batches, seen, True, None)
    assert [row[0] for row in rows] == [int(IDS.sum())] * 4
    assert not told[0]
    found = []
    for batch, row in zip(batches, rows, strict=True):
        microbatch = known(batch, row)
        with microbatch.kept_apart():
            found.append((microbatch.by_positions, within_packing.get()))
    # positions that a model makes of pixels are not known
    assert found == [(False, True), (True, True), (False, True), (False, False)]


def test_one_copy_takes_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As to a GPU; a CPU's bytes can be looked at."""
    copies: list[torch.Tensor] = []
    original = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.device("meta") in args:
            copies.append(self)
            return self
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    mask = torch.rand(2, 1, 12, 12) > 0.5
    batches = [
        {**SAME, "mask": mask},
        {"input_ids": IDS[:, ::2], "labels": IDS[:1], "number": torch.tensor(3.5)},
    ]
    moved = [known(batch, Counts(valid=1)) for batch in batches]
    to_device(moved, torch.device("meta"))
    assert len(copies) == 1
    for batch, there in zip(batches, moved, strict=True):
        assert batch.keys() == there.keys()
        assert all(torch.equal(batch[name], there[name]) for name in batch)
        assert all(there[name].dtype == batch[name].dtype for name in batch)
