"""Compare layouts with one process for models that compute their own loss, in a plain loop without ``train_step``:
``loss = model(**batch).loss; loss.backward()``.

These are models for classification, masked tokens, translation, speech and images. Such a loss is a mean over its
batch; the loop averages over microbatches, and data ranks average over distinct batches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .parity import Batch, Case, ragged_batch, vocabulary_of

Maker = Callable[["PlainCase", torch.Generator, int], Batch]


def causal_lm(case: "PlainCase", generator: torch.Generator, length: int) -> Batch:
    """Return random tokens whose labels are the tokens themselves. Masked LMs are tested with it, too, since comparing
    their gradients does not require masked tokens.
    """
    return ragged_batch(generator, vocabulary_of(case.config), case.rows, length, masked=False)


@dataclass
class PlainCase(Case):
    """Describe a comparison of a layout with one process in which a plain loop trains a model that computes its own
    loss.
    """

    # Makes a microbatch of a given length: a function of this module, or a similar one.
    make_batch: Maker = causal_lm
    rows: int = 3  # samples per microbatch; three test contrastive losses better than two
    # seed of torch's default generator for models with dropout; the same in one process and on every rank
    seed: int | None = None

    def batches(self, batch_world: int) -> list[list[list[Batch]]]:
        generator = torch.Generator().manual_seed(11)
        lengths = [self.lengths[i % len(self.lengths)] for i in range(self.accumulation)]
        return [
            [
                [self.make_batch(self, generator, length) for length in lengths]
                for _ in range(batch_world)
            ]
            for _ in range(self.steps)
        ]

    def reference_step(self, model: Any, step: list[list[Batch]]) -> list[Tensor]:
        return [self._loop(model, microbatches, len(step)) for microbatches in step]

    def layout_step(self, model: Any, microbatches: list[Batch]) -> Tensor:
        return self._loop(model, microbatches, 1)

    def _loop(self, model: Any, microbatches: list[Batch], share: int) -> Tensor:
        if self.seed is not None:
            torch.manual_seed(self.seed)
        total = torch.zeros((), dtype=torch.float64)
        for microbatch in microbatches:
            loss = self.loss_of(model, microbatch) / len(microbatches)
            (loss / share).backward()
            total += loss.detach()
        return total

    def loss_of(self, model: Any, batch: Batch) -> Tensor:
        """Return the loss of one microbatch, on which the plain loop calls ``backward``."""
        return model(**batch).loss


@dataclass
class OwnLossCase(PlainCase):
    """Describe a comparison of a layout with one process in which :func:`hfscale.train_step` trains the model's own
    loss, a mean over rows or labels.
    """

    over: str = "rows"  # ``"rows"`` or ``"labels"``

    # like any case, with microbatches weighted by their number of rows or labels
    reference_step = Case.reference_step
    layout_step = Case.layout_step

    def count(self, labels: Tensor) -> int:
        """Return the weight of a microbatch in the mean loss of a step: its number of rows, or of labels that are not
        ignored.
        """
        return len(labels) if self.over == "rows" else int((labels != -100).sum())


def sequence_classification(case: PlainCase, generator: torch.Generator, length: int) -> Batch:
    """Return a microbatch of random texts with a random class for each."""
    labels = torch.randint(0, _classes(case), (case.rows,), generator=generator)
    return {**causal_lm(case, generator, length), "labels": labels}


def token_classification(case: PlainCase, generator: torch.Generator, length: int) -> Batch:
    """Return a microbatch of random texts with a class for each token; about a third of the tokens have none."""
    batch = causal_lm(case, generator, length)
    return {
        **batch,
        "labels": batch["labels"].where(
            batch["labels"] < 0,
            batch["labels"] % _classes(case),
        ),
    }


def sequence_to_sequence(case: PlainCase, generator: torch.Generator, length: int) -> Batch:
    """Return a microbatch of random texts, each with a random target text that is two tokens shorter."""
    batch = causal_lm(case, generator, length)
    target = causal_lm(case, generator, length - 2)
    return {**batch, "labels": target["labels"]}


def speech_to_text(case: PlainCase, generator: torch.Generator, length: int) -> Batch:
    """Return a microbatch of random spectrograms, each of one full window (Whisper accepts no other length), with a
    random text for each.
    """
    shape = (case.rows, case.config.num_mel_bins, 2 * case.config.max_source_positions)
    features = torch.randn(shape, dtype=torch.float64, generator=generator)
    return {"input_features": features, "labels": causal_lm(case, generator, length)["labels"]}


def image_classification(case: PlainCase, generator: torch.Generator, length: int) -> Batch:
    """Return a microbatch of random images with a random class for each."""
    labels = torch.randint(0, _classes(case), (case.rows,), generator=generator)
    return {"pixel_values": images(case.config, case.rows, generator), "labels": labels}


def images(config: Any, rows: int, generator: torch.Generator) -> Tensor:
    """Return random images ``[rows, channels, size, size]`` of the size that a vision config names."""
    shape = (rows, config.num_channels, config.image_size, config.image_size)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def _classes(case: PlainCase) -> int:
    return int(case.config.num_labels or 2)
