"""Where text comes from: documents of a source, each to train on or to validate on, the same on every machine."""

import json
import sysconfig
import zlib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from datasets import load_dataset

from .recipe import DataRecipe, RecipeError

# Parts of the standard library that are not library code written by hand: tests, tables, tools, other packages.
_NOT_LIBRARY = {
    *("test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "__phello__"),
    *("encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "turtledemo"),
}


class Document(NamedTuple):
    """A text, and a name for it that does not depend on the machine."""

    name: str
    text: str


def is_for_validation(name: str, fraction: float) -> bool:
    """Whether a document of this name is kept out of training: by its name alone, so that every run agrees."""
    return zlib.crc32(name.encode()) / 2**32 < fraction


def is_wanted(name: str, include: list[str], exclude: list[str]) -> bool:
    """Whether the patterns of a recipe select a document of this name."""
    included = not include or any(fnmatchcase(name, pattern) for pattern in include)
    return included and not any(fnmatchcase(name, pattern) for pattern in exclude)


def read_texts(data: DataRecipe) -> tuple[list[str], list[str]]:
    """The texts to train on and those to validate on, in an order that does not depend on the machine.

    Raises:
        RecipeError: the source is not there, or has nothing to train or to validate on.
    """
    train: list[str] = []
    validation: list[str] = []
    for document in read_documents(data):
        if is_wanted(document.name, data.include, data.exclude):
            kept_out = is_for_validation(document.name, data.validation_fraction)
            (validation if kept_out else train).append(document.text)
    if not train or not validation:
        raise RecipeError(
            f"data.source={data.source!r} has {len(train)} document(s) to train on and {len(validation)} to validate "
            "on, and a run needs some of each: give more documents, or change data.validation_fraction, data.include "
            "or data.exclude"
        )
    return train, validation


def read_documents(data: DataRecipe) -> Iterator[Document]:
    """The documents of ``data.source``, in a fixed order."""
    if data.source == "stdlib":
        return _standard_library()
    path = Path(data.source)
    if path.is_dir():
        return _directory(path, data.text_column)
    if path.is_file():
        return _file(path, path.name, data.text_column, split=True)
    return _hub(data)


def _standard_library() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        text = None if _NOT_LIBRARY.intersection(relative.parts) else _text(path)
        if text:
            yield Document(relative.as_posix(), text)


def _directory(root: Path, text_column: str) -> Iterator[Document]:
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        if path.is_file() and not any(part.startswith(".") for part in relative.parts):
            yield from _file(path, relative.as_posix(), text_column, split=False)


def _file(path: Path, name: str, text_column: str, split: bool) -> Iterator[Document]:
    """Records of a JSONL file; a text file whole, or split at blank lines. Nothing if it is not text."""
    text = _text(path)
    if text is None:
        return
    if path.suffix == ".jsonl":
        records = [json.loads(line) for line in text.splitlines() if line.strip()]
        if records and text_column not in records[0]:
            raise RecipeError(
                f"data.text_column={text_column!r} is not in {name}: its records have {', '.join(records[0])}"
            )
        parts = [record[text_column] for record in records]
    else:
        parts = text.split("\n\n") if split else [text]
    for index, part in enumerate(parts):
        if part.strip():
            yield Document(f"{name}:{index}", part)


def _hub(data: DataRecipe) -> Iterator[Document]:
    try:
        dataset = load_dataset(data.source, data.subset, split=data.split)
    except Exception as error:  # whatever the Hub, the network or the data set's own loader raises
        raise RecipeError(
            f"data.source={data.source!r} is neither 'stdlib', nor a file or directory here, nor a data set that the "
            f"Hub gave ({type(error).__name__}: {error}): correct data.source, data.subset or data.split"
        ) from error
    if data.text_column not in dataset.column_names:
        raise RecipeError(
            f"data.text_column={data.text_column!r} is not in {data.source}: it has {', '.join(dataset.column_names)}"
        )
    for index, record in enumerate(dataset):
        yield Document(f"{data.source}:{index}", record[data.text_column])


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
