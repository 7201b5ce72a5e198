"""Tokenize documents and write them to disk as rows of a data set; train the tokenizer for pretraining."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, disable_progress_bars, load_from_disk
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .chat import (
    Pair,
    encode_chat,
    encode_classes,
    encode_completion,
    encode_pairs,
    set_chat_template,
)
from .corpus import Document, needed_columns, read
from .main_process import on_main
from .pictures import encode_pictures
from .rows import IGNORED, Example, cut, packed_rows, separate_rows
from .schema import DataRecipe, RecipeError

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0  # the only special token; special tokens come first in the vocabulary

_AT_ONCE = 64


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer (like GPT-2's) with one special token, :data:`END_OF_TEXT`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() > vocab_size:
        raise RecipeError(
            f"model.vocab_size={vocab_size} is too small, because every byte needs a token: use "
            f"{tokenizer.get_vocab_size()} "
            "or more"
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def pack(
    documents: Iterable[list[int]],
    end: int,
    length: int,
) -> np.ndarray:
    """Concatenate tokenized documents, each followed by the token ``end``, and split the result into rows of ``length``
    tokens. An incomplete last row is dropped.
    """
    pieces = [np.asarray([*tokens, end], dtype=np.int32) for tokens in documents]
    stream = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int32)
    rows = len(stream) // length
    return stream[: rows * length].reshape(rows, length)


def unigram_entropy(tokens: np.ndarray) -> float:
    """Return the entropy of the token frequencies in ``tokens``, in nats per token.

    This is the loss of a model that predicts each token by its frequency alone.
    """
    counts = np.bincount(np.asarray(tokens).reshape(-1))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def prepare(
    data: DataRecipe, tokenizer: Any | None, vocab_size: int, directory: Path
) -> tuple[Any, Dataset, Dataset, float]:
    """Write tokenized data into ``directory`` on rank 0, and read it on all ranks. Call it on every rank; the file
    system must be shared. If ``tokenizer`` is ``None``, a tokenizer of ``vocab_size`` is trained and written too.

    Return the tokenizer, the training rows, the validation rows, and a baseline to compare the validation loss with:
    the loss of a trivial predictor, such as one that knows only how frequent each token is.
    """
    disable_progress_bars()  # they would disturb the progress bar of training
    if tokenizer is None and data.format != "text":
        raise RecipeError(
            f"data.format={data.format} needs a base model to fine-tune, but this recipe pretrains: use "
            "data.format=text"
        )
    if data.format == "chat" or data.chat_template is not None:
        set_chat_template(tokenizer, data)
    on_main(lambda: _write(data, tokenizer, vocab_size, directory))
    if tokenizer is None:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory / "tokenizer")
    train, validation = (
        load_from_disk(str(directory / "data" / part)) for part in ("train", "validation")
    )
    train = train.with_format("torch")
    validation = validation.with_format("torch")
    return tokenizer, train, validation, _baseline(data, validation.with_format("numpy"))


def _baseline(data: DataRecipe, validation: Dataset) -> float:
    """Return the loss of a trivial predictor on the validation rows, to compare the model's validation loss with. For
    preference pairs it is ``log 2``; otherwise it is the entropy of the frequencies of classes or of labels.
    """
    if data.format == "pairs":
        return math.log(2)
    if data.format == "classes":
        return unigram_entropy(validation[:]["label"])
    labels = np.concatenate(validation[:]["input_ids" if data.is_stream else "labels"])
    return unigram_entropy(labels[labels != IGNORED])


def _write(data: DataRecipe, tokenizer: Any | None, vocab_size: int, directory: Path) -> None:
    train, validation = read(data)
    if tokenizer is None:
        tokenizer = train_tokenizer(
            (document.columns[data.text_column] for document in train), vocab_size
        )
        tokenizer.save_pretrained(directory / "tokenizer")
    if getattr(tokenizer, "tokenizer", tokenizer).eos_token_id is None:
        raise RecipeError(
            "the base's tokenizer has no end-of-text token to separate documents: use a base whose tokenizer sets "
            "eos_token"
        )
    rows = make_rows(data, tokenizer, validation, "validation")
    kept = {name: column[: data.validation_sequences] for name, column in rows.items()}
    Dataset.from_dict(kept).save_to_disk(str(directory / "data" / "validation"))
    Dataset.from_dict(make_rows(data, tokenizer, train, "training")).save_to_disk(
        str(directory / "data" / "train")
    )


def make_rows(
    data: DataRecipe, tokenizer: Any, documents: list[Document], use: str
) -> dict[str, Any]:
    """Encode documents as rows of a data set, and return its columns; raise :class:`RecipeError` if no row is left.
    ``use`` names the rows in messages ("training").
    """
    length = data.sequence_length
    none = f"none of the {{}} {use} {{}} of data.source={data.source!r}"
    short = f"data.sequence_length={length} tokens"
    if data.images_column is not None:
        return encode_pictures(data, tokenizer, documents, use)
    if data.format == "classes":
        return encode_classes(data, tokenizer, documents)
    if data.is_stream:
        rows = pack(_tokenized(tokenizer, documents, data), tokenizer.eos_token_id, length)
        if not len(rows):
            raise RecipeError(
                f"the {use} text of data.source={data.source!r} is shorter than one sequence of {short}: use a "
                "smaller data.sequence_length, or more text"
            )
        return {"input_ids": rows}
    if data.format == "pairs":
        pairs, dropped = encode_pairs(data, tokenizer, documents)
        if not pairs:
            raise RecipeError(
                f"{none.format(dropped, 'pairs')} differ in their first {short}: use a larger data.sequence_length"
            )
        print(
            f"{use}: {len(pairs):,} pairs; {dropped:,} dropped since both texts were the same",
            flush=True,
        )
        return {name: [getattr(pair, name) for pair in pairs] for name in Pair._fields}
    examples, shortened, dropped = cut(encode(data, tokenizer, documents), length)
    if not examples:
        raise RecipeError(
            f"{none.format(dropped, 'examples')} has a label in its first {short}: use a larger data.sequence_length, "
            "or data.train_on=all"
        )
    columns = packed_rows(examples, length) if data.is_packed else separate_rows(examples)
    print(
        f"{use}: {len(examples):,} examples in {len(columns['input_ids']):,} rows; {shortened:,} cut to {length} "
        f"tokens, {dropped:,} dropped since no label was left",
        flush=True,
    )
    return columns


def encode(data: DataRecipe, tokenizer: Any, documents: list[Document]) -> list[Example]:
    """Return the tokens and labels of every document. A document of format ``text`` that is longer than
    ``data.sequence_length`` becomes several examples.
    """
    if data.format == "text":
        ended = [
            [*tokens, tokenizer.eos_token_id] for tokens in _tokenized(tokenizer, documents, data)
        ]
        length = data.sequence_length
        pieces = [
            tokens[start : start + length]
            for tokens in ended
            for start in range(0, len(tokens), length)
        ]
        return [Example(piece, piece) for piece in pieces]
    make: Callable[..., Example] = encode_chat if data.format == "chat" else encode_completion
    names = needed_columns(data).values()
    return [
        make(
            tokenizer,
            *(document.columns[name] for name in names),
            data.train_on,
            document.name,
        )
        for document in documents
    ]


def _tokenized(
    tokenizer: Any,
    documents: list[Document],
    data: DataRecipe,
) -> list[list[int]]:
    """Return the tokens of each document's text, without special tokens."""
    tokens: list[list[int]] = []
    texts = [document.columns[data.text_column] for document in documents]
    for start in range(0, len(texts), _AT_ONCE):
        tokens += tokenizer(
            texts[start : start + _AT_ONCE], add_special_tokens=False, verbose=False
        )["input_ids"]
    return tokens
