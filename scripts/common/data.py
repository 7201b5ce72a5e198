"""From text to packed sequences of tokens on disk, and the tokenizer that pretraining trains for itself."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, disable_progress_bars, load_from_disk
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .corpus import read_texts
from .processes import on_main
from .recipe import DataRecipe, RecipeError

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
"""Special tokens come first in the vocabulary, and this is the only one."""

_AT_ONCE = 64


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer (as GPT-2's) with one special token, :data:`END_OF_TEXT`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() > vocab_size:
        raise RecipeError(
            f"model.vocab_size={vocab_size} is too small: every byte needs a token; use {tokenizer.get_vocab_size()} "
            "or more"
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def pack(documents: Iterable[list[int]], end: int, length: int) -> np.ndarray:
    """Documents one after the other, ``end`` after each, cut into rows of ``length``; an incomplete row is dropped."""
    pieces = [np.asarray([*tokens, end], dtype=np.int32) for tokens in documents]
    stream = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int32)
    rows = len(stream) // length
    return stream[: rows * length].reshape(rows, length)


def tokenize(tokenizer: Any, texts: list[str], length: int) -> np.ndarray:
    """``texts`` as packed sequences."""
    documents: list[list[int]] = []
    for start in range(0, len(texts), _AT_ONCE):
        documents += tokenizer(texts[start : start + _AT_ONCE], add_special_tokens=False, verbose=False)["input_ids"]
    return pack(documents, tokenizer.eos_token_id, length)


def unigram_entropy(tokens: np.ndarray) -> float:
    """Nats per token of a text under its own distribution of tokens: what knowing only frequencies achieves."""
    counts = np.bincount(np.asarray(tokens).reshape(-1))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def prepare(
    data: DataRecipe, tokenizer: Any | None, vocab_size: int, directory: Path
) -> tuple[Any, Dataset, Dataset, float]:
    """Tokenized data on disk, written by rank 0 and read by all; call it on every rank, on a file system they share.

    Args:
        tokenizer: ``None`` to train one, of ``vocab_size``, on the texts to train on.
        directory: of the run; gets ``tokenizer/`` if one is trained, ``data/train`` and ``data/validation``.

    Returns:
        the tokenizer, the sequences to train on and to validate on (each has ``input_ids``; labels are the same), and
        the unigram entropy of those to validate on.

    Raises:
        RecipeError: the source cannot be read, or is too small.
    """
    disable_progress_bars()  # theirs would get in the way of the one of training
    on_main(lambda: _write(data, tokenizer, vocab_size, directory))
    if tokenizer is None:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory / "tokenizer")
    train, validation = (load_from_disk(str(directory / "data" / part)) for part in ("train", "validation"))
    train, validation = train.with_format("torch"), validation.with_format("torch")
    return tokenizer, train, validation, unigram_entropy(validation[:]["input_ids"].numpy())


def _write(data: DataRecipe, tokenizer: Any | None, vocab_size: int, directory: Path) -> None:
    train, validation = read_texts(data)
    if tokenizer is None:
        tokenizer = train_tokenizer(train, vocab_size)
        tokenizer.save_pretrained(directory / "tokenizer")
    if tokenizer.eos_token_id is None:
        raise RecipeError("the tokenizer of the base model has no end-of-text token to put between documents")
    rows = tokenize(tokenizer, validation, data.sequence_length)[: data.validation_sequences]
    _save(rows, directory / "data" / "validation", "validation", data)
    _save(tokenize(tokenizer, train, data.sequence_length), directory / "data" / "train", "training", data)


def _save(rows: np.ndarray, directory: Path, name: str, data: DataRecipe) -> None:
    if not len(rows):
        raise RecipeError(
            f"the {name} text of data.source={data.source!r} is shorter than one sequence of "
            f"data.sequence_length={data.sequence_length} tokens: use shorter sequences, or more text"
        )
    Dataset.from_dict({"input_ids": rows}).save_to_disk(str(directory))
