"""Read the documents of a data source, and split them into training and validation, the same on every machine."""

import ast
import json
import random
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from datasets import load_dataset

from .schema import FORMATS, DataRecipe, RecipeError

# Directories of the standard library that are not hand-written library code: tests, tables, tools, other packages.
_NOT_LIBRARY = {
    "test",
    "tests",
    "idle_test",
    "__pycache__",
    "site-packages",
    "dist-packages",
    "__phello__",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "turtledemo",
}


class Document(NamedTuple):
    """Hold one record of a data source: its columns, and a name (its file, number or function) that is the same on
    every machine.
    """

    name: str
    columns: dict[str, Any]


def is_for_validation(name: str, fraction: float) -> bool:
    """Return whether a document belongs to the validation data. The choice depends only on a hash of its name, so it is
    the same in every run.
    """
    return zlib.crc32(name.encode()) / 2**32 < fraction


def is_wanted(name: str, include: list[str], exclude: list[str]) -> bool:
    """Return whether a document's ``name`` matches a pattern of ``include`` (any name, if that is empty) and no pattern
    of ``exclude``, both patterns like ``asyncio/*``.
    """
    included = not include or any(fnmatchcase(name, pattern) for pattern in include)
    return included and not any(fnmatchcase(name, pattern) for pattern in exclude)


def read(data: DataRecipe) -> tuple[list[Document], list[Document]]:
    """Return the training and the validation documents, in an order that is the same on every machine."""
    train: list[Document] = []
    validation: list[Document] = []
    for document in read_documents(data):
        if is_wanted(document.name, data.include, data.exclude):
            kept_out = is_for_validation(document.name, data.validation_fraction)
            (validation if kept_out else train).append(document)
    if not train or not validation:
        raise RecipeError(
            f"data.source={data.source!r} has {len(train)} document(s) to train on and {len(validation)} to validate "
            "on, but a run needs at least one of each: give more documents, or change data.validation_fraction, "
            "data.include or data.exclude"
        )
    return train, validation


def read_documents(data: DataRecipe) -> Iterator[Document]:
    """Yield all documents of the recipe's data source (a directory, a file, a Hub data set, ...), in a fixed order."""
    path = Path(data.source)
    if data.source == "stdlib":
        for name, text in _standard_library():
            yield Document(name, {data.text_column: text})
    elif data.source == "stdlib-docs":
        yield from _standard_library_questions(data)
    elif path.is_dir():
        for file in sorted(path.rglob("*")):
            relative = file.relative_to(path)
            if file.is_file() and not any(part.startswith(".") for part in relative.parts):
                yield from _file(file, relative.as_posix(), data, split=False)
    elif path.is_file():
        yield from _file(path, path.name, data, split=True)
    else:
        yield from _hub(data)


def _standard_library() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        text = None if _NOT_LIBRARY.intersection(relative.parts) else _text(path)
        if text:
            yield relative.as_posix(), text


def _standard_library_questions(data: DataRecipe) -> Iterator[Document]:
    for path, text in _standard_library():
        for name, question, answer in questions(path, text):
            turns = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            record = {
                data.messages_column: turns,
                data.prompt_column: question,
                data.completion_column: f" {answer}",
            }
            record |= {"answer": answer} if data.format == "prompts" else {}
            if data.format == "pairs":
                record |= {
                    data.chosen_column: f" {answer}",
                    data.rejected_column: f" {disordered(answer)}",
                }
            yield from _document(f"{path}:{name}", record, data)


def _file(path: Path, name: str, data: DataRecipe, split: bool) -> Iterator[Document]:
    """Yield the documents of one file: each record of a JSONL file, or a text file as one document. With ``split``,
    each paragraph of a text file is a document. Yield nothing for other files.
    """
    is_records = path.suffix == ".jsonl"
    text = _text(path) if is_records or data.format == "text" else None
    if text is None:
        return
    parts = text.split("\n\n") if split else [text]
    records = _records(text, name) if is_records else ({data.text_column: part} for part in parts)
    for index, record in enumerate(records):
        yield from _document(f"{name}:{index}", record, data)


def _records(text: str, name: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise RecipeError(
                    f"line {number} of {name} is not JSON: {error}; write one JSON object per line"
                ) from error
            if not isinstance(record, dict):
                raise RecipeError(
                    f"line {number} of {name} is not a record with named columns: {line[:200]}: write a JSON object "
                    "that maps names to values"
                )
            yield record


def _document(
    name: str,
    record: dict[str, Any],
    data: DataRecipe,
) -> Iterator[Document]:
    """Yield one document with the columns of ``record`` that ``data.format`` needs, unless its text is blank."""
    _check_columns(name, list(record), data)
    # Reward functions may read any column.
    wanted = list(record) if data.format == "prompts" else needed_columns(data).values()
    columns = {column: record[column] for column in wanted}
    if data.format == "pairs" and data.prompt_column in record:
        columns[data.prompt_column] = record[data.prompt_column]
    if data.format in ("text", "classes"):
        text = columns[data.text_column]
        if not isinstance(text, str):
            raise RecipeError(
                f"data.text_column={data.text_column!r} of {name} must be a text, got {str(text)[:200]!r}: correct the "
                "data or the column"
            )
        if not text.strip():
            return
    yield Document(name, columns)


def needed_columns(data: DataRecipe) -> dict[str, str]:
    """Return the columns that ``data.format`` needs, by the recipe's key that names each (``text_column``, ...)."""
    if data.images_column is not None:
        return {"messages_column": data.messages_column, "images_column": data.images_column}
    return {field: getattr(data, field) for field in FORMATS[data.format]}


def _check_columns(name: str, found: list[str], data: DataRecipe) -> None:
    for field, column in needed_columns(data).items():
        if column not in found:
            raise RecipeError(
                f"data.{field}={column!r} is not in {name}: its records have {', '.join(found)}; name one of these"
            )


def _hub(data: DataRecipe) -> Iterator[Document]:
    try:
        dataset = load_dataset(data.source, data.subset, split=data.split)
    except Exception as error:  # of any type: the Hub, the network and loaders raise their own
        raise RecipeError(
            f"data.source={data.source!r} is neither 'stdlib' nor 'stdlib-docs', nor an existing file or directory, "
            f"nor a data set on the Hub ({type(error).__name__}: {error}): correct data.source, data.subset or "
            "data.split"
        ) from error
    _check_columns(data.source, dataset.column_names, data)
    for index, record in enumerate(dataset):
        yield from _document(f"{data.source}:{index}", record, data)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def questions(path: str, source: str) -> Iterator[tuple[str, str, str]]:
    """Yield ``(name, question, answer)`` for each documented public function of a Python module: the function's name,
    the question what the function does, and the first paragraph of its docstring as the answer.
    """
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    if any(part.startswith("_") for part in parts):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes in the parsed strings
            tree = ast.parse(source)
    except SyntaxError:
        return
    seen = set()
    for name, docstring in _documented(tree, ".".join(parts)):
        answer = " ".join(docstring.split("\n\n")[0].split())
        if answer and name not in seen:  # some functions are defined once per operating system
            seen.add(name)
            yield name, f"What does {name} do?", answer


def disordered(text: str) -> str:
    """Return the words of a text in random order, which is the same in every run: a worse answer, for the rejected text
    of a preference pair.
    """
    words = text.split()
    random.Random(text).shuffle(words)
    return " ".join(words)


def _documented(owner: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, str]]:
    for node in owner.body:
        if not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ) or node.name.startswith("_"):
            continue
        name = f"{prefix}.{node.name}"
        if isinstance(node, ast.ClassDef):
            yield from _documented(node, name)
        elif docstring := ast.get_docstring(node):
            yield name, docstring
