"""Where a run's numbers go: CSV, Trainer's report_to, a profile; and what they are."""

import csv
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from transformers.integrations import integration_utils

import hfscale
from hfscale.cli import main
from hfscale.recipes import run_log
from hfscale.recipes.run_log import read_metrics
from hfscale.recipes.schema import PretrainRecipe, RecipeError, TrainingRecipe
from hfscale.recipes.trainer import RecipeTrainer, flops_per_token, peak_flops, utilization
from tests.tiny_models import tiny


def _sequences(count: int, seed: int) -> Dataset:
    tokens = torch.randint(0, 67, (count, 12), generator=torch.Generator().manual_seed(seed))
    return Dataset.from_dict({"input_ids": tokens.numpy()}).with_format("torch")


class Heard(TrainerCallback):
    """Stands for TensorBoard, W&B, ..."""

    said: ClassVar[list[Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.said.append({"step": state.global_step, **logs})


def test_numbers_reach_trackers_and_a_profile_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "heard", Heard)
    monkeypatch.setattr(Heard, "said", [])
    recipe = PretrainRecipe(name="x", tracking=["csv", "heard"], profile="1 step")
    recipe.data.sequence_length = 12
    recipe.training = TrainingRecipe(
        steps=4, batch_size=4, log_every=2, evaluate_every=2, peak_tflops=1e-4
    )
    model = hfscale.from_config(tiny("llama"))
    RecipeTrainer(model, recipe, _sequences(20, 0), _sequences(5, 1), None, 4.0).fit()
    training, _ = read_metrics(Path("runs/x/metrics.jsonl"))
    assert [record["tokens"] for record in training] == [96, 192]
    assert training[1]["seconds"] > training[0]["seconds"] > 0
    speed = training[1]["tokens_per_second"]
    assert training[1]["mfu"] == pytest.approx(
        speed * flops_per_token(model.config, 12, False) / 1e8, rel=2e-2
    )
    lines = [json.loads(line) for line in Path("runs/x/metrics.jsonl").read_text().splitlines()]
    heard = [
        {name: value for name, value in each.items() if name != "epoch"} for each in Heard.said
    ]
    assert [each for each in heard if "loss" in each or "validation_loss" in each] == lines
    with open("runs/x/metrics.csv", newline="", encoding="utf-8") as stream:
        table = list(csv.DictReader(stream))
    assert [row["step"] for row in table] == ["0", "2", "4"]
    assert (table[0]["loss"], float(table[2]["loss"])) == ("", training[1]["loss"])
    assert float(table[2]["validation_loss"]) == lines[-1]["validation_loss"]
    events = json.loads(Path("runs/x/profile/rank-0.json").read_text())["traceEvents"]
    steps = {
        event["name"] for event in events if str(event.get("name", "")).startswith("ProfilerStep")
    }
    assert steps == {"ProfilerStep#2"}


def test_operations_of_a_token() -> None:
    """By hand: 2 layers of width 32, 4 heads of 8, 2 of them for keys, an MLP of 48, 67 words."""
    config = tiny("llama")
    shape = (
        config.hidden_size,
        config.intermediate_size,
        config.num_key_value_heads,
        config.vocab_size,
    )
    width, inner, pairs, words = shape
    matrices = 2 * (2 * width * width + 2 * width * 8 * pairs + 3 * width * inner) + width * words
    forward = 2 * matrices + 4 * 2 * width * 100
    assert flops_per_token(config, 100, adapted=False) == 3 * forward
    assert flops_per_token(config, 100, adapted=True) == 2 * forward
    assert peak_flops() == 0.0  # of this processor, which nobody knows
    assert utilization(config, PretrainRecipe(name="x"), 2, 10.0) == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "tracking=[tensorbord]",
            "names 'tensorbord', which transformers does not report to: use azure_ml",
        ),
        (
            "tracking=[wandb]",
            "tracking=wandb needs a package that is not installed: pip install wandb",
        ),
        ("profile=three", "is not a number of steps: write profile: 3 steps"),
        ("profile=319 steps", "but training.steps=320: use at most 318"),
        ("training.peak_tflops=0", "training.peak_tflops=0.0 is invalid"),
    ],
)
def test_refusals(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(run_log, "get_available_reporting_integrations", lambda: ["tensorboard"])
    assert main(["train", "demo_pretrain", change, "--print-launch"]) == 2
    assert message in capsys.readouterr().err


def test_refusals_are_recipe_errors() -> None:
    with pytest.raises(RecipeError):
        run_log.check_trackers(["none"])
