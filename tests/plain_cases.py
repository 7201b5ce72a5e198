"""Cases beside those of `hfscale.testing.plain`: a user's loss in `train_step`, and pairs of texts and images."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import hfscale
from hfscale.testing import plain
from hfscale.testing.parity import Batch
from hfscale.train.user_loss import LossOfOutputs


@dataclass
class UserLossCase(plain.PlainCase):
    """Define a case with a user's loss in :func:`hfscale.train_step`."""

    # maps a model's outputs and the batch to sum and count; defined at the top of a module
    loss_fn: LossOfOutputs | None = None

    def reference_step(self, model: Any, step: list[list[Batch]]) -> list[Tensor]:
        """Run a step of the stock model: sums over all microbatches, divided by all counts."""
        assert self.loss_fn is not None
        taken = {*inspect.signature(model.forward).parameters} - {"labels"}
        found = []
        for microbatch in (microbatch for rank in step for microbatch in rank):
            outputs = model(**{name: value for name, value in microbatch.items() if name in taken})
            found.append(self.loss_fn(outputs, microbatch))
        loss = sum(total for total, _ in found) / sum(float(count) for _, count in found)
        assert isinstance(loss, Tensor)
        loss.backward()
        return [loss.detach()] * len(step)

    def layout_step(self, model: Any, microbatches: list[Batch]) -> Tensor:
        """Run :func:`hfscale.train_step` on a rank with these microbatches."""
        return hfscale.train_step(model, microbatches, self.loss_fn)


def image_text_pairs(case: plain.PlainCase, generator: torch.Generator, length: int) -> Batch:
    """Return pairs of a text and an image."""
    batch = plain.causal_lm(case, generator, length)
    images = plain.images(case.config.vision_config, case.rows, generator)
    given: dict[str, Any] = {**batch, "pixel_values": images, "return_loss": True}
    del given["labels"]
    return given
