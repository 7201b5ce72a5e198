"""Questions about pictures, answered by the model before and after training: what the card shows of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset

from .pictures import opened, processed

_NEW_TOKENS = 24


class Sample(NamedTuple):
    """A picture, what is asked about it, what is wanted, and what the model says."""

    picture: bytes
    question: str
    wanted: str
    before: str
    after: str


@torch.no_grad()
def answers(model: Any, processor: Any, data: Dataset, number: int) -> list[str]:
    """The most likely answers to the first ``number`` questions; call it on every rank."""
    model.eval()
    found = []
    for row in data.select(range(min(number, len(data)))):
        inputs = processed(processor, [row["prompt"]], [[opened(image) for image in row["images"]]])
        asked = inputs["input_ids"].shape[1]
        inputs = {name: value.to(model.device) for name, value in inputs.items()}
        said = model.generate(**inputs, max_new_tokens=_NEW_TOKENS, do_sample=False)
        found.append(str(processor.decode(said[0][asked:], skip_special_tokens=True)).strip())
    return found


def samples(data: Dataset, before: Sequence[str], after: Sequence[str]) -> list[Sample]:
    """The same beside what was asked and wanted."""
    rows = data.select(range(len(before)))
    return [
        Sample(row["images"][0] if row["images"] else b"", row["question"], row["answer"], *said)
        for row, *said in zip(rows, before, after, strict=True)
    ]


def write_pictures(shown: Sequence[Sample], directory: Path) -> None:
    """Put the pictures beside a card."""
    for index, sample in enumerate(shown):
        if sample.picture:
            opened(sample.picture).save(directory / f"sample-{index}.png")


def describe_samples(shown: Sequence[Sample]) -> str:
    """A section of the card; nothing without samples."""
    if not shown:
        return ""
    rows = [
        f"| {f'![picture](sample-{index}.png)' if sample.picture else ''} | "
        + " | ".join(text.replace("|", "/").replace("\n", " ") for text in sample[1:])
        + " |"
        for index, sample in enumerate(shown)
    ]
    head = ["| picture | asked | wanted | before training | after training |", "|---|---|---|---|---|"]
    right = sum(sample.after == sample.wanted for sample in shown)
    earlier = sum(sample.before == sample.wanted for sample in shown)
    total = f"Of these {len(shown)}, the first of those to validate on, {right} are right, and {earlier} were before."
    return "\n".join(["\n## Answers\n", *head, *rows, "", total, ""])
