"""Generate answers before and after training, to questions about pictures or as continuations, for the model card."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from torch import Tensor

from .pictures import opened, processed
from .rows import IGNORED

_NEW_TOKENS = 24
_PROMPT = 32  # tokens of a text that has labels from its beginning


class Sample(NamedTuple):
    """Hold a prompt (with a picture, if any), the expected answer, and the model's answers."""

    picture: bytes
    question: str
    wanted: str
    before: str
    after: str

    @property
    def is_right(self) -> bool:
        """Return whether the answer after training is the expected one."""
        return self.after == self.wanted

    @property
    def was_right(self) -> bool:
        """Return whether the answer before training was."""
        return self.before == self.wanted


@torch.no_grad()
def answers(model: Any, reader: Any, data: Dataset, number: int) -> list[str]:
    """Return the most likely answers to the first ``number`` rows; call it on every rank. ``reader`` is the processor,
    where rows have pictures, else the tokenizer.
    """
    found: list[str] = []
    if not number:
        return found
    model.eval()
    for row in data.select(range(min(number, len(data)))):
        if "images" in row:
            inputs = processed(reader, [row["prompt"]], [[opened(image) for image in row["images"]]])
        else:
            asked, _ = _parts(row)
            inputs = {"input_ids": asked[None], "attention_mask": torch.ones_like(asked)[None]}
        inputs = {name: value.to(model.device) for name, value in inputs.items()}
        end = getattr(reader, "tokenizer", reader).eos_token_id
        said = model.generate(**inputs, max_new_tokens=_NEW_TOKENS, do_sample=False, pad_token_id=end)
        found.append(_text(reader, said[0][inputs["input_ids"].shape[1] :]))
    return found


def samples(reader: Any, data: Dataset, before: Sequence[str], after: Sequence[str]) -> list[Sample]:
    """Return the model's answers with their prompts and the expected texts."""
    found = []
    for row, *said in zip(data.select(range(len(before))), before, after, strict=True):
        if "images" in row:
            found.append(Sample(row["images"][0] if row["images"] else b"", row["question"], row["answer"], *said))
        else:
            found.append(Sample(b"", *(_text(reader, part) for part in _parts(row)), *said))
    return found


def _parts(row: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the prompt of a row and the text that follows: from its labels on, or from the middle of a plain text."""
    ids: Tensor = row["input_ids"]
    if "position_ids" in row:  # packed: the first example
        ids = ids[: 1 + _first(row["position_ids"][1:] == 0)]
    labels = row["labels"][: len(ids)] if "labels" in row else ids
    start = _first(labels != IGNORED)
    start = start if start > 1 else min(_PROMPT, len(ids) // 2)
    end = start + min(_NEW_TOKENS, _first(labels[start:] == IGNORED))
    return ids[:start], ids[start:end]


def _first(found: Tensor) -> int:
    """Return the index of the first true entry, or the length if there is none."""
    return int(found.int().argmax()) if found.any() else len(found)


def _text(reader: Any, tokens: Tensor) -> str:
    return str(reader.decode(tokens, skip_special_tokens=True)).strip()


def write_pictures(shown: Sequence[Sample], directory: Path) -> None:
    """Write the pictures beside a card."""
    for index, sample in enumerate(shown):
        if sample.picture:
            opened(sample.picture).save(directory / f"sample-{index}.png")
