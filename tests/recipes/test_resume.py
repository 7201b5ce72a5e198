"""A run that was stopped goes on as if it had not been, and no run replaces another unasked."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import hfscale
from hfscale.recipes.launch import layout_of
from hfscale.recipes.places import check_places
from hfscale.recipes.read import read_recipe, shipped_recipes
from hfscale.recipes.run import carry_out as finetune
from hfscale.recipes.schema import FinetuneRecipe, PretrainRecipe, RecipeError
from hfscale.recipes.trainer import Watch
from hfscale.testing import RankPool

from .test_recipes import METHODS, base, recipe_for  # noqa: F401

STEPS = 6
STOPPED = 5
METHODS_HERE = {
    "full": {},
    "lora": {"adapter": {**METHODS["lora"]["adapter"], "lora_dropout": 0.2}},
}


class Stopped(Exception):
    """Stands for whatever ends a job."""


def run(
    start: dict[str, Any],
    name: str,
    method: str,
    layout: dict[str, Any],
    stop: Any,
    **training: Any,
) -> None:
    recipe = recipe_for(start, str(Path(start["runs"]) / name), METHODS_HERE[method], layout)
    recipe.training.steps, recipe.training.log_every, recipe.training.save_every = STEPS, 1, 2
    for field, value in training.items():
        setattr(recipe.training, field, value)
    recipe.save_check = stop == "told"
    stepped = Watch.on_step_end
    # Of dropout: as in a process of its own, or in another one.
    torch.manual_seed(int(recipe.training.resume))

    def stopping(watch: Watch, args: Any, state: Any, *others: Any, **given: Any) -> None:
        if stop == "told" and state.global_step == STOPPED:
            os.kill(os.getpid(), signal.SIGTERM)
        elif stop and state.global_step == STOPPED:
            raise Stopped
        stepped(watch, args, state, *others, **given)

    Watch.on_step_end = stopping  # type: ignore[method-assign]
    try:
        finetune(recipe)
    except Stopped:
        pass
    finally:
        Watch.on_step_end = stepped  # type: ignore[method-assign]


def metrics(start: dict[str, Any], name: str) -> list[dict[str, float]]:
    lines = (Path(start["runs"]) / name / "metrics.jsonl").read_text().splitlines()
    kept = ("step", "loss", "lr", "grad_norm", "validation_loss")
    return [
        {key: value for key, value in json.loads(line).items() if key in kept} for line in lines
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("method", "layout"), [("lora", {}), ("full", {"dp_shard_size": 2})])
def test_a_stopped_run_goes_on_bit_by_bit(
    pools: Callable[[int], RankPool],
    base: Callable[[str], dict[str, Any]],  # noqa: F811
    method: str,
    layout: dict[str, Any],
) -> None:
    start = base("llama")
    runs = Path(start["runs"])

    def everywhere(name: str, stop: bool, **training: Any) -> None:
        if layout:
            pools(2).run(run, start, name, method, layout, stop, **training)
        else:
            run(start, name, method, layout, stop, **training)

    everywhere("whole", False)
    everywhere("stopped", True)
    assert metrics(start, "stopped")[-1]["step"] < STEPS
    everywhere("stopped", False, resume=True)
    assert metrics(start, "stopped") == metrics(start, "whole")
    (directory,) = (part for part in ("adapter", "checkpoint") if (runs / "whole" / part).is_dir())
    for file in (runs / "whole" / directory).glob("*.safetensors"):
        assert (runs / "stopped" / directory / file.name).read_bytes() == file.read_bytes()


@pytest.mark.filterwarnings("ignore")
def test_a_run_that_is_told_to_stop_saves_behind_its_step(
    base: Callable[[str], dict[str, Any]],  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    start = base("llama")
    before = signal.getsignal(signal.SIGTERM)
    run(start, "whole", "lora", {}, False)
    with pytest.raises(SystemExit) as ended:
        run(start, "stopped", "lora", {}, "told")
    assert ended.value.code == 75
    assert signal.getsignal(signal.SIGTERM) is before
    assert re.search(r"a state takes [\d.]+ of [\d.]+ GiB that are free", capsys.readouterr().out)
    state = Path(start["runs"]) / "stopped" / "state" / f"checkpoint-{STOPPED}"
    assert json.loads((state / "trainer_state.json").read_text())["global_step"] == STOPPED
    run(start, "stopped", "lora", {}, False, resume=True)
    assert metrics(start, "stopped") == metrics(start, "whole")


def recipe(**training: Any) -> PretrainRecipe:
    made = PretrainRecipe(name="x")
    for field, value in training.items():
        setattr(made.training, field, value)
    return made


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "x").mkdir(parents=True)
    return tmp_path / "runs" / "x"


def test_no_recipe_that_ships_replaces_an_earlier_run() -> None:
    assert not [name for name in shipped_recipes() if read_recipe(name).replace]


def test_an_earlier_run_is_not_replaced_unasked(directory: Path) -> None:
    (directory / "metrics.jsonl").touch()  # it began, and did nothing
    check_places(recipe())
    check_places(recipe(resume=True))
    (directory / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(
        RecipeError, match=r"runs/x has a run already \(metrics.jsonl\): choose another name, or"
    ):
        check_places(recipe())
    with pytest.raises(RecipeError, match=r"has metrics.jsonl and no state to resume from"):
        check_places(recipe(resume=True))
    (directory / "state" / "checkpoint-2").mkdir(parents=True)
    with pytest.raises(
        RecipeError,
        match=r"go on with it \(training.resume=true\), or replace that run \(replace=true\)",
    ):
        check_places(recipe())
    asked = recipe()
    asked.replace = True
    check_places(asked)


def test_what_starts_again_must_resume() -> None:
    with pytest.raises(RecipeError, match=r"training.restarts=3 .* without training.resume=true"):
        read_recipe("demo_pretrain", ["training.restarts=3"])
    assert (
        read_recipe(
            "demo_pretrain", ["training.restarts=3", "training.resume=true"]
        ).training.restarts
        == 3
    )


def test_a_job_that_starts_again_begins_anew_where_nothing_was_saved(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    (directory / "metrics.jsonl").write_text("{}\n")
    check_places(recipe(resume=True))
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")  # by a scheduler
    check_places(recipe(resume=True, memory_every=5))
    (directory / "checkpoint").mkdir()
    with pytest.raises(
        RecipeError, match=r"has checkpoint, metrics.jsonl and no state to resume from"
    ):
        check_places(recipe(resume=True))


def test_a_layout_for_the_processes_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe()
    made.parallel = {"tp_size": 4}
    made.fallbacks = [{"tp_size": 2}, {}]
    assert layout_of(made).tp_size == 4
    monkeypatch.setenv("RANK", "0")
    for world, size in (("4", 4), ("2", 2), ("1", 1)):
        monkeypatch.setenv("WORLD_SIZE", world)
        assert layout_of(made).tp_size == size
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(hfscale.MeshError, match=r"3 process\(es\) were started"):
        layout_of(made)


def test_a_state_goes_on_as_what_it_was(directory: Path) -> None:
    (directory / "state" / "checkpoint-2").mkdir(parents=True)
    OmegaConf.save(OmegaConf.structured(recipe()), directory / "recipe.yaml")
    check_places(recipe(resume=True, save_every=3, log_every=1))
    with pytest.raises(
        RecipeError,
        match=r"with training.learning_rate=0.001, but the recipe has 0.5: use the saved",
    ):
        check_places(recipe(resume=True, learning_rate=0.5))
    other = FinetuneRecipe(name="x", base="y")
    other.training.resume = True
    with pytest.raises(RecipeError, match=r"model .* is not a key of a recipe"):
        check_places(other)
