"""What ``hfscale.Accelerator`` tells of processes, models and skipped steps is of distinct batches and whole models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import GradScalerKwargs
from accelerate.state import AcceleratorState, GradientState
from peft import LoraConfig
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale.testing import RankPool

from ..tiny_models import tiny
from .test_accelerator import Rows, build

Pools = Callable[[int], RankPool]
LAYOUTS = [
    {"tp_size": 2},
    {"pp_size": 2},
    {"dp_shard_size": 2},
    {"cp_size": 2},
]


@pytest.fixture
def start(tmp_path: Path) -> str:
    torch.manual_seed(0)
    config = tiny("llama", tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(tmp_path)
    return str(tmp_path)


def _fresh() -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()  # an earlier Trainer may have stopped within an accumulation
    return hfscale.Accelerator()


def _first_tokens(loader: Any) -> list[list[int]]:
    return [batch["input_ids"][:, 0].tolist() for batch in loader]


def _two_layouts(path: str) -> tuple[str, list[list[int]], int]:
    accelerator = _fresh()
    accelerator.prepare(
        build(path, {"tp_size": 2}), DataLoader(Rows(8), batch_size=2, shuffle=True)
    )
    other = build(path, {"dp_shard_size": 2})
    with pytest.raises(ConfigError) as caught:
        accelerator.prepare(other)
    accelerator.prepare(build(path, {"pp_size": 2}))  # its ranks share a batch too
    accelerator.free_memory()
    _, loader = accelerator.prepare(other, DataLoader(Rows(8), batch_size=2))
    accelerator.save_state(f"{path}/state")
    assert "order" not in (Path(path) / "state" / "state.json").read_text()  # of a loader of before
    return str(caught.value), _first_tokens(loader), accelerator.num_processes


def test_models_of_one_accelerator_share_batches_alike(pools: Pools, start: str) -> None:
    """The second model trained on the batches of the first model's layout: the same on both data ranks."""
    found = pools(2).run(_two_layouts, start)
    assert all("(tp2), got another model over dp_shard2" in said for said, *_ in found)
    assert [seen for _, seen, _ in found] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert {count for *_, count in found} == {2}


def _parts(path: str, layout: dict[str, int]) -> tuple[int, list[str], Tensor]:
    accelerator = _fresh()
    accelerator.prepare(build(path, layout))
    with accelerator.split_between_processes(["a", "b", "c"]) as texts:
        pass
    with accelerator.split_between_processes(torch.arange(3), apply_padding=True) as numbers:
        assert accelerator.state.num_processes == 2  # as before
    return accelerator.process_index, texts, numbers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_share_a_batch_get_the_same_part(
    pools: Pools, start: str, layout: dict[str, int]
) -> None:
    distinct = ParallelConfig(**layout).batch_world
    for index, texts, numbers in pools(2).run(_parts, start, layout):
        if distinct == 1:
            assert texts == ["a", "b", "c"]
            assert numbers.tolist() == [0, 1, 2]
        else:
            assert texts == (["a", "b"], ["c"])[index]
            assert numbers.tolist() == ([0, 1], [2, 2])[index]


def _state_dict(path: str, layout: dict[str, int]) -> dict[str, Tensor]:
    accelerator = _fresh()
    model = accelerator.prepare(build(path, layout))
    return accelerator.get_state_dict(model)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_state_dict_is_that_of_one_process(
    pools: Pools, start: str, layout: dict[str, int]
) -> None:
    first, other = pools(2).run(_state_dict, start, layout)
    stock = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64).state_dict()
    assert other == {}
    assert first.keys() == stock.keys()
    assert all(torch.equal(first[name], value) for name, value in stock.items())


def _of_adapters(path: str) -> str:
    model = build(path, {"tp_size": 2}, peft_config=LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ConfigError) as caught:
        _fresh().get_state_dict(model)
    return str(caught.value)


def test_a_state_dict_of_adapters_is_refused(pools: Pools, start: str) -> None:
    assert all("call accelerator.save_model" in said for said in pools(2).run(_of_adapters, start))


def _scaled(path: str, layout: dict[str, int]) -> tuple[list[int], list[int], list[bool]]:
    accelerator = _fresh()
    model = build(
        path,
        layout,
        dtype=torch.float32,
        mixed_precision="fp16",
        loss_scaling=GradScalerKwargs(init_scale=2.0**22),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    ids = Rows(2).ids
    taken, epochs, skipped = [], [], []
    for _ in range(8):
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seen = hfscale.metrics(model)
        assert accelerator.optimizer_step_was_skipped == bool(seen["step_was_skipped"])
        assert optimizer.step_was_skipped == bool(seen["step_was_skipped"])
        skipped.append(optimizer.step_was_skipped)
        taken.append(len(skipped) - int(seen["skipped_steps"]))
        epochs.append(schedule.scheduler.last_epoch // accelerator.num_processes)
    return taken, epochs, skipped


@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_a_schedule_pauses_where_a_step_is_skipped(
    pools: Pools, start: str, layout: dict[str, int]
) -> None:
    """As beside Accelerate's own scaler: otherwise warm-up is over before the first step is taken."""
    for taken, epochs, skipped in pools(2).run(_scaled, start, layout):
        assert any(skipped)
        assert not all(skipped)
        assert epochs == taken
