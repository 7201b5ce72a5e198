"""Define the training task of each data format: the Auto class of its model, its loss, and its metrics."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoProcessor,
    AutoTokenizer,
)

from ..train.user_loss import LossOfOutputs
from .rows import IGNORED
from .schema import DataRecipe, RecipeError


@dataclass(frozen=True)
class Task:
    """Describe a training task: the transformers classes that load its model and its tokenizer or processor, its loss,
    metrics, and names for the model card.
    """

    auto_class: Any  # the Auto class of transformers that loads the model
    adapter: str = "CAUSAL_LM"  # PEFT's name of the task: ``task_type``
    tag: str = "text-generation"  # the Hub's name of the task: ``pipeline_tag``
    each: str = "token"  # the unit that losses are averaged over
    baseline: str = "unigram entropy"  # name of the number to compare the validation loss with
    # Description of a predictor whose loss is the baseline.
    knows: str = "the loss of predicting each token by its frequency alone"
    # The class of transformers that encodes the model's inputs.
    reader: Any = AutoTokenizer
    rows: int = 1  # rows of a batch per row of the data
    # Computes the loss from the model's outputs; ``None`` if the model itself computes the loss.
    loss: LossOfOutputs | None = None
    right: Callable[[Any, Mapping[str, Any]], Tensor] | None = None  # counts right answers, if any

    @property
    def baseline_key(self) -> str:
        """The key under which metrics hold the baseline, the loss of a trivial predictor to compare the validation loss
        with.
        """
        return self.baseline.replace(" ", "_")


def _scores(outputs: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the reward model's scores of the preferred texts and of the rejected texts, which alternate in the batch,
    and a mask of the pairs that count in the loss.
    """
    scores = outputs.logits[:, 0].float()
    if len(scores) % 2:
        raise RecipeError(
            f"a microbatch must hold whole pairs of texts, got {len(scores)} texts, because the pipeline has split a "
            "pair: use a parallel.num_microbatches that divides the number of pairs of a data rank in a step"
        )
    return scores[::2], scores[1::2], batch["counted"][::2].to(scores.device)


def preference(outputs: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the reward-model loss, the sum of ``-log sigmoid(chosen - rejected)`` over preference pairs, and the
    number of pairs.

    Bradley and Terry 1952; Ouyang et al. 2022, InstructGPT.
    """
    chosen, rejected, counted = _scores(outputs, batch)
    return -(logsigmoid(chosen - rejected) * counted).sum(), counted.sum()


def preferred(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """Count the preference pairs whose preferred text has a higher score than the rejected text."""
    chosen, rejected, counted = _scores(outputs, batch)
    return ((chosen > rejected) & counted).sum()


def classification(outputs: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the sum of the cross entropies of texts' classes, and the number of texts that count in the loss."""
    logits = outputs.logits.float()
    labels = batch["labels"].to(outputs.logits.device)
    return cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"), (
        labels != IGNORED
    ).sum()


def classified(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """Count the texts whose labelled class has the highest logit."""
    return (outputs.logits.argmax(-1) == batch["labels"].to(outputs.logits.device)).sum()


TEXT = Task(AutoModelForCausalLM)
_SCORED = partial(
    Task, AutoModelForSequenceClassification, adapter="SEQ_CLS", tag="text-classification"
)
PAIRS = _SCORED(
    each="pair",
    baseline="loss of a coin",
    knows="the loss if both texts of every pair get equal scores",
    rows=2,
    loss=preference,
    right=preferred,
)
CLASSES = _SCORED(
    each="text",
    baseline="entropy of the classes",
    knows="the loss of predicting each class by its frequency alone",
    loss=classification,
    right=classified,
)
PICTURES = Task(AutoModelForImageTextToText, tag="image-text-to-text", reader=AutoProcessor)


def task_of(data: DataRecipe) -> Task:
    """Return the training task that belongs to the data format of a recipe."""
    if data.images_column is not None:
        return PICTURES
    return {"pairs": PAIRS, "classes": CLASSES}.get(data.format, TEXT)


def model_options(data: DataRecipe, pad_token_id: int | None) -> dict[str, Any]:
    """Return arguments of ``from_pretrained`` that the data format determines: the model's Auto class, and config
    fields of a classification or reward head, such as ``num_labels`` and ``pad_token_id``.
    """
    task = task_of(data)
    given: dict[str, Any] = {} if task is TEXT else {"auto_class": task.auto_class}
    if task.loss is not None:
        given["pad_token_id"] = pad_token_id
    if task is PAIRS:
        given["num_labels"] = 1
    if task is CLASSES:
        given["id2label"] = dict(enumerate(data.classes))
        given["label2id"] = {name: index for index, name in enumerate(data.classes)}
    return given
