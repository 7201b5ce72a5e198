"""Reward models and classifiers by recipe: pairs and classes as rows, and the same numbers in every layout."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from hfscale.recipes.batch_sizes import microbatches_of_step
from hfscale.recipes.chat import encode_classes, encode_pairs
from hfscale.recipes.checks import check_values
from hfscale.recipes.corpus import Document, disordered
from hfscale.recipes.rows import ClassRows, PairRows
from hfscale.recipes.run import carry_out as finetune
from hfscale.recipes.schema import DataRecipe, FinetuneRecipe, RecipeError
from hfscale.recipes.tasks import PAIRS
from hfscale.testing import RankPool

Pools = Callable[[int], RankPool]

CHECK = Path(__file__).parents[2] / "scripts" / "check_checkpoint.py"
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "shard2": {"dp_shard_size": 2},
}
LORA = {"method": "lora", "r": 4, "target_modules": "all-linear"}


def test_pairs_take_turns_and_those_that_fill_up_do_not_count() -> None:
    data = Dataset.from_dict({"chosen": [[5, 6, 7], [8]], "rejected": [[9], [3, 4]]}).with_format(
        "torch"
    )
    first, second = PairRows(data, padding=2).step([0, 1], size=1, counted=1)
    assert first["input_ids"].tolist() == [[5, 6, 7], [9, 2, 2]]
    assert second["input_ids"].tolist() == [[8, 2, 2], [3, 4, 2]]
    assert first["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert (first["counted"].tolist(), second["counted"].tolist()) == ([True, True], [False, False])
    assert PairRows(data, padding=2).tokens.tolist() == [4, 3]


def test_classes_that_fill_up_are_ignored() -> None:
    data = Dataset.from_dict({"input_ids": [[5, 6], [8]], "label": [1, 0]}).with_format("torch")
    (batch,) = ClassRows(data, padding=2).step([0, 1, 0], size=3, counted=2)
    assert batch["labels"].tolist() == [1, 0, -100]
    assert batch["input_ids"].tolist() == [[5, 6], [8, 2], [5, 6]]


def test_records_of_pairs_are_texts_or_conversations_behind_a_prompt(tokenizer: Any) -> None:
    data = DataRecipe(format="pairs", sequence_length=6)
    columns = {"prompt": "One? ", "chosen": "Two, of course.", "rejected": "system"}
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    said = {name: [{"role": "user", "content": text}] for name, text in columns.items()}
    same = {"chosen": "One", "rejected": "One"}
    documents = [Document(str(index), each) for index, each in enumerate((columns, said, same))]
    (text, conversation), dropped = encode_pairs(data, tokenizer, documents)
    assert dropped == 1
    assert text == conversation
    assert text.chosen == tokenizer("One? Two, of course.")["input_ids"][:6]
    with pytest.raises(RecipeError, match="x must have two texts or two conversations"):
        encode_pairs(data, tokenizer, [Document("x", {**columns, "prompt": said["prompt"]})])


def test_classes_are_names_or_numbers(tokenizer: Any) -> None:
    data = DataRecipe(format="classes", classes=["no", "yes"])
    documents = [Document("a", {"text": "One", "label": label}) for label in ("yes", 0)]
    assert encode_classes(data, tokenizer, documents)["label"] == [1, 0]
    with pytest.raises(RecipeError, match=r"the class of b is 2, but data.classes has no, yes"):
        encode_classes(data, tokenizer, [Document("b", {"text": "One", "label": 2})])


def test_a_rejected_text_has_the_words_of_the_chosen_one() -> None:
    text = "Return the sum of all numbers in a list."
    assert sorted(disordered(text).split()) == sorted(text.split())
    assert disordered(text) == disordered(text) != text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"format": "classes"}, "data.format=classes need each other"),
        ({"format": "pairs", "classes": ["a"]}, "data.format=classes need each other"),
        (
            {"format": "pairs", "source": "stdlib-docs", "packing": True},
            "data.packing=true cannot be used with",
        ),
        (
            {"format": "pairs", "source": "stdlib"},
            "cannot be read with data.format=pairs: use data.format text",
        ),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, Any], message: str) -> None:
    data = DataRecipe(**{"source": "x.jsonl", **values})
    with pytest.raises(RecipeError, match=message):
        check_values(FinetuneRecipe(name="x", base="y", data=data))


def test_a_fallback_with_stages_generates_no_samples() -> None:
    recipe = FinetuneRecipe(name="x", base="y", fallbacks=[{"pp_size": 2}])
    recipe.data = DataRecipe(source="x.jsonl", samples=2)
    with pytest.raises(RecipeError, match="a layout without pipeline stages"):
        check_values(recipe)


def test_a_fallback_has_its_own_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = FinetuneRecipe(
        name="x",
        base="y",
        data=DataRecipe(format="pairs"),
        parallel={"pp_size": 4},
        fallbacks=[{"pp_size": 2}],
    )
    recipe.training.batch_size = 8
    monkeypatch.setenv("RANK", "0")
    for world, expected in (("4", (4, 2)), ("2", (2, 4))):
        monkeypatch.setenv("WORLD_SIZE", world)
        assert microbatches_of_step(recipe, 1) == expected


def test_a_pair_is_never_parted() -> None:
    recipe = FinetuneRecipe(
        name="x", base="y", data=DataRecipe(format="pairs"), parallel={"pp_size": 2}
    )
    recipe.training.batch_size = 8
    assert microbatches_of_step(recipe, 1) == (2, 4)
    recipe.parallel["num_microbatches"] = 4
    assert microbatches_of_step(recipe, 2) == (4, 1)
    with pytest.raises(RecipeError, match="do not divide into 4 microbatches"):
        microbatches_of_step(recipe, 4)
    assert PAIRS.loss is not None
    outputs = type("Outputs", (), {"logits": torch.zeros(3, 1)})
    with pytest.raises(RecipeError, match="must hold whole pairs of texts, got 3"):
        PAIRS.loss(outputs, {"counted": torch.ones(3, dtype=torch.bool)})


@pytest.fixture
def start(saved_tokenizer: Path, tmp_path: Path) -> dict[str, str]:
    """A checkpoint with random weights, and records to make pairs and classes of."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(
        **sizes, vocab_size=320, bos_token_id=1, eos_token_id=0, max_position_embeddings=64
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "base")
    for file in saved_tokenizer.iterdir():
        (tmp_path / "base" / file.name).write_bytes(file.read_bytes())
    with (tmp_path / "records.jsonl").open("w") as stream:
        for index in range(24):
            words = [f"word{(index * 7 + place * place) % 23}" for place in range(4 + index % 5)]
            label = ["even", "odd"][index % 2]
            record = {
                "chosen": " ".join(words),
                "rejected": " ".join(words[::-1]),
                "text": words[0],
                "label": label,
            }
            stream.write(json.dumps(record) + "\n")
    return {
        "base": str(tmp_path / "base"),
        "source": str(tmp_path / "records.jsonl"),
        "runs": str(tmp_path / "runs"),
    }


def run(
    start: dict[str, str],
    name: str,
    data: dict[str, Any],
    layout: dict[str, Any],
    adapter: dict[str, Any],
) -> None:
    """The run of a recipe, on this rank."""
    os.makedirs(start["runs"], exist_ok=True)
    values = {
        "name": str(Path(start["runs"]) / name),
        "base": start["base"],
        "parallel": layout,
        "data": {
            "source": start["source"],
            "sequence_length": 24,
            "validation_fraction": 0.3,
            "validation_sequences": 5,
            **data,
        },
        "adapter": adapter,
        "merge": bool(adapter),
        "training": {
            "steps": 2,
            "batch_size": 4,
            "learning_rate": 5e-3,
            "log_every": 1,
            "evaluate_every": 2,
        },
    }
    finetune(OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(FinetuneRecipe), values)))  # type: ignore[arg-type]


def numbers(start: dict[str, str], name: str) -> list[float]:
    lines = (Path(start["runs"]) / name / "metrics.jsonl").read_text().splitlines()
    kinds = ("loss", "validation_loss", "validation_accuracy", "merged_validation_loss")
    return [record[kind] for record in map(json.loads, lines) for kind in kinds if kind in record]


@pytest.mark.daily("classes")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("data", "adapter", "layouts"),
    [
        pytest.param({"format": "pairs"}, {}, LAYOUTS, id="pairs"),
        pytest.param(
            {"format": "classes", "classes": ["even", "odd"]},
            LORA,
            {"pp2": LAYOUTS["pp2"]},
            id="classes",
        ),
    ],
)
def test_numbers_agree(
    pools: Pools, start: Any, data: Any, adapter: Any, layouts: dict[str, dict[str, Any]]
) -> None:
    run(start, "single", data, {}, adapter)
    expected = numbers(start, "single")
    assert len(expected) == 2 * 2 + 2 + bool(adapter)
    for name, layout in layouts.items():
        pools(2).run(run, start, name, data, layout, adapter)
        assert numbers(start, name) == pytest.approx(expected, rel=1e-5), name
    last = Path(start["runs"]) / name
    model = AutoModelForSequenceClassification.from_pretrained(last / "checkpoint")
    assert model.config.num_labels == (2 if data["format"] == "classes" else 1)
    card = (last / "checkpoint" / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card
    assert "AutoModelForSequenceClassification.from_pretrained" in card
    assert f"**Accuracy {expected[-2 if adapter else -1]:.1%}**" in card


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("adapter", [{}, LORA], ids=["full", "lora"])
def test_results_are_what_plain_libraries_load(pools: Pools, start: Any, adapter: Any) -> None:
    pools(2).run(run, start, "checked", {"format": "pairs"}, {"tp_size": 2}, adapter)
    command = [sys.executable, str(CHECK), f"{start['runs']}/checked"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("accuracy") == 1 + bool(adapter)
