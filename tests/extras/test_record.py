"""Recording the steps of a model that trains through stages."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale.cli import main
from hfscale.extras.schedules.chrome_trace import last_whole_step, read_runs
from hfscale.extras.schedules.record import split_steps
from hfscale.parallel.pipeline.orders import order
from hfscale.parallel.pipeline.timeline import Action, Span, Timeline
from hfscale.testing import RankPool
from tests.tiny_models import tiny

Pools = Callable[[int], RankPool]


def _batch(rows: int = 4) -> dict[str, torch.Tensor]:
    ids = torch.arange(rows * 9).view(rows, 9) % 67
    return {"input_ids": ids, "labels": ids}


def _train(layout: dict[str, Any], path: str, steps: int) -> dict[str, Any]:
    """Steps and an evaluation within a recording, and one of each outside."""
    model = hfscale.from_config(
        tiny("llama", num_hidden_layers=4), parallel=ParallelConfig(**layout)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    hfscale.train_step(model, _batch())
    before = model._hfscale.executor.workers[0].recorder
    with hfscale.record_schedule(model, path):
        within = model._hfscale.executor.workers[0].recorder
        optimizer.step()  # of a step that was not recorded
        for _ in range(steps):
            hfscale.train_step(model, _batch())
            optimizer.step()
            other.step()
            optimizer.zero_grad()
        hfscale.eval_step(model, _batch())
    after = model._hfscale.executor.workers[0].recorder
    hfscale.train_step(model, _batch())
    optimizer.step()
    return {"before": before, "within": within is not None, "after": after}


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_what_ran_is_in_the_file(
    pools: Pools, tmp_path: Path, capsys: pytest.CaptureFixture[str], schedule: str
) -> None:
    path = tmp_path / "t.json"
    layout = {"pp_size": 2, "pipeline_schedule": schedule, "num_microbatches": 4}
    for found in pools(2).run(_train, layout, str(path), 2):
        assert found == {"before": None, "within": True, "after": None}
    runs = read_runs(path)
    assert list(runs) == [0, 1, 2]  # two steps of training and one of evaluation
    planned = order(schedule, 2, 4, 2 if schedule == "zbv" else 1)
    for number in (0, 1):
        for rank, spans in enumerate(runs[number].ranks):
            ran = [span.action._replace(paired=False) for span in spans]
            first = min(action.stage for action in planned[rank])
            assert ran == [*planned[rank], Action(first, "update", number)]
            assert all(span.end > span.start for span in spans)
    assert {span.action.kind for _, span in runs[2].spans()} == {"forward"}
    events = json.loads(path.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event.get("name") == "process_name"]
    assert names == [f"{schedule}, step {number}" for number in (1, 2, 3)]
    times = [
        [event["ts"] for event in events if event["ph"] == "X" and event["pid"] == run]
        for run in range(3)
    ]
    assert max(times[0]) < min(times[1])  # on one clock
    assert max(times[1]) < min(times[2])

    assert (
        main(["schedule", "--trace", str(path), "--out", str(tmp_path / "t.png"), "--width", "150"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"planned: {schedule}, p = 2, m = 4, ")
    assert lines[4].startswith(f"measured: {schedule}, p = 2, m = 4, ")
    assert "U update" in lines[8]
    assert (tmp_path / "t.png").stat().st_size > 5000


def test_the_first_pipeline_of_several_is_written(pools: Pools, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    pools(4).run(_train, {"pp_size": 2, "tp_size": 2, "pipeline_schedule": "gpipe"}, str(path), 1)
    first = read_runs(path)[0]
    assert first.num_ranks == 2
    assert [{span.action.stage for span in spans} for spans in first.ranks] == [{0}, {1}]
    assert first.name == "gpipe"


def _refused(path: str, pp_size: int, nested: bool) -> str:
    layout = ParallelConfig(pp_size=pp_size, dp_replicate_size=2 // pp_size)
    model = hfscale.from_config(tiny("llama"), parallel=layout)
    with hfscale.record_schedule(model, path) if nested else nullcontext():
        with pytest.raises(ConfigError) as caught:
            hfscale.record_schedule(model, path).__enter__()
        workers = model._hfscale.executor.workers if pp_size > 1 else ()
        assert all((worker.recorder is not None) == nested for worker in workers)
    return str(caught.value)


def test_refusals_are_everyones(pools: Pools, tmp_path: Path) -> None:
    run = pools(2).run
    assert all(
        "no pipeline stages" in message
        for message in run(_refused, str(tmp_path / "t.json"), 1, False)
    )
    absent = str(tmp_path / "absent" / "t.json")
    assert all("is not a folder" in message for message in run(_refused, absent, 2, False))
    assert not list(tmp_path.iterdir())
    assert all(
        "being recorded already" in message
        for message in run(_refused, str(tmp_path / "t.json"), 2, True)
    )


def _broken_off(path: str) -> bool:
    model = hfscale.from_config(tiny("llama"), parallel=ParallelConfig(pp_size=2))
    with pytest.raises(ZeroDivisionError), hfscale.record_schedule(model, path):
        raise ZeroDivisionError
    return model._hfscale.executor.workers[0].recorder is None


def test_nothing_is_left_where_the_block_fails(pools: Pools, tmp_path: Path) -> None:
    assert pools(2).run(_broken_off, str(tmp_path / "t.json")) == [True, True]
    assert not list(tmp_path.iterdir())


def _timeline(*ranks: str) -> Timeline:
    """``"F0 B0"``: an action per word, one after the other."""
    kinds: Any = {"F": "forward", "B": "backward", "U": "update"}
    return Timeline(
        tuple(
            tuple(
                Span(Action(rank, kinds[word[0]], int(word[1:])), float(at), at + 1.0)
                for at, word in enumerate(words.split())
            )
            for rank, words in enumerate(ranks)
        )
    )


def test_an_action_that_comes_again_begins_the_next_step() -> None:
    steps = split_steps(_timeline("F0 F1 B0 B1 U0 F0 B0 U1 F0", "F0 B0 F1 B1 U0 F0 B0 U1 F0"))
    shown = [
        ["".join(f"{s.action.kind[0]}{s.action.microbatch}" for s in spans) for spans in t.ranks]
        for t in steps
    ]
    assert shown == [["f0f1b0b1u0", "f0b0f1b1u0"], ["f0b0u1", "f0b0u1"], ["f0", "f0"]]
    assert steps[1].start == 5.0


def test_the_last_step_that_trained_on_every_rank() -> None:
    whole = _timeline("F0 B0", "F0 B0")
    broken = _timeline("F0 B0", "F0")
    evaluated = _timeline("F0", "F0")
    assert last_whole_step({0: broken, 1: whole, 2: evaluated, 3: broken}) is whole
    assert last_whole_step({0: whole, 1: _timeline("F0 B0 U0", "F0 B0 U0")}) != whole
    assert last_whole_step({0: broken, 1: evaluated}) is evaluated
