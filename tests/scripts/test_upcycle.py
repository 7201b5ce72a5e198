"""The upcycling script, the demo around it, and the comparison of runs."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from compare_runs import difference, losses, main, table
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from hfscale.recipes.read import load_recipe
from hfscale.recipes.schema import FinetuneRecipe

from ..tiny_models import tiny

SCRIPTS = Path(__file__).parents[2] / "scripts"
RECIPE = SCRIPTS / "recipes" / "demo_upcycle.yaml"


def _run(directory: Path, validation: list[float], *overrides: str) -> Path:
    directory.mkdir()
    OmegaConf.save(
        OmegaConf.structured(load_recipe(FinetuneRecipe, RECIPE, list(overrides))),
        directory / "recipe.yaml",
    )
    records = [
        {"step": 10 * index, "validation_loss": loss, "unigram_entropy": 6.0}
        for index, loss in enumerate(validation)
    ]
    lines = [json.dumps(record) for record in [*records, {"step": 10, "loss": 1.0}]]
    (directory / "metrics.jsonl").write_text("\n".join(lines))
    return directory


def test_runs_side_by_side(tmp_path, monkeypatch, capsys):
    dense = _run(tmp_path / "dense", [5.0, 4.5])
    mixture = _run(tmp_path / "mixture", [5.0, 4.4], "name=another", "base=somewhere/else")
    lines = table({run.name: losses(run) for run in (dense, mixture)}, 2048).splitlines()
    assert lines[0] == "| step | tokens | dense | mixture | difference |"
    assert lines[-1] == "| 10 | 20,480 | 4.5000 | 4.4000 | -0.1000 |"
    monkeypatch.setattr(
        sys, "argv", ["compare_runs.py", str(dense), str(mixture), "--out", str(tmp_path / "x.png")]
    )
    main()
    assert lines[-1] in capsys.readouterr().out
    assert (tmp_path / "x.png").stat().st_size > 10_000


@pytest.mark.parametrize("override", ["training.steps=20", "seed=7", "data.sequence_length=128"])
def test_runs_that_differ_in_more_are_not_compared(override):
    recipes = [load_recipe(FinetuneRecipe, RECIPE, overrides) for overrides in ([], [override])]
    assert (
        difference(recipes)
        == f"their recipes differ in {override.partition('.')[0].partition('=')[0]}"
    )
    assert difference(recipes[:1] * 2) is None


def test_the_script_writes_a_mixture_or_says_why_not(tmp_path, monkeypatch, capsys):
    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(tmp_path / "dense")
    arguments = [
        "upcycle.py",
        str(tmp_path / "dense"),
        str(tmp_path / "mixture"),
        "--num-experts",
        "4",
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(SCRIPTS / "upcycle.py"), run_name="__main__")
    assert "MixtralForCausalLM, 4 experts of which each token takes 2" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*arguments, "--every", "2"])
    with pytest.raises(SystemExit, match=r"error: .*every=2 leaves layers dense"):
        runpy.run_path(str(SCRIPTS / "upcycle.py"), run_name="__main__")


def test_the_demo_trains_both_on_the_same(tmp_path):
    log = tmp_path / "log"
    python = tmp_path / "python"
    python.write_text(f'#!/usr/bin/env bash\necho "$@" >> {log}\n')
    python.chmod(0o755)
    environment = {
        **os.environ,
        "PYTHON": str(python),
        "RUN": "mine",
        "BASE": "none",
        "UPCYCLE": "--num-experts 4 --reinitialize 0.5",
    }
    command = ["bash", str(SCRIPTS / "demo_upcycle.sh"), "training.steps=3"]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    pretrain, upcycle, dense, mixture, check, compare = log.read_text().splitlines()
    assert pretrain.endswith("demo_pretrain.yaml name=none replace=true")
    assert upcycle.endswith(
        "upcycle.py runs/none/checkpoint runs/mine-start --num-experts 4 --reinitialize 0.5"
    )
    assert dense.endswith(
        "demo_upcycle.yaml name=mine-dense replace=true base=runs/none/checkpoint training.steps=3"
    )
    assert mixture.endswith(
        "demo_upcycle.yaml name=mine replace=true base=runs/mine-start training.steps=3"
    )
    assert check.endswith("check_checkpoint.py runs/mine")
    assert "runs/mine-dense runs/mine --out runs/mine/" in compare


def test_the_demo_goes_on_with_the_text_of_pretraining_in_another_order():
    first = OmegaConf.load(SCRIPTS / "recipes" / "demo_pretrain.yaml")
    second = OmegaConf.load(RECIPE)
    assert first.data == second.data
    assert first.seed != second.seed
