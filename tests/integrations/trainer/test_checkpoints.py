"""Runs that stop and go on: in the same layout bit by bit, and between layouts and stock Trainer in one process."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import GradScalerKwargs
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import hfscale
from hfscale import ParallelConfig
from hfscale.integrations.trainer import stock_state
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of

from ...arrivals import groups_of_trainer, write_partitions, write_trainers_shards
from ...tiny_models import tiny
from .script import Case, assert_equal, run

Pools = Callable[[int], RankPool]
Layout = dict[str, Any]
TP2 = {"tp_size": 2}
DP2 = {"dp_shard_size": 2}
PP2 = {"pp_size": 2, "num_microbatches": 4}
CASE = Case({"save_strategy": "steps", "save_steps": 2}, metrics=False)
# In an order that the process's own stream draws.
GROUPED = {"train_sampling_strategy": "group_by_length"}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    path = str(tmp_path_factory.mktemp("start"))
    AutoModelForCausalLM.from_config(
        tiny("llama", num_hidden_layers=4), dtype=torch.float32
    ).save_pretrained(path)
    return path


def weights(path: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()


def without_summary(found: dict[str, Any]) -> dict[str, Any]:
    """What a run that was resumed says of itself as a whole is of its second part."""
    rows = [row for row in found["history"] if "train_loss" not in row]
    return {**found, "history": rows, "calls": (0, 0), "writer": False}


@pytest.mark.daily("layout1-4-more1")
@pytest.mark.parametrize(
    ("layout", "step", "more"),
    [pytest.param(TP2, 2, {}, marks=pytest.mark.slow), (PP2, 4, GROUPED), (DP2, 4, GROUPED)],
)
def test_a_run_goes_on_bit_by_bit(
    pools: Pools, start: str, layout: Layout, step: int, more: dict[str, Any], tmp_path: Path
) -> None:
    case = replace(CASE, arguments={**CASE.arguments, **more}, dropout=0.1)
    out = str(tmp_path / "whole")
    whole = pools(2).run(run, case, start, out, layout)
    again = replace(case, resume=f"{out}/checkpoint-{step}")
    parts = pools(2).run(run, again, start, str(tmp_path / "parts"), layout)
    for one, other in zip(whole, parts, strict=True):
        assert without_summary(one)["history"] == without_summary(other)["history"]
    expected = weights(tmp_path / "whole" / "final")
    found = weights(tmp_path / "parts" / "final")
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# Stock code draws the order of an epoch anew in whose middle it goes on: step 3 ends one.
@pytest.mark.daily("layout0-4-more0")
@pytest.mark.parametrize(
    ("layout", "step", "more"), [(TP2, 4, {}), (PP2, 4, {}), (DP2, 3, {**GROUPED, "save_steps": 1})]
)
def test_runs_move_between_stock_and_layouts(
    pools: Pools, start: str, layout: Layout, step: int, more: dict[str, Any], tmp_path: Path
) -> None:
    case = replace(CASE, arguments={**CASE.arguments, **more})
    whole = run(case, start, str(tmp_path / "stock"), None)
    resumed = replace(case, resume=str(tmp_path / "stock" / "checkpoint-2"))
    for found in pools(2).run(run, resumed, start, str(tmp_path / "ours"), layout):
        assert_equal(without_summary(found), without_summary(whole), layout)
    back = replace(case, resume=str(tmp_path / "ours" / f"checkpoint-{step}"))
    found = run(back, start, str(tmp_path / "back"), None)
    assert_equal(without_summary(found), without_summary(whole), layout)
    for name, value in weights(tmp_path / "stock" / "final").items():
        torch.testing.assert_close(
            weights(tmp_path / "back" / "final")[name], value, rtol=1e-4, atol=1e-5
        )


@pytest.mark.daily("fsdp-layout0", "zero-layout0")
@pytest.mark.parametrize("layout", [TP2, PP2, DP2], ids=["layout0", "layout1", "layout2"])
@pytest.mark.parametrize("kind", ["fsdp", "zero"])
def test_runs_go_on_from_shards_of_others(
    pools: Pools, start: str, layout: Layout, kind: str, tmp_path: Path
) -> None:
    """As stock Trainer writes them over FSDP2 or DeepSpeed, neither of which it runs on CPUs."""
    whole = run(CASE, start, str(tmp_path / "stock"), None)
    theirs = tmp_path / "stock" / "checkpoint-2"
    shards = shutil.copytree(theirs, tmp_path / "checkpoint-2")
    if kind == "fsdp":
        pools(2).run(write_trainers_shards, str(theirs), str(shards))
    else:
        optimizer = str(theirs / "optimizer.pt")
        write_partitions(str(theirs), optimizer, str(shards), groups_of_trainer(str(theirs)), 2)
    for name in ("model.safetensors", "optimizer.pt", "config.json"):
        (shards / name).unlink()
    resumed = replace(CASE, resume=str(shards))
    for found in pools(2).run(run, resumed, start, str(tmp_path / "ours"), layout):
        assert_equal(without_summary(found), without_summary(whole), layout)


def test_masks_go_on_from_stocks_in_one_process(
    start: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of more processes than there are batches do not, and a line says so."""
    case = replace(CASE, dropout=0.1)
    whole = run(case, start, str(tmp_path / "stock"), None)
    checkpoint = tmp_path / "stock" / "checkpoint-2"
    resumed = replace(case, resume=str(checkpoint))
    found = run(resumed, start, str(tmp_path / "ours"), {})
    assert_equal(without_summary(found), without_summary(whole), {})
    assert "RNG states" not in caplog.text
    for process in range(2):
        shutil.copyfile(checkpoint / "rng_state.pth", checkpoint / f"rng_state_{process}.pth")
    (checkpoint / "rng_state.pth").unlink()
    run(resumed, start, str(tmp_path / "again"), {})
    assert "RNG states of 2 processes, but this layout has 1 distinct batches" in caplog.text


@pytest.mark.parametrize("layout", [{"dp_replicate_size": 2}, DP2])
def test_masks_go_on_from_stocks_in_two_processes(
    pools: Pools, start: str, tmp_path: Path, layout: Layout
) -> None:
    # In an epoch without an end, where stock code counts the examples that fill up the last step.
    case = replace(CASE, dropout=0.1, rows=48, arguments={**CASE.arguments, "max_steps": 4})
    whole = pools(2).run(run, case, start, str(tmp_path / "stock"), None, 2)
    resumed = replace(case, resume=str(tmp_path / "stock" / "checkpoint-2"))
    found = pools(2).run(run, resumed, start, str(tmp_path / "ours"), layout)
    for ours, theirs in zip(found, whole, strict=True):
        assert_equal(without_summary(ours), without_summary(theirs), layout)


def test_averages_of_rows_and_columns_are_cut(pools: Pools, start: str, tmp_path: Path) -> None:
    case = replace(CASE, arguments={**CASE.arguments, "optim": "adafactor", "eval_strategy": "no"})
    whole = run(case, start, str(tmp_path / "stock"), None)
    resumed = replace(case, resume=str(tmp_path / "stock" / "checkpoint-2"))
    for found in pools(2).run(run, resumed, start, str(tmp_path / "ours"), TP2):
        assert_equal(without_summary(found), without_summary(whole), TP2)


@pytest.mark.slow
def test_runs_move_between_layouts(pools: Pools, start: str, tmp_path: Path) -> None:
    whole = pools(2).run(run, CASE, start, str(tmp_path / "tp"), TP2)[0]
    resumed = replace(CASE, resume=str(tmp_path / "tp" / "checkpoint-2"))
    for layout in (PP2, DP2):
        for found in pools(2).run(run, resumed, start, str(tmp_path / "other"), layout):
            assert_equal(without_summary(found), without_summary(whole), layout)


def test_float16_skips_what_overflows(pools: Pools, start: str, tmp_path: Path) -> None:
    scaling = GradScalerKwargs(init_scale=2.0**20, growth_interval=100)
    load = {"mixed_precision": "fp16", "loss_scaling": scaling}
    case = Case({"fp16": True, "eval_strategy": "no", "warmup_steps": 0}, load=load, metrics=False)
    one, other = pools(2).run(run, case, start, str(tmp_path), TP2)
    assert one["history"] == other["history"]
    rates = [row["learning_rate"] for row in one["history"] if "learning_rate" in row]
    assert rates[0] == rates[1] == 1e-2  # the first step overflowed, and its schedule waited
    assert rates[-1] < 1e-2


@pytest.mark.daily("layout1")
@pytest.mark.parametrize("layout", [TP2, PP2])
def test_the_best_model_is_loaded_at_the_end(
    pools: Pools, start: str, layout: Layout, tmp_path: Path
) -> None:
    best = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "learning_rate": 0.3,
    }
    case = Case(
        {"save_strategy": "steps", "save_steps": 2, "save_only_model": True, **best}, metrics=False
    )
    stock = run(case, start, str(tmp_path / "stock"), None)
    assert not stock["best"].endswith("checkpoint-6")  # or the test could not tell
    found = pools(2).run(run, case, start, str(tmp_path / "ours"), layout)
    assert {Path(each["best"]).name for each in found} == {Path(stock["best"]).name}
    ours = weights(tmp_path / "ours" / "final")
    theirs = weights(tmp_path / "stock" / "final")
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4)


def test_stock_trainer_refuses_a_state_that_it_cannot_read(
    pools: Pools, start: str, tmp_path: Path
) -> None:
    case = Case(
        {**CASE.arguments, "optim": "adafactor", "max_steps": 2, "eval_strategy": "no"},
        metrics=False,
    )
    pools(2).run(run, case, start, str(tmp_path), TP2)
    with pytest.raises(ValueError, match="parameter group"):
        run(
            replace(case, resume=str(tmp_path / "checkpoint-2")),
            start,
            str(tmp_path / "stock"),
            None,
        )


def save_optimizer_of_a_score(directory: str) -> None:
    config = tiny("llama", num_labels=1, pad_token_id=0)
    auto = AutoModelForSequenceClassification
    layout = ParallelConfig(dp_shard_size=2)
    model = hfscale.from_config(
        config, parallel=layout, auto_class=auto, dtype=torch.float32
    ).train()
    optimizer = hfscale.create_optimizer(model, "adamw_torch_fused", lr=1e-3)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    for _ in range(2):
        model(input_ids=torch.arange(2, 14).view(2, 6)).logits.sum().backward()
        optimizer.step()
        stock_state.write(runtime_of(model), Path(directory), optimizer, schedule)
        torch.distributed.barrier()
        stock_state.read(runtime_of(model), Path(directory), optimizer, schedule)


def test_a_weight_of_which_a_data_rank_has_nothing_is_written(pools: Pools, tmp_path: Path) -> None:
    """A head of one row: an optimizer has no state of its empty shard, or one from a resume that it does not update."""
    pools(2).run(save_optimizer_of_a_score, str(tmp_path))
    states = torch.load(tmp_path / stock_state.OPTIMIZER)["state"].values()
    (score,) = (state for state in states if state["exp_avg"].shape == (1, 32))
    assert score["exp_avg"].any()
    assert {int(state["step"]) for state in states} == {2}
