"""Data sets of the hub's ids, made here: rows of the columns that a set's name and configuration say."""

from typing import Any

import datasets

SUBJECTS = (
    "flat",
    "sparse",
    "explicit",
    "simple",
    "beautiful",
    "readable",
    "practical",
    "clear",
    "short",
    "quiet",
    "honest",
    "obvious",
    "early",
    "loud",
    "small",
    "open",
    "tested",
    "typed",
    "named",
)
TRAIN = 17
"""Rows of a training split; the others, two, are the test split."""


def make_rows(name: str, configuration: str | None) -> datasets.DatasetDict:
    """Return both splits of the hub's data set ``name``."""
    short = name.rpartition("/")[2]
    if short.startswith("zen"):
        rows = [
            _zen_row(configuration or "", index, pictures=_PICTURES.get(short, 0))
            for index in range(len(SUBJECTS))
        ]
    elif short in ("toolcall", "harmony"):
        rows = [_tool_row(configuration or "", index, short) for index in range(len(SUBJECTS))]
    elif short == "imdb":
        rows = [{"text": _sentence(index), "label": index % 2} for index in range(len(SUBJECTS))]
    elif "quotes" in short:
        rows = [
            {"quote": _sentence(index), "author": "nobody", "tags": ["made"]}
            for index in range(len(SUBJECTS))
        ]
    elif short == "dolly-chatml-sft":
        rows = [
            {"conversation": f"<|im_start|>user\n{_sentence(index)}<|im_end|>\n"}
            for index in range(len(SUBJECTS))
        ]
    else:
        raise LookupError(f"no rows are made for the data set {name!r}")
    whole = datasets.Dataset.from_list(rows)
    if whole.features.get("images") is not None or whole.features.get("image") is not None:
        whole = _as_pictures(whole)
    return datasets.DatasetDict(
        train=whole.select(range(TRAIN)), test=whole.select(range(TRAIN, len(SUBJECTS)))
    )


_PICTURES = {"zen-image": 1, "zen-multi-image": 2}


def _sentence(index: int) -> str:
    return f"What is {SUBJECTS[index]} is better than what is {SUBJECTS[index - 1]}."


def _zen_row(configuration: str, index: int, pictures: int) -> dict[str, Any]:
    form, _, kind = configuration.partition("_")
    question = f"What is better than {SUBJECTS[index - 1]}?"
    good = f" It is {SUBJECTS[index]}."
    bad = " I do not know."
    said = index % 2 == 0
    conversational = form == "conversational"
    prompt: Any = [_message("user", question)] if conversational else question
    chosen: Any = [_message("assistant", good.strip())] if conversational else good
    rejected: Any = [_message("assistant", bad.strip())] if conversational else bad
    columns = {
        "language_modeling": {"messages" if conversational else "text": prompt + chosen},
        "prompt_only": {"prompt": prompt},
        "prompt_completion": {"prompt": prompt, "completion": chosen},
        "preference": {"prompt": prompt, "chosen": chosen, "rejected": rejected},
        "implicit_prompt_preference": {"chosen": prompt + chosen, "rejected": prompt + rejected},
        "unpaired_preference": {
            "prompt": prompt,
            "completion": chosen if said else rejected,
            "label": said,
        },
        "stepwise_supervision": {
            "prompt": prompt,
            "completions": [good, bad],
            "labels": [True, False],
        },
    }
    row: dict[str, Any] = columns[kind]
    if pictures == 1:
        row["image"] = index
    if pictures > 1:
        row["images"] = [index] * (1 + index % pictures)
    return row


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _tool_row(configuration: str, index: int, name: str) -> dict[str, Any]:
    subject = SUBJECTS[index]
    asked = [_message("user", f"How {subject} is it?")]
    call = {"type": "function", "function": {"name": "measure", "arguments": {"what": subject}}}
    answer: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "name": "measure", "content": str(index)},
        _message("assistant", f"It is {index} of {len(SUBJECTS)}."),
    ]
    if name == "harmony":
        answer = [
            {"role": "assistant", "thinking": f"I count {index}.", "content": f"It is {index}."}
        ]
    other = [_message("assistant", "I do not know.")]
    columns: dict[str, dict[str, Any]] = {
        "language_modeling": {"messages": asked + answer},
        "prompt_completion": {"prompt": asked, "completion": answer},
        "preference": {"prompt": asked, "chosen": answer, "rejected": other},
    }
    return {**columns[configuration], **({"tools": [_TOOL]} if name == "toolcall" else {})}


_TOOL = {
    "type": "function",
    "function": {
        "name": "measure",
        "description": "Measure how much of it there is.",
        "parameters": {
            "type": "object",
            "properties": {"what": {"type": "string", "description": "What is measured."}},
            "required": ["what"],
        },
        "return": {"type": "integer", "description": "How much there is."},
    },
}


def _as_pictures(rows: datasets.Dataset) -> datasets.Dataset:
    """Return the rows with pictures in place of their numbers."""
    from PIL import Image

    def drawn(number: int) -> Any:
        return Image.new("RGB", (32 + number, 40), (8 * number, 100, 200 - 8 * number))

    made: list[dict[str, Any]] = []
    for row in rows:
        numbers = row.get("images")
        changed = (
            {"image": drawn(row["image"])}
            if numbers is None
            else {"images": [drawn(each) for each in numbers]}
        )
        made.append({**row, **changed})
    features = rows.features.copy()
    if "image" in features:
        features["image"] = datasets.Image()
    else:
        features["images"] = datasets.List(datasets.Image())
    return datasets.Dataset.from_list(made, features=features)


def stand_in() -> None:
    """Let ``datasets.load_dataset`` give the rows that are made here; what it reads from a disk stays."""
    stock = datasets.load_dataset

    def load_dataset(
        path: str, name: str | None = None, *args: Any, split: str | None = None, **kwargs: Any
    ) -> Any:
        streaming = kwargs.get("streaming", False)
        try:
            made: Any = make_rows(path, name)
        except LookupError:
            return stock(path, name, *args, split=split, **kwargs)
        if split is not None:
            made = _split(made, split)
        if not streaming:
            return made
        if split is not None:
            return made.to_iterable_dataset()
        return datasets.IterableDatasetDict(
            {key: rows.to_iterable_dataset() for key, rows in made.items()}
        )

    datasets.load_dataset = load_dataset


def _split(made: datasets.DatasetDict, asked: str) -> datasets.Dataset:
    """Return what ``train``, ``train[:2]`` or ``train[:10%]`` names."""
    name, _, part = asked.partition("[:")
    rows = made[name]
    if not part:
        return rows
    number = part.removesuffix("]")
    count = len(rows) * int(number[:-1]) // 100 if number.endswith("%") else int(number)
    return rows.select(range(min(max(count, 1), len(rows))))
