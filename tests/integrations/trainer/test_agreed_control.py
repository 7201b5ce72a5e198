"""Callbacks that ask on one rank alone for what all ranks have to do together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM, TrainerCallback

import hfscale
from hfscale import ParallelConfig
from hfscale.testing import RankPool

from ...tiny_models import tiny
from .script import Case, Rows, arguments, build, collate

Pools = Callable[[int], RankPool]
Layout = dict[str, Any]


class Asks(TrainerCallback):
    """Asks once for ``what``, at ``event``, on the last rank alone."""

    def __init__(self, event: str, what: str) -> None:
        self._times = 0
        self._what = what
        if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
            setattr(self, event, self._ask)

    def _ask(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._times += 1
        setattr(control, self._what, self._times == 3 or getattr(control, self._what))


class AsksWithinSteps(Asks):
    def on_substep_end(self, *_: Any, **__: Any) -> None:
        """A method that instances replace."""


def history(
    path: str, out: str, layout: Layout | None, event: str, what: str
) -> list[dict[str, float]]:
    given = {"max_steps": 6, "eval_steps": 4, "logging_steps": 2}
    case = Case(given)
    kind: Any = transformers.Trainer if layout is None else hfscale.Trainer
    asks = AsksWithinSteps if event == "on_substep_end" else Asks
    trainer = kind(
        build(case, path, layout),
        arguments(case, out, 1 if layout is None else ParallelConfig(**layout).batch_world),
        collate,
        Rows(24, 1),
        Rows(6, 2),
        callbacks=[asks(event, what)],
    )
    trainer.train()
    if layout is None:  # stock leaves it off, for all later loops of this process
        trainer.accelerator.sync_gradients = True
    assert trainer.accelerator.sync_gradients
    kept = ("step", "loss", "eval_loss", "epoch", "train_loss")
    rows = [{name: row[name] for name in kept if name in row} for row in trainer.state.log_history]
    return [*rows, {"saved": float(len([*Path(out).glob("checkpoint-*")]))}]


@pytest.mark.daily("layout0-on_step_end-should_training_stop", "layout1-on_log-should_save")
@pytest.mark.parametrize(
    ("event", "what"),
    [
        ("on_step_end", "should_training_stop"),
        ("on_step_end", "should_evaluate"),
        ("on_log", "should_save"),
        ("on_log", "should_training_stop"),
        ("on_substep_end", "should_epoch_stop"),
    ],
)
@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"dp_shard_size": 2}])
def test_all_ranks_do_what_one_rank_asks_for(
    pools: Pools, tmp_path: Path, layout: Layout, event: str, what: str
) -> None:
    path = str(tmp_path / "model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float32).save_pretrained(path)
    expected = history(path, str(tmp_path / "stock"), None, event, what)
    for found in pools(2).run(history, path, str(tmp_path / "ours"), layout, event, what):
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.daily("layout0")
@pytest.mark.parametrize("layout", [{"pp_size": 2, "num_microbatches": 4}, {"dp_shard_size": 2}])
def test_a_step_that_training_stops_in_counts_in_the_summary(
    pools: Pools, tmp_path: Path, layout: Layout
) -> None:
    path = str(tmp_path / "model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float32).save_pretrained(path)
    asked = ("on_substep_end", "should_training_stop")
    expected = history(path, str(tmp_path / "stock"), None, *asked)
    for found in pools(2).run(history, path, str(tmp_path / "ours"), layout, *asked):
        assert found == [pytest.approx(row, abs=1e-5) for row in expected]
