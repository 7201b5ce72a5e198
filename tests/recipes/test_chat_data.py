"""Data sets of conversations and completions: from records to rows on disk."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from hfscale.recipes import corpus
from hfscale.recipes.chat import TEMPLATES
from hfscale.recipes.corpus import questions, read, read_documents
from hfscale.recipes.dataset import prepare
from hfscale.recipes.read import load_recipe
from hfscale.recipes.rows import IGNORED, Rows
from hfscale.recipes.schema import DataRecipe, FinetuneRecipe, RecipeError

SOURCE = '''
def shown(x):
    """Say it
    aloud.

    At length.
    """

def _hidden():
    """Nobody asks."""

class Thing:
    """A thing."""

    async def move(self):
        """Go."""

if True:
    pass
def shown():
    """Again."""
'''


def test_questions_are_about_public_functions_with_docstrings():
    assert list(questions("pack/__init__.py", SOURCE)) == [
        ("pack.shown", "What does pack.shown do?", "Say it aloud."),
        ("pack.Thing.move", "What does pack.Thing.move do?", "Go."),
    ]
    assert [name for name, _, _ in questions("pack/part.py", SOURCE)] == [
        "pack.part.shown",
        "pack.part.Thing.move",
    ]
    assert list(questions("pack/_part.py", SOURCE)) == list(questions("part.py", "no Python")) == []


def test_the_standard_library_answers_questions():
    recipe = {"source": "stdlib-docs", "include": ["json/*"], "validation_fraction": 0.5}
    found = {
        document.name: document.columns
        for part in read(DataRecipe(format="chat", **recipe))
        for document in part
    }
    assert found["json/__init__.py:json.dumps"] == {
        "messages": [
            {"role": "user", "content": "What does json.dumps do?"},
            {"role": "assistant", "content": "Serialize ``obj`` to a JSON formatted ``str``."},
        ]
    }
    first = next(
        read_documents(DataRecipe(format="completion", prompt_column="question", **recipe))
    )
    assert first.columns.keys() == {"question", "completion"}
    assert first.columns["completion"].startswith(" ")


def _conversations(path: Path, count: int = 40) -> None:
    records = []
    for index in range(count):
        answer = " ".join(["word"] * (1 + index % 7))
        turns = [
            {"role": "user", "content": f"Question {index}"},
            {"role": "assistant", "content": answer},
        ]
        records.append(
            {"talk": turns, "text": answer, "prompt": "Question:", "completion": f" {answer}"}
        )
    records[3]["talk"][0]["content"] = "x" * 400  # no room for the answer
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _recipe(tmp_path: Path, **changes: Any) -> DataRecipe:
    path = tmp_path / "talks.jsonl"
    _conversations(path)
    return DataRecipe(
        **{
            **{
                "source": str(path),
                "messages_column": "talk",
                "validation_fraction": 0.2,
                "sequence_length": 96,
            },
            **changes,
        }
    )


def test_rows_of_a_chat_data_set(tokenizer, tmp_path, capsys):
    recipe = _recipe(tmp_path, format="chat", chat_template="plain")
    used, train, _, entropy = prepare(recipe, tokenizer, len(tokenizer), tmp_path / "run")
    assert used.chat_template == TEMPLATES["plain"]
    said = capsys.readouterr().out
    assert "1 dropped since no label was left" in said
    assert set(train.column_names) == {"input_ids", "labels", "position_ids"}
    rows = train[:]
    assert max(len(row) for row in rows["input_ids"]) <= 96
    assert len(rows["input_ids"]) < 30  # several to a row
    for name in ("labels", "position_ids"):
        assert [len(row) for row in rows[name]] == [len(row) for row in rows["input_ids"]]
    for ids, labels, positions in zip(
        rows["input_ids"], rows["labels"], rows["position_ids"], strict=True
    ):
        borders = positions == 0
        assert bool((labels[borders] == IGNORED).all())
        assert tokenizer.decode(ids).count("### User:") == int(borders.sum())
        assert int((labels == tokenizer.eos_token_id).sum()) == int(borders.sum())
    assert 0 < entropy < 3  # of the answers' few words
    again = prepare(recipe, tokenizer, len(tokenizer), tmp_path / "again")
    assert all(
        torch.equal(a, b)
        for a, b in zip(train[:]["input_ids"], again[1][:]["input_ids"], strict=True)
    )


@pytest.mark.parametrize("format", ["completion", "text", "chat"])
def test_rows_with_one_example_each(tokenizer, tmp_path, format):
    template = {"chat_template": "plain"} if format == "chat" else {}
    recipe = _recipe(tmp_path, format=format, packing=False, **template)
    _, train, validation, _ = prepare(recipe, tokenizer, len(tokenizer), tmp_path / "run")
    dropped = format == "chat"
    assert len(train) + len(validation) == 40 - dropped
    batch = Rows(train).batch(list(range(len(train))))
    assert bool((batch["labels"][batch["attention_mask"] == 0] == IGNORED).all())
    counted = tokenizer.decode(
        [label for label in batch["labels"].flatten().tolist() if label != IGNORED]
    )
    assert "Question" not in counted
    assert counted.count("<|endoftext|>") == len(train)


def test_text_may_be_packed_by_document(tokenizer, tmp_path):
    _, stream, _, _ = prepare(_recipe(tmp_path), tokenizer, len(tokenizer), tmp_path / "stream")
    assert stream.column_names == ["input_ids"]
    assert {len(row) for row in stream[:]["input_ids"]} == {96}
    short = _recipe(tmp_path, packing=True, sequence_length=8)
    _, packed, _, _ = prepare(short, tokenizer, len(tokenizer), tmp_path / "packed")
    assert sum(int((row == tokenizer.eos_token_id).sum()) for row in packed[:]["input_ids"]) > 25
    assert all(int(row[0]) == 0 for row in packed[:]["position_ids"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"format": "chat", "messages_column": "messages", "chat_template": "plain"},
            "messages_column='messages' is not",
        ),
        (
            {"format": "completion", "prompt_column": "ask"},
            "data.prompt_column='ask' is not in talks.jsonl:0",
        ),
        (
            {"format": "text", "text_column": "talk"},
            "data.text_column='talk' of talks.jsonl:0 must be a text",
        ),
        (
            {"format": "chat", "chat_template": "plain", "sequence_length": 8},
            "none of the .* examples .* has a label",
        ),
        ({"format": "chat"}, "has none to use by default"),
    ],
)
def test_data_that_does_not_fit_is_refused(tokenizer, tmp_path, changes, message):
    with pytest.raises(RecipeError, match=message):
        prepare(_recipe(tmp_path, **changes), tokenizer, len(tokenizer), tmp_path / "run")


def test_records_come_from_directories_and_the_hub_too(tmp_path, monkeypatch):
    recipe = _recipe(tmp_path, format="chat")
    (tmp_path / "notes.txt").write_text("no conversation")
    recipe.source = str(tmp_path)
    records = [document.columns for part in read(recipe) for document in part]
    assert len(records) == 40
    hub = Dataset.from_list(records)
    monkeypatch.setattr(corpus, "load_dataset", lambda *_, **__: hub)
    recipe.source = "someone/talks"
    assert [document.columns for part in read(recipe) for document in part if part]
    (tmp_path / "talks.jsonl").write_text('{"talk": [}\n')
    recipe.source = str(tmp_path / "talks.jsonl")
    with pytest.raises(RecipeError, match=r"line 1 of talks.jsonl is not JSON"):
        read(recipe)


def test_pretraining_takes_text(tmp_path):
    with pytest.raises(RecipeError, match=r"data.format=chat needs a base model to fine-tune"):
        prepare(_recipe(tmp_path, format="chat"), None, 300, tmp_path / "run")


DEMO = Path(__file__).parents[2] / "scripts" / "recipes" / "demo_chat.yaml"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.format=chats", "data.format='chats' is not known: use text or chat or completion"),
        ("data.train_on=answers", "data.train_on='answers' is not known"),
        (
            "data.format=completion",
            "data.chat_template='plain' has no use with data.format=completion",
        ),
        (
            "data.source=stdlib",
            "data.source=stdlib cannot be read with data.format=chat: use data.format text",
        ),
        ("data.packing=documents", "packing .* impossible value"),
    ],
)
def test_impossible_values_are_named(override, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(FinetuneRecipe, DEMO, [override])
