"""``hfscale train``: which recipe, in how many processes, and how it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands import launch as accelerate_launch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from hfscale.cli import main
from hfscale.recipes import LIBRARY, run
from hfscale.recipes.launch import launch
from hfscale.recipes.read import locate, read_recipe, shipped_recipes
from hfscale.recipes.schema import FinetuneRecipe, PretrainRecipe, RecipeError

from ..test_package import HEAVY


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "ACCELERATE_USE_CPU", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_every_shipped_recipe_has_a_name_a_line_and_a_kind(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(
        path.stem for path in LIBRARY.glob("*.yaml")
    )
    for name, text in shipped_recipes().items():
        assert 20 < len(text) < 160, name
        pretrains = name.endswith("pretrain")
        assert type(read_recipe(name)) is (PretrainRecipe if pretrains else FinetuneRecipe)


def test_a_file_comes_before_a_name(tmp_path: Path) -> None:
    (tmp_path / "demo_lora").write_text("name: mine\nbase: x\n")
    assert read_recipe("demo_lora").name == "mine"
    assert locate("demo_qlora") == LIBRARY / "demo_qlora.yaml"


@pytest.mark.parametrize(
    ("content", "overrides", "message"),
    [
        ("name: x\n", [], "does not say what to train: add base .* or model"),
        ("name: x\nbase: y\nmodel: {}\n", [], "has both base .* and model .*: leave out"),
        ("name: x\nbase: y\n", ["model.hidden_size=4"], "has both base .* and model .*: leave out"),
        ("- name\n", [], "has no keys"),
        ("name: [x\n", [], "cannot be read as a recipe"),
    ],
)
def test_a_recipe_of_no_kind_or_two_is_refused(
    tmp_path: Path, content: str, overrides: list[str], message: str
) -> None:
    (tmp_path / "recipe.yaml").write_text(content)
    with pytest.raises(RecipeError, match=message):
        read_recipe("recipe.yaml", overrides)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([], "RECIPE is missing"),
        (["demo_lra"], "did you mean demo_lora?"),
        (["demo_lora.yaml"], "demo_lora.yaml: there is no such file"),
        (["demo_lora", "training.stepz=3"], "did you mean 'steps'"),
        (["demo_lora"], "does not exist: pretrain first (hfscale train demo_pretrain"),
        (["demo_pretrain", "parallel.tp_size=two"], "tp_size='two' is invalid"),
        (["demo_pretrain", "--max-memory=40", "steps"], "unrecognized arguments: steps"),
    ],
)
def test_mistakes_are_one_message(
    line: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *line]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert len(captured.err.splitlines()) == (2 if "see hfscale" in captured.err else 1)


def test_a_misspelt_key_costs_no_import_of_torch() -> None:
    code = (
        "import sys; from hfscale.cli import main; main(['train', 'demo_lora', 'training.stepz=3']); "
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['omegaconf']\n"


def test_packages_that_are_missing_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("omegaconf", "yaml"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["train", "--list"]) == 2
    said = capsys.readouterr().err
    assert (
        "recipes need omegaconf, PyYAML, which the rest of hfscale does not need, but which are not installed"
        in said
    )
    assert 'pip install "hfscale[recipes]"' in said


def test_the_launch_line_is_one_of_accelerates(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "train",
                "demo_pretrain",
                "--max-memory=40",
                "name=x y",
                "training.steps=3",
                "--print-launch",
            ]
        )
        == 0
    )
    line = capsys.readouterr().out
    assert line == (
        "accelerate launch --multi_gpu --main_process_port 0 --num_processes 2 --num_machines 1 --mixed_precision no "
        "--dynamo_backend no -m hfscale train demo_pretrain 'name=x y' training.steps=3 --max-memory=40\n"
    )
    assert main(["train", "demo_pretrain", "parallel.tp_size=1", "--print-launch"]) == 0
    line = capsys.readouterr().out.split()
    parsed = accelerate_launch.launch_command_parser().parse_args(line[2:])
    assert (parsed.num_processes, parsed.multi_gpu, parsed.module) == (1, False, True)
    assert [parsed.training_script, *parsed.training_script_args] == line[line.index("hfscale") :]


@pytest.mark.parametrize(("pp_size", "ranks"), [(1, 4), (2, 8)])
def test_as_many_processes_as_the_layout_needs(
    monkeypatch: pytest.MonkeyPatch, pp_size: int, ranks: int
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(accelerate_launch, "launch_command", started.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    layout = ["parallel.dp_shard_size=2", f"parallel.pp_size={pp_size}"]
    assert main(["train", "demo_pretrain", *layout]) == 0
    assert [line.num_processes for line in started] == [ranks]
    assert os.environ["ACCELERATE_USE_CPU"] == "1"
    assert int(os.environ["OMP_NUM_THREADS"]) >= 1
    assert started[0].training_script_args == ["train", "demo_pretrain", *layout]


def test_one_process_is_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(run, "start", lambda recipe, limit: ran.append((recipe.name, limit)))
    assert main(["train", "demo_pretrain", "parallel.tp_size=1", "--max-memory=2", "name=x"]) == 0
    assert ran == [("x", 2.0)]


def test_a_rank_that_a_launcher_has_started_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(run, "start", lambda recipe, limit: ran.append(recipe.name))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "demo_pretrain", "name=x"]) == 0
    assert ran == ["x"]


def test_fewer_gpus_than_ranks_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main(["train", "demo_pretrain"]) == 2
    assert "needs 2 processes, but this machine has 1 GPU(s)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "found", "said"), [(2, 2, ""), (-signal.SIGKILL, 137, "rank 1 was ended by SIGKILL")]
)
def test_how_a_rank_ended_is_how_the_command_ends(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int,
    found: int,
    said: str,
) -> None:
    def fail(_: Any) -> None:
        raise ChildFailedError(
            "hfscale", {1: ProcessFailure(local_rank=1, pid=1, exitcode=code, error_file="absent")}
        )

    monkeypatch.setattr(accelerate_launch, "launch_command", fail)
    assert launch(2, ["demo_pretrain"]) == found
    captured = capsys.readouterr().err
    assert captured.startswith(f"hfscale train: {said}" if said else "")
    assert len(captured.splitlines()) == bool(said)


@pytest.mark.slow  # three processes start
def test_what_a_rank_refuses_is_said_once_without_the_launcher(tmp_path: Path) -> None:
    """Two real ranks: the recipe and the layout are right, and the model cannot be cut so."""
    recipe = yaml.safe_load((LIBRARY / "demo_pretrain.yaml").read_text())
    recipe["model"] |= {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-m", "hfscale", "train", "recipe.yaml"]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=280
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "ChildFailedError" not in done.stderr
    assert done.stderr.count("error (rank 0)") == 1, done.stderr
    assert "tp_size=2" in done.stderr
    assert not list(tmp_path.glob("runs/*/checkpoint"))
