"""Make tiny vision-language models, and batches of texts with pictures for them.

Families differ in the format of pictures; a tower's features replace placeholders in the text. The number of
placeholders per picture is not computed here: the model computes features, and they are counted.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from .._compat.transformers.classes import classes_by_config
from .._compat.transformers.experts import use_eager_experts
from ..models.precision import keep_float64
from .parity import Batch, Case
from .picture_configs import IMAGE_TOKEN, LABELS_ONLY, LOWEST, PLACEHOLDERS
from .picture_inputs import beside_text, join_pictures, make_picture
from .plain import PlainCase


@dataclass
class PictureCase(Case):
    """Define a case with texts, some of which have a picture in the middle."""

    auto_class: Any = AutoModelForImageTextToText
    # which ``(step, distinct batch, microbatch)`` have no pictures
    text_alone: frozenset[tuple[int, int, int]] = frozenset()

    def batches(self, batch_world: int) -> list[list[list[Batch]]]:
        """Return the batches of any case, with pictures."""
        generator = torch.Generator().manual_seed(12)
        return [
            [
                [
                    self._typed(self._without_special(microbatch)) if (step, rank, index) in self.text_alone else
                    self.illustrated(microbatch, generator)
                    for index, microbatch in enumerate(microbatches)
                ]
                for rank, microbatches in enumerate(ranks)
            ]
            for step, ranks in enumerate(super().batches(batch_world))
        ]  # fmt: skip

    def illustrated(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Return a batch's texts, each with a picture."""
        pictures = [make_picture(self.config, self._arguments, generator) for _ in batch["input_ids"]]
        text = self._placed(self._without_special(batch), self._rows(pictures[0]))
        return {**self._typed(text), **join_pictures(pictures)}

    def _without_special(self, batch: Batch) -> Batch:
        ids, labels = batch["input_ids"], batch["labels"]
        return {
            **batch,
            "input_ids": ids.where(ids < LOWEST, ids - 10),
            "labels": labels.where(labels < LOWEST, labels - 10),
        }

    @property
    def _token(self) -> int:
        """The placeholder's token id; a token that is never drawn if attention reads pictures without placeholders."""
        fields = self.config.to_dict()
        names = [name for name in PLACEHOLDERS if isinstance(fields.get(name), int)]
        return int(fields[names[0]]) if names else IMAGE_TOKEN

    def _placed(self, batch: Batch, rows: int) -> Batch:
        """Return the text with ``rows`` placeholders, whose labels are ignored."""
        fill = {"input_ids": self._token, "labels": -100, "attention_mask": 1}
        return {
            name: torch.cat([value[:, :2], value.new_full((len(value), rows), fill[name]), value[:, 2:]], dim=1)
            for name, value in batch.items()
        }

    def _typed(self, batch: Batch) -> Batch:
        """Return a batch with the additional inputs of the class, and without inputs that it does not take."""
        batch = {**batch, **beside_text(self._arguments, batch["input_ids"], self._token)}
        left_out = LABELS_ONLY.get(self.config.model_type, ())
        return {name: value for name, value in batch.items() if name in self._arguments and name not in left_out}

    @property
    def _arguments(self) -> Any:
        kind = classes_by_config(AutoModelForImageTextToText)[type(self.config)]
        return inspect.signature(kind.forward).parameters

    def _rows(self, picture: dict[str, Tensor]) -> int:
        """Return the number of a picture's features; 0 if attention reads them without placeholders."""
        fields = self.config.to_dict()
        if not {*PLACEHOLDERS} & fields.keys():
            return int(fields.get("latent_query_num", 0))
        key = self.config.to_json_string(use_diff=False)
        if key not in _ROWS:
            _ROWS[key] = _count_features(self.config, picture)
        return _ROWS[key]


@dataclass
class PlainPictureCase(PictureCase, PlainCase):
    """Define a case with pictures and a loss computed by the class, trained by a plain loop."""


_ROWS: dict[str, int] = {}


def _count_features(config: Any, picture: dict[str, Tensor]) -> int:
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float64).eval()
    use_eager_experts(model)
    parts = (model, model.base_model)
    makers = (getattr(part, f"get_{kind}_features", None) for kind in ("image", "video") for part in parts)
    maker = next((maker for maker in makers if maker is not None), None)
    if maker is None:
        return 0
    taken = inspect.signature(maker).parameters
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
    with torch.no_grad(), keep_float64():
        found = maker(**{name: value for name, value in picture.items() if anything or name in taken})
    if not isinstance(found, (Tensor, tuple, list)):
        found = _features_in(found)
    each = [found] if isinstance(found, Tensor) else list(found)
    return sum(features.numel() // features.shape[-1] for features in each)


def _features_in(output: Any) -> Any:
    """Return the features that replace placeholders."""
    if getattr(output, "pooler_output", None) is not None:
        return output.pooler_output
    if getattr(output, "deepstack_features", None) is not None:  # (layer, what is added there)
        return output.deepstack_features[0][1]
    return output.last_hidden_state
