"""Recipes that learn from a teacher, stored or not, and from rewards: losses are those of one process."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from hfscale.recipes.checks import check_values
from hfscale.recipes.generating import exact_match, f1, reward_of
from hfscale.recipes.run import carry_out
from hfscale.recipes.schema import FinetuneRecipe, RecipeError
from hfscale.testing import RankPool

from .test_recipes import base, losses, small  # noqa: F401  # a fixture

Pools = Callable[[int], RankPool]
TP2 = {"tp_size": 2}
PP2 = {"pp_size": 2, "num_microbatches": 2}
DP2 = {"dp_shard_size": 2}
CP2 = {"cp_size": 2}


def recipe_of(
    start: dict[str, Any], name: str, layout: dict[str, Any], changes: dict[str, Any]
) -> FinetuneRecipe:
    training = {
        "steps": 3,
        "batch_size": 4,
        "learning_rate": 5e-3,
        "log_every": 1,
        "evaluate_every": 3,
    }
    data = {
        "source": start["source"],
        "sequence_length": 32,
        "validation_fraction": 0.3,
        "validation_sequences": 6,
    }
    directory = str(Path(start["runs"]) / name)
    values = {
        "name": directory,
        "base": start["base"],
        "parallel": layout,
        "training": training,
        "data": data,
    }
    made = OmegaConf.to_object(
        OmegaConf.merge(OmegaConf.structured(FinetuneRecipe), values, changes)
    )
    check_values(made)  # type: ignore[arg-type]
    return made  # type: ignore[return-value]


def run(start: dict[str, Any], name: str, layout: dict[str, Any], changes: dict[str, Any]) -> None:
    os.makedirs(start["runs"], exist_ok=True)
    carry_out(recipe_of(start, name, layout, changes))


def records(start: dict[str, Any], name: str, key: str) -> list[float]:
    lines = (Path(start["runs"]) / name / "metrics.jsonl").read_text().splitlines()
    return [record[key] for record in map(json.loads, lines) if key in record]


@pytest.fixture
def taught(base: Any, tmp_path: Path) -> dict[str, Any]:  # noqa: F811
    """What a recipe needs, with a teacher of another size."""
    start: dict[str, Any] = base("llama")
    config = small("llama")
    config.num_hidden_layers = 1
    config.intermediate_size = 192
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
        tmp_path / "teacher"
    )
    return {**start, "teacher": str(tmp_path / "teacher")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("layouts", "packing"),
    [
        ([(TP2, {})], None),
        *(
            pytest.param([each], packing, marks=pytest.mark.slow)
            for packing in (None, True, False)
            for each in ((PP2, TP2), (DP2, PP2), (CP2, DP2), (TP2, CP2))
        ),
    ],
    ids=str,
)
def test_a_teacher_stored_or_not(
    pools: Pools, taught: dict[str, Any], tmp_path: Path, layouts: list[Any], packing: bool | None
) -> None:
    whole = {"teacher": {"base": taught["teacher"], "beta": 0.3}, "data": {"packing": packing}}
    run(taught, "one", {}, whole)
    expected = losses(taught, "one")
    assert len(expected) == 5
    for layout, its in layouts:
        written = {
            "base": taught["teacher"],
            "parallel": its,
            "write": str(tmp_path / "stored"),
            "top_k": 320,
        }
        pools(2).run(run, taught, "written", layout, {**whole, "teacher": written})
        read = {**whole, "teacher": {"stored": str(tmp_path / "stored"), "beta": 0.3}}
        pools(2).run(
            run, taught, "two", layout, {**whole, "teacher": {**whole["teacher"], "parallel": its}}
        )
        pools(2).run(run, taught, "read", layout, read)
        for name in ("two", "read"):
            assert losses(taught, name) == pytest.approx(expected, rel=2e-5), name


REWARD = {
    "rewards": ["f1", "hfscale.recipes.generating:exact_match"],
    "trl": {"num_generations": 4, "max_completion_length": 8},
}


def prompts(start: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    lines = [{"prompt": f"One? Two, {place}", "answer": "e t a o"} for place in range(30)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return {"data": {"source": str(tmp_path / "prompts.jsonl"), "format": "prompts"}}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (TP2, REWARD),
        pytest.param(TP2, {"trl": {"max_completion_length": 8}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_it_generates(
    pools: Pools,
    taught: dict[str, Any],
    tmp_path: Path,
    layout: dict[str, Any],
    changes: dict[str, Any],
) -> None:
    changes = {**prompts(taught, tmp_path), **changes, "training": {"batch_size": 8}}
    if "rewards" not in changes:
        changes["teacher"] = {"base": taught["teacher"], "beta": 0.3}
    pools(1).run(run, taught, "one", {}, changes)
    pools(2).run(run, taught, "two", layout, changes)
    for key in ("loss", "grad_norm", *(["reward"] if "rewards" in changes else [])):
        assert len(expected := records(taught, "one", key)) == 3
        assert records(taught, "two", key) == pytest.approx(expected, rel=2e-5, abs=1e-6), key
    assert {"checkpoint", "recipe.yaml"} <= {
        each.name for each in (Path(taught["runs"]) / "two").iterdir()
    }


def test_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert exact_match([" a b", [{"role": "assistant", "content": "c"}]], ["a b ", "d"]) == [
        1.0,
        0.0,
    ]
    assert f1(["a b b", "c", ""], ["b a", "d", "e"]) == [pytest.approx(0.8), 0.0, 0.0]
    (tmp_path / "my_rewards.py").write_text(
        "def short(completions, **_):\n    return [0.0] * len(completions)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert reward_of("my_rewards:short")(["a"]) == [0.0]
    for name in ("my_rewards:long", "nothing_here:short", "length"):
        with pytest.raises(RecipeError, match="write module:function"):
            reward_of(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": {"base": "a", "stored": "b", "write": "c"}}, "and no teacher.stored"),
        ({"teacher": {"write": "b"}}, "teacher.write stores the predictions of the model"),
        ({"teacher": {"stored": "b"}, "trl": {"top_k": 3}}, "not for generated ones"),
        ({"teacher": {"base": "a"}, "rewards": ["f1"]}, "either from rewards or from a teacher"),
        ({"trl": {"beta": 0.1}}, "without rewards and teacher.base no text is"),
        (
            {"rewards": ["f1"]},
            "data.format must be chat or completion or prompts to generate from, got text",
        ),
        (
            {"teacher": {"base": "a"}, "data": {"format": "pairs"}},
            "data.format must be text or chat or completion to learn from a teacher, got pairs",
        ),
        (
            {"teacher": {"base": "a"}, "data": {"format": "chat", "images_column": "images"}},
            "to learn from a teacher, got data.images_column='images': leave it out",
        ),
        ({"data": {"format": "prompts"}}, "give rewards"),
        (
            {"rewards": ["f1"], "data": {"format": "prompts", "samples": 2}},
            "leave them out with rewards",
        ),
        ({"teacher": {"base": "a", "temperature": 0}}, "teacher.temperature=0.0 is invalid"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe_of({"base": "a", "source": "b.jsonl", "runs": "c"}, "d", {}, changes)
