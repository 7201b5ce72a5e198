"""Parity of models that keep their own loss, trained by a plain loop: ``loss = model(**batch).loss; loss.backward()``.

Classification, masked tokens, translation, speech, images, pairs of images and texts. Such a loss is a mean over its
batch, and the loop's is the mean over microbatches; the data axes average over distinct batches.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import hfscale

from ..train.user_loss import LossOfOutputs
from .parity import Batch, Case
from .texts import ragged_batch, vocabulary_of

Maker = Callable[["PlainCase", torch.Generator, int], Batch]


def causal_lm(case: "PlainCase", generator: torch.Generator, length: int) -> Batch:
    """Tokens whose labels are themselves; also for masked tokens, where they need not be hidden for a gradient."""
    return ragged_batch(generator, vocabulary_of(case.config), case.rows, length, masked=False)


@dataclass
class PlainCase(Case):
    """What to run.

    Attributes:
        make_batch: a function of this module, or one like them, that makes a microbatch of some length.
        rows: samples of a microbatch; three tell more of a contrast than two.
        seed: of torch's default generator, for models with dropout; the same in one process and on every rank.
    """

    make_batch: Maker = causal_lm
    rows: int = 3
    seed: int | None = None

    def batches(self, batch_world: int) -> list[list[list[Batch]]]:
        """``[step][distinct batch][microbatch]``."""
        generator = torch.Generator().manual_seed(11)
        lengths = [self.lengths[i % len(self.lengths)] for i in range(self.accumulation)]
        return [
            [[self.make_batch(self, generator, length) for length in lengths] for _ in range(batch_world)]
            for _ in range(self.steps)
        ]

    def reference_step(self, model: Any, step: list[list[Batch]]) -> list[Tensor]:
        """Forward and backward of the stock model over all microbatches; the loss each distinct batch reports."""
        return [self._loop(model, microbatches, len(step)) for microbatches in step]

    def layout_step(self, model: Any, microbatches: list[Batch]) -> Tensor:
        """The same by the layout, on a rank with these microbatches."""
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
        """What the loop runs backward."""
        found: Tensor = model(**batch).loss
        return found


@dataclass
class OwnLossCase(PlainCase):
    """The same by :func:`hfscale.train_step`: the loss of a step is the mean over all of its rows, or labels.

    Attributes:
        over: ``"rows"`` or ``"labels"``.
    """

    over: str = "rows"

    def reference_step(self, model: Any, step: list[list[Batch]]) -> list[Tensor]:
        """Every microbatch counts by its rows, or labels."""
        return Case.reference_step(self, model, step)

    def count(self, labels: Tensor) -> int:
        """Its rows, or labels that are not ignored."""
        return len(labels) if self.over == "rows" else int((labels != -100).sum())

    def layout_step(self, model: Any, microbatches: list[Batch]) -> Tensor:
        """By the layout, on a rank with these microbatches."""
        return hfscale.train_step(model, microbatches)


@dataclass
class UserLossCase(PlainCase):
    """The same with a loss of the user's own, as :func:`hfscale.train_step` takes it.

    Attributes:
        loss_fn: what a model returned for a batch, and the batch -> sum and count; defined at the top of a module.
    """

    loss_fn: LossOfOutputs | None = None

    def reference_step(self, model: Any, step: list[list[Batch]]) -> list[Tensor]:
        """Sums over all microbatches, divided by all counts."""
        assert self.loss_fn is not None
        found = []
        for microbatch in (microbatch for rank in step for microbatch in rank):
            outputs = model(**{name: value for name, value in microbatch.items() if name in self._taken(model)})
            found.append(self.loss_fn(outputs, microbatch))
        loss = sum(total for total, _ in found) / sum(float(count) for _, count in found)
        assert isinstance(loss, Tensor)
        loss.backward()
        return [loss.detach()] * len(step)

    def _taken(self, model: Any) -> set[str]:
        return {*inspect.signature(model.forward).parameters} - {"labels"}

    def layout_step(self, model: Any, microbatches: list[Batch]) -> Tensor:
        """By the layout, on a rank with these microbatches."""
        return hfscale.train_step(model, microbatches, self.loss_fn)


def sequence_classification(case: PlainCase, generator: torch.Generator, length: int) -> Batch:
    """Texts, each with a class."""
    labels = torch.randint(0, _classes(case), (case.rows,), generator=generator)
    return {**causal_lm(case, generator, length), "labels": labels}


def token_classification(case: PlainCase, generator: torch.Generator, length: int) -> Batch:
    """Texts with a class for most tokens."""
    batch = causal_lm(case, generator, length)
    return {**batch, "labels": batch["labels"].where(batch["labels"] < 0, batch["labels"] % _classes(case))}


def sequence_to_sequence(case: PlainCase, generator: torch.Generator, length: int) -> Batch:
    """Texts, each with a shorter one to be made of it."""
    batch, target = causal_lm(case, generator, length), causal_lm(case, generator, length - 2)
    return {**batch, "labels": target["labels"]}


def speech_to_text(case: PlainCase, generator: torch.Generator, length: int) -> Batch:
    """Spectra of one full window (Whisper takes no other), each with a text."""
    shape = (case.rows, case.config.num_mel_bins, 2 * case.config.max_source_positions)
    features = torch.randn(shape, dtype=torch.float64, generator=generator)
    return {"input_features": features, "labels": causal_lm(case, generator, length)["labels"]}


def image_classification(case: PlainCase, generator: torch.Generator, length: int) -> Batch:
    """Images, each with a class."""
    labels = torch.randint(0, _classes(case), (case.rows,), generator=generator)
    return {"pixel_values": _images(case.config, case.rows, generator), "labels": labels}


def image_text_pairs(case: PlainCase, generator: torch.Generator, length: int) -> Batch:
    """Texts and images that belong together."""
    batch = causal_lm(case, generator, length)
    images = _images(case.config.vision_config, case.rows, generator)
    given: dict[str, Any] = {**batch, "pixel_values": images, "return_loss": True}
    del given["labels"]
    return given


def _images(config: Any, rows: int, generator: torch.Generator) -> Tensor:
    shape = (rows, config.num_channels, config.image_size, config.image_size)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def _classes(case: PlainCase) -> int:
    return int(case.config.num_labels or 2)
