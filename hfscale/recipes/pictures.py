"""Encode conversations with pictures by the processor of a vision-language model, and let models answer samples for the
model card.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from jinja2 import TemplateError
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .chat import by_prefixes
from .corpus import Document
from .rows import IGNORED, Rows
from .schema import DataRecipe, RecipeError

Columns = dict[str, list[Any]]
_NEW_TOKENS = 24  # largest number of tokens of an answer
_PROMPT = 32  # prompt tokens taken from a text whose labels begin at its start


def encode_pictures(
    data: DataRecipe, processor: Any, documents: Sequence[Document], use: str
) -> Columns:
    """Encode conversations with pictures as columns of a data set; ``use`` names the rows in messages ("training").
    Conversations that are longer than ``data.sequence_length`` tokens, or have no label, are dropped.

    The columns are: ``text``, the conversation rendered by the chat template; ``images``, the pictures' files as bytes;
    ``labels`` of the tokens into which the processor encodes text and pictures; ``prompt``, the conversation rendered
    without its last turn; ``question`` and ``answer``, the text of the last two turns.
    """
    columns: Columns = {
        name: [] for name in ("text", "images", "labels", "prompt", "question", "answer")
    }
    for document in documents:
        messages = document.columns[data.messages_column]
        stored = document.columns[data.images_column or ""]
        try:
            images = [_bytes(image, data, document.name) for image in stored or ()]
            text = render(processor, messages)
            labels = _labels(
                processor, messages, text, [opened(image) for image in images], data.train_on
            )
            asked = (
                render(processor, messages[:-1], answer=True),
                _text_of_turns(messages[-2:-1]),
                _text_of_turns(messages[-1:]),
            )
        except (
            TemplateError,
            TypeError,
            KeyError,
            ValueError,
            IndexError,
            UnidentifiedImageError,
        ) as error:
            raise RecipeError(
                f"{document.name} is no conversation with its pictures, in the form that the base's processor reads: "
                f"{type(error).__name__}: {error}; correct the data, data.messages_column or data.images_column"
            ) from error
        if len(labels) <= data.sequence_length and any(label != IGNORED for label in labels):
            for name, value in zip(columns, (text, images, labels, *asked), strict=True):
                columns[name].append(value)
    kept = len(columns["text"])
    dropped = len(documents) - len(columns["text"])
    if not kept:
        raise RecipeError(
            f"none of the {dropped} {use} conversations both has labels and fits into "
            f"data.sequence_length={data.sequence_length} tokens, pictures included: use longer sequences"
        )
    print(
        f"{use}: {kept:,} conversations; {dropped:,} dropped, too long or without a label",
        flush=True,
    )
    return columns


def render(processor: Any, messages: Any, answer: bool = False) -> str:
    """Render a conversation by the chat template as text, with placeholders for pictures; with ``answer``, the
    generation prompt follows.
    """
    return str(
        processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer)
    )


def processed(
    processor: Any, texts: Sequence[str], images: Sequence[Sequence[Any]]
) -> dict[str, Tensor]:
    """Return the arguments of a forward pass that the processor makes from rendered texts and their pictures, padded on
    the right.
    """
    start = getattr(processor.tokenizer, "bos_token", None)
    batch = processor(
        text=list(texts),
        images=[list(image) for image in images] if any(images) else None,
        padding=True,
        return_tensors="pt",
        add_special_tokens=not (start and texts[0].startswith(start)),
        padding_side="right",
    )
    return dict(batch)


def opened(image: bytes) -> Image.Image:
    """Return the picture that ``image`` encodes (PNG, JPEG, ...), in RGB."""
    return Image.open(io.BytesIO(image)).convert("RGB")


def _labels(
    processor: Any, messages: Any, text: str, images: list[Any], train_on: str
) -> list[int]:
    """Return labels for all tokens of a conversation with pictures. Only the assistant's turns have labels; with
    ``train_on="all"``, all tokens except the first have labels.
    """

    def tokens(text: str, images: list[Any]) -> list[int]:
        return [int(token) for token in processed(processor, [text], [images])["input_ids"][0]]

    def first(number: int, answer: bool) -> list[int]:
        shown = sum(part["type"] == "image" for part in _texts_and_pictures(messages[:number]))
        return tokens(render(processor, messages[:number], answer=answer), images[:shown])

    ids = tokens(text, images)
    return [IGNORED, *ids[1:]] if train_on == "all" else by_prefixes(ids, messages, first)


def _text_of_turns(messages: Sequence[Any]) -> str:
    """Return the text of several turns without their pictures."""
    return " ".join(
        part["text"] for part in _texts_and_pictures(messages) if part["type"] == "text"
    ).strip()


def _texts_and_pictures(messages: Sequence[Any]) -> list[Any]:
    """Return the content of several turns as one list of text and picture entries, in order."""
    contents = (message["content"] for message in messages)
    return [
        part
        for content in contents
        for part in (content if isinstance(content, list) else [{"type": "text", "text": content}])
    ]


def _bytes(image: Any, data: DataRecipe, where: str) -> bytes:
    """Return the bytes of a picture's file. ``image`` is a path relative to the data source, or the picture itself: a
    dict with ``bytes``, or a PIL image, as Hub data sets yield them.
    """
    if isinstance(image, str):
        source = Path(data.source)
        path = (source if source.is_dir() else source.parent) / image
        if not path.is_file():
            raise RecipeError(
                f"{where} names the picture {image!r}, but there is no file {path}: correct the path"
            )
        return path.read_bytes()
    if isinstance(image, dict) and image.get("bytes"):
        return bytes(image["bytes"])
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return stream.getvalue()


class PictureRows(Rows):
    """Provide conversations with pictures for training and evaluation. The processor encodes each microbatch only when
    it is needed, since pixel values are large.
    """

    def __init__(self, data: Dataset, processor: Any) -> None:
        super().__init__(data)
        self._processor = processor

    def step(
        self, rows: list[int], size: int, counted: int | None = None
    ) -> list[dict[str, Tensor]]:
        """Encode ``rows`` as the microbatches of one step, of ``size`` rows each. Only the first ``counted`` rows
        (default: all) have labels.
        """
        number = len(rows) if counted is None else counted
        starts = range(0, len(rows), size)
        return [self._microbatch(rows[start : start + size], number - start) for start in starts]

    def _microbatch(self, rows: list[int], counted: int) -> dict[str, Tensor]:
        columns: dict[str, Any] = self._data[rows]
        images = [[opened(image) for image in each] for each in columns["images"]]
        batch = processed(self._processor, columns["text"], images)
        labels = pad_sequence(list(columns["labels"]), batch_first=True, padding_value=IGNORED)
        if labels.shape != batch["input_ids"].shape:
            raise RecipeError(
                "the processor must encode the conversations of a microbatch to the same shape together and one by "
                f"one, got {tuple(batch['input_ids'].shape)} together and {tuple(labels.shape)} one by one: use "
                "training.microbatch_size=1"
            )
        labels[max(counted, 0) :] = IGNORED
        return {**batch, "labels": labels.to(torch.long)}


class Sample(NamedTuple):
    """Hold a sample for the model card: a prompt with its picture, if any, the expected answer, and the model's answers
    before and after training.
    """

    picture: bytes
    question: str
    wanted: str
    before: str
    after: str


@torch.no_grad()
def answers(model: Any, reader: Any, data: Dataset, number: int) -> list[str]:
    """Return the model's greedy answers to the prompts in the first ``number`` rows; call it on every rank.

    ``reader`` is the model's tokenizer or processor.
    """
    texts: list[str] = []
    if not number:
        return texts
    model.eval()
    for row in data.select(range(min(number, len(data)))):
        if "images" in row:
            inputs = processed(
                reader, [row["prompt"]], [[opened(image) for image in row["images"]]]
            )
        else:
            asked, _ = _asked_and_wanted(row)
            inputs = {"input_ids": asked[None], "attention_mask": torch.ones_like(asked)[None]}
        inputs = {name: value.to(model.device) for name, value in inputs.items()}
        end = getattr(reader, "tokenizer", reader).eos_token_id
        said = model.generate(
            **inputs, max_new_tokens=_NEW_TOKENS, do_sample=False, pad_token_id=end
        )
        texts.append(
            _text(
                reader,
                said[0][inputs["input_ids"].shape[1] :],
            )
        )
    return texts


def samples(
    reader: Any, data: Dataset, before: Sequence[str], after: Sequence[str]
) -> list[Sample]:
    """Return samples for the model card: the model's answers ``before`` and ``after`` training, with their prompts and
    expected answers.
    """
    drawn = []
    for row, *said in zip(
        data.select(range(len(before))),
        before,
        after,
        strict=True,
    ):
        if "images" in row:
            drawn.append(
                Sample(
                    row["images"][0] if row["images"] else b"",
                    row["question"],
                    row["answer"],
                    *said,
                )
            )
        else:
            drawn.append(
                Sample(b"", *(_text(reader, part) for part in _asked_and_wanted(row)), *said)
            )
    return drawn


def _asked_and_wanted(row: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the tokens of a row's prompt, and the expected tokens after it, at most 24; of a packed row, those of its
    first example. The prompt ends where the labels begin; if all tokens have labels, it is the first half, at most 32
    tokens.
    """
    ids: Tensor = row["input_ids"]
    if "position_ids" in row:  # packed: the first example
        ids = ids[: 1 + _first(row["position_ids"][1:] == 0)]
    labels = row["labels"][: len(ids)] if "labels" in row else ids
    start = _first(labels != IGNORED)
    start = start if start > 1 else min(_PROMPT, len(ids) // 2)
    end = start + min(_NEW_TOKENS, _first(labels[start:] == IGNORED))
    return ids[:start], ids[start:end]


def _first(found: Tensor) -> int:
    return int(found.int().argmax()) if found.any() else len(found)


def _text(reader: Any, tokens: Tensor) -> str:
    return str(reader.decode(tokens, skip_special_tokens=True)).strip()
