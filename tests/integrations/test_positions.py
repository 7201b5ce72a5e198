"""A run that goes on in another layout sees every row once, in the order of the run that did not stop."""

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import accelerate
import datasets
import pytest
import torch
import transformers
from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler
from accelerate.state import AcceleratorState
from torch.utils.data import BatchSampler, DataLoader
from transformers.trainer_pt_utils import BatchRebalanceSampler

import hfscale
from hfscale import CheckpointError, ConfigError, ParallelConfig
from hfscale._compat.accelerate import _Position
from hfscale.testing import RankPool

from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
Seen = list[list[int]]  # rows of each step

ROWS = 4  # of a step
LEGS: list[tuple[dict[str, Any], range]] = [
    ({}, range(3)),
    ({"dp_shard_size": 2}, range(3, 5)),
    ({"tp_size": 2}, range(5, 8)),
]
TORCHDATA = importlib.util.find_spec("torchdata") is not None
needs_torchdata = pytest.mark.skipif(not TORCHDATA, reason="torchdata is not installed")


def model_in(layout: dict[str, Any]) -> Any:
    return hfscale.from_config(
        tiny("llama", vocab_size=67), parallel=ParallelConfig(**layout), seed=0
    )


def rows() -> Any:
    return datasets.Dataset.from_list(
        [{"row": row, "input_ids": [row % 67] * (3 + row % 5)} for row in range(50)]
    )


def stream() -> Any:
    return rows().to_iterable_dataset(num_shards=4)


def numbers(batch: Any) -> Any:
    return [each["row"] for each in batch]


class Counted:
    """A loader with a state, as torchdata's has it."""

    def __init__(self) -> None:
        self.done = 0

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(50, generator=torch.Generator().manual_seed(0)).tolist()
        while self.done < len(order):
            self.done += ROWS
            yield order[self.done - ROWS : self.done]

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def whole_steps(kind: str) -> tuple[Any, Iterator[list[int]]]:
    """What has a state, and the rows of whole steps, which every rank reads."""
    if kind == "counted":
        return (loader := Counted()), iter_of(loader)
    if kind == "datasets":
        return (data := stream()), _in_steps(data)
    with deprecations_aside():
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader = StatefulDataLoader(stream(), batch_size=ROWS, collate_fn=numbers)
    return loader, iter_of(loader)


def _in_steps(data: Any) -> Iterator[list[int]]:
    each = iter(data)
    while True:
        yield [next(each)["row"] for _ in range(ROWS)]


def iter_of(loader: Any) -> Iterator[list[int]]:
    """Begin when the first step is asked for, behind a load."""
    with deprecations_aside():
        yield from loader


@contextmanager
def deprecations_aside() -> Iterator[None]:
    """torchdata 0.11 with torch 2.13."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        yield


def leg(kind: str, layout: dict[str, Any], root: str, steps: range) -> Seen:
    model = model_in(layout)
    loader, batches = whole_steps(kind)
    if steps.start:
        assert hfscale.load_state(model, root, loader=loader).step == steps.start
    share = slice(hfscale.batch_rank(model), None, hfscale.batch_world(model))
    seen = [next(batches)[share] for _ in steps]
    hfscale.save_state(model, f"{root}/step-{steps.stop}", step=steps.stop, loader=loader)
    return seen


def over(pools: Pools, run: Callable[..., Seen], *given: Any) -> Seen:
    """The rows of each step, over the ranks with batches of their own, in the order of one process."""
    seen: Seen = []
    for layout, steps in LEGS:
        world = ParallelConfig(**layout).total_size
        every = pools(world).run(run, *given, layout, steps)
        own = every[:1] if ParallelConfig(**layout).batch_world == 1 else every
        seen += [
            sorted(row for rank in own for row in rank[number]) for number in range(len(steps))
        ]
    return seen


def run_leg(kind: str, root: str, layout: dict[str, Any], steps: range) -> Seen:
    return leg(kind, layout, root, steps)


@pytest.mark.daily("counted", "torchdata")
@pytest.mark.parametrize(
    "kind", ["counted", "datasets", pytest.param("torchdata", marks=needs_torchdata)]
)
def test_whole_steps_on_every_rank(pools: Pools, tmp_path: Path, kind: str) -> None:
    batches = whole_steps(kind)[1]
    expected = [sorted(next(batches)) for _ in range(8)]
    assert over(pools, run_leg, kind, str(tmp_path)) == expected


def prepared_leg(
    kind: str, root: str, rows_of_rank: int, layout: dict[str, Any], steps: range
) -> Seen:
    """``hfscale.Accelerator`` with a loader that has a state."""
    for state in (accelerate.state.AcceleratorState, accelerate.state.PartialState):
        state._reset_state()  # an accelerator of its own for each leg
    config = accelerate.DataLoaderConfiguration(
        use_stateful_dataloader=True, use_seedable_sampler=True
    )
    accelerator = hfscale.Accelerator(dataloader_config=config)
    model = model_in(layout)
    size = rows_of_rank or ROWS // hfscale.batch_world(model)
    data = stream() if kind == "stream" else rows()
    if kind.startswith("epochs"):  # of three steps, in another order each; the script sets no seed
        torch.manual_seed(steps.start)
        data = data.select(range(3 * ROWS))
        data = data.to_iterable_dataset(num_shards=4) if kind == "epochs-stream" else data
    loader = DataLoader(
        data,
        batch_size=size,
        shuffle=kind in ("shuffled", "epochs"),
        collate_fn=lambda b: torch.tensor(numbers(b)),
    )
    with deprecations_aside():
        model, loader = accelerator.prepare(model, loader)
        if steps.start:
            accelerator.load_state(f"{root}/step-{steps.start}")
        batches = chain.from_iterable(repeat(loader))
        seen = [next(batches).tolist() for _ in steps]
    accelerator.save_state(f"{root}/step-{steps.stop}")
    return seen


@pytest.mark.daily("epochs", "epochs-stream")
@needs_torchdata
@pytest.mark.parametrize("kind", ["shuffled", "stream", "epochs", "epochs-stream"])
def test_prepared_loaders(pools: Pools, tmp_path: Path, kind: str) -> None:
    expected = pools(1).run(prepared_leg, kind, str(tmp_path / "whole"), 0, {}, range(8))[0]
    assert over(pools, prepared_leg, kind, str(tmp_path / "parts"), 0) == [
        sorted(step) for step in expected
    ]
    if kind == "epochs":
        assert expected[:3] != expected[3:6]


def test_a_shuffle_without_a_seed() -> None:
    """Of which a state would not tell the order of an epoch."""
    AcceleratorState._reset_state(reset_partial_state=True)  # another test's precision
    accelerator = hfscale.Accelerator(cpu=True, mixed_precision="no")
    # Which needs torchdata in its constructor.
    accelerator.dataloader_config.use_stateful_dataloader = True
    accelerator.prepare(model_in({}))
    with pytest.raises(
        ConfigError, match="needs use_seedable_sampler=True and shuffle=True, got a RandomSampler"
    ):
        accelerator.prepare(DataLoader(list(range(8)), shuffle=True))


def test_the_order_of_an_epoch_goes_on() -> None:
    def loader(seed: int) -> Any:
        found = shard(BatchSampler(SeedableRandomSampler(range(12), data_seed=seed), ROWS, False))
        found.base_dataloader.load_state_dict, found.dl_state_dict = lambda _: None, {}
        return found

    first = loader(1)
    second = loader(2)
    epochs = [_Position(first, 1).state_dict()["hfscale_epoch"] for _ in (*first, *first)]
    assert epochs == [2] * 6
    epochs = [_Position(first, 1).state_dict()["hfscale_epoch"] for _ in first]
    assert epochs == [2, 2, 3]  # behind its last batch comes the next one
    _Position(second, 1).load_state_dict(_Position(first, 1).state_dict())
    assert [batch.tolist() for batch in second] == [batch.tolist() for batch in first]


def test_batches_of_any_rows() -> None:
    balanced = BatchRebalanceSampler([1] * 12, 8, 1, 2)
    kinds: list[tuple[Any, int | None]] = [(balanced, 8), ([[0, 1], [2]], None), (None, None)]
    for sampler, rows in kinds:
        found = shard(sampler)
        found.base_dataloader.load_state_dict, found.dl_state_dict = lambda _: None, {}
        position = _Position(found, 1)
        assert position.state_dict()["hfscale_rows"] == rows
        position.load_state_dict(position.state_dict())


def shard(sampler: Any) -> Any:
    """A loader as Accelerate prepares it."""
    return DataLoaderShard(
        range(12), batch_sampler=sampler, batch_size=None if sampler is None else 1
    )


def refused(root: str) -> None:
    with pytest.raises(CheckpointError, match=r"had 4 rows over all ranks .* but now have 8"):
        prepared_leg("shuffled", root, 4, {"dp_shard_size": 2}, range(3, 5))


@needs_torchdata
def test_batches_of_other_rows(pools: Pools, tmp_path: Path) -> None:
    pools(1).run(prepared_leg, "shuffled", str(tmp_path), 4, {}, range(3))
    pools(2).run(refused, str(tmp_path))


class Noting(hfscale.Trainer):
    seen: Seen

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
        self.seen.append(inputs["row"].tolist())
        del inputs["row"]
        return super().training_step(model, inputs, *args)


def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(
        [torch.as_tensor(each["input_ids"]) for each in batch], batch_first=True
    )
    return {"input_ids": ids, "labels": ids, "row": torch.tensor(numbers(batch))}


def trainer_leg(
    kind: str, root: str, rows_of_rank: int, layout: dict[str, Any], steps: range
) -> Seen:
    model = model_in(layout)
    size = rows_of_rank or ROWS // 2 // hfscale.batch_world(model)
    strategy = {"train_sampling_strategy": "group_by_length"} if kind == "lengths" else {}
    args = transformers.TrainingArguments(
        root, max_steps=steps.stop, per_device_train_batch_size=size, gradient_accumulation_steps=2, use_cpu=True,
        save_strategy="steps", save_steps=100, report_to=[], disable_tqdm=True, remove_unused_columns=False, **strategy,
    )  # fmt: skip
    data = stream() if kind == "stream" else list(rows())
    trainer = Noting(model=model, args=args, data_collator=collate, train_dataset=data)
    trainer.seen = []
    trainer.train(resume_from_checkpoint=True if steps.start else None)
    return [
        first + second for first, second in zip(trainer.seen[::2], trainer.seen[1::2], strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "lengths", "stream"])
def test_a_trainer(pools: Pools, tmp_path: Path, kind: str) -> None:
    expected = pools(1).run(trainer_leg, kind, str(tmp_path / "whole"), 0, {}, range(8))[0]
    assert over(pools, trainer_leg, kind, str(tmp_path / "parts"), 0) == [
        sorted(step) for step in expected
    ]


def warned(root: str) -> None:
    expected = pytest.warns(
        UserWarning, match="by steps of 4 rows over all ranks, but steps now have 8"
    )
    with expected if hfscale.batch_rank(model_in({"dp_shard_size": 2})) == 0 else nullcontext():
        trainer_leg("random", root, 2, {"dp_shard_size": 2}, range(3, 4))


@pytest.mark.slow
def test_a_trainer_with_other_steps(pools: Pools, tmp_path: Path) -> None:
    pools(1).run(trainer_leg, "random", str(tmp_path), 2, {}, range(3))
    pools(2).run(warned, str(tmp_path))
