"""Encode texts that are scored or classified as a whole: preference pairs, and texts with a class."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError

from .chat import render
from .corpus import Document
from .schema import DataRecipe, RecipeError


class Pair(NamedTuple):
    """Hold the tokens of the preferred and of the rejected text."""

    chosen: list[int]
    rejected: list[int]


def encode_pairs(data: DataRecipe, tokenizer: Any, documents: Sequence[Document]) -> tuple[list[Pair], int]:
    """Encode pairs of at most ``data.sequence_length`` tokens each, and drop those whose texts are equal after the cut;
    return the pairs, and how many were left out.
    """
    pairs = []
    for document in documents:
        columns = document.columns
        prompt = columns.get(data.prompt_column)
        ids = [
            _encode(tokenizer, prompt, columns[name], document.name)[: data.sequence_length]
            for name in (data.chosen_column, data.rejected_column)
        ]
        pairs.append(Pair(*ids))
    kept = [pair for pair in pairs if pair.chosen != pair.rejected and pair.chosen and pair.rejected]
    return kept, len(pairs) - len(kept)


def _encode(tokenizer: Any, prompt: Any, answer: Any, where: str) -> list[int]:
    whole = answer if prompt is None else prompt + answer if type(prompt) is type(answer) else None
    if isinstance(whole, str):
        return list(tokenizer(whole, verbose=False)["input_ids"])
    if not isinstance(whole, list):
        raise RecipeError(
            f"{where} must have two texts or two conversations, after a prompt of the same kind if there is one: "
            "correct the data, or change data.chosen_column, data.rejected_column and data.prompt_column"
        )
    try:
        return list(render(tokenizer, whole)["input_ids"])
    except (TemplateError, TypeError, ValueError) as error:
        raise RecipeError(
            f"the chat template does not render {where}: {error}; correct the data, or give another data.chat_template"
        ) from error


def encode_classes(data: DataRecipe, tokenizer: Any, documents: Sequence[Document]) -> dict[str, list[Any]]:
    """Encode every text, up to ``data.sequence_length`` tokens, and the number of its class."""
    columns: dict[str, list[Any]] = {"input_ids": [], "label": []}
    for document in documents:
        ids = tokenizer(document.columns[data.text_column], verbose=False)["input_ids"]
        columns["input_ids"].append(ids[: data.sequence_length])
        columns["label"].append(_number(document.columns[data.label_column], data.classes, document.name))
    return columns


def _number(label: Any, classes: Sequence[str], where: str) -> int:
    if isinstance(label, str) and label in classes:
        return classes.index(label)
    if isinstance(label, int) and 0 <= label < len(classes):
        return int(label)
    raise RecipeError(
        f"the class of {where} is {label!r}, and data.classes has {', '.join(classes)} (numbers 0 to "
        f"{len(classes) - 1}): correct data.classes, data.label_column or the data"
    )
