"""Define the task of each data format: model class, loss, metrics, and their names."""

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
    """Define a task: its classes, loss, metrics and names."""

    auto_class: Any  # of transformers, which finds the model's class
    adapter: str = "CAUSAL_LM"  # PEFT's word for it, ``task_type``
    tag: str = "text-generation"  # the Hub's, ``pipeline_tag``
    each: str = "token"  # what losses are means over
    baseline: str = "unigram entropy"  # what the validation loss is put beside
    # Who does as well as that.
    knows: str = "the best that knowing only how frequent each token is can do"
    # The class of transformers that reads what it is given; or ``AutoProcessor``.
    reader: Any = AutoTokenizer
    rows: int = 1  # of a batch, that one row of the data becomes
    # Of what the model returns; ``None`` where that is the model's own.
    loss: LossOfOutputs | None = None
    right: Callable[[Any, Mapping[str, Any]], Tensor] | None = None  # how much is right, if counted

    @property
    def baseline_key(self) -> str:
        """The metrics key of :attr:`baseline`."""
        return self.baseline.replace(" ", "_")


def _scores(outputs: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores of preferred and rejected texts, which alternate, and which pairs count."""
    scores = outputs.logits[:, 0].float()
    if len(scores) % 2:
        raise RecipeError(
            f"a microbatch of {len(scores)} texts has half a pair: the pipeline cut between a pair's texts; use a "
            "parallel.num_microbatches that divides the pairs that a data rank has in a step"
        )
    return scores[::2], scores[1::2], batch["counted"][::2].to(scores.device)


def preference(outputs: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return ``-log sigmoid(chosen - rejected)``, summed (Bradley and Terry 1952; Ouyang et al. 2022, InstructGPT)."""
    chosen, rejected, counted = _scores(outputs, batch)
    return -(logsigmoid(chosen - rejected) * counted).sum(), counted.sum()


def preferred(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """Count the pairs whose preferred text has the higher score."""
    chosen, rejected, counted = _scores(outputs, batch)
    return ((chosen > rejected) & counted).sum()


def classification(outputs: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Compute the cross entropy of the classes."""
    logits = outputs.logits.float()
    labels = batch["labels"].to(outputs.logits.device)
    return cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"), (
        labels != IGNORED
    ).sum()


def classified(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """Count the texts whose class has the highest logit."""
    return (outputs.logits.argmax(-1) == batch["labels"].to(outputs.logits.device)).sum()


TEXT = Task(AutoModelForCausalLM)
_SCORED = partial(
    Task, AutoModelForSequenceClassification, adapter="SEQ_CLS", tag="text-classification"
)
PAIRS = _SCORED(
    each="pair",
    baseline="loss of a coin",
    knows="what scores that tell nothing would have",
    rows=2,
    loss=preference,
    right=preferred,
)
CLASSES = _SCORED(
    each="text",
    baseline="entropy of the classes",
    knows="the best that knowing only how frequent each class is can do",
    loss=classification,
    right=classified,
)
PICTURES = Task(AutoModelForImageTextToText, tag="image-text-to-text", reader=AutoProcessor)


def task_of(data: DataRecipe) -> Task:
    """Return the task of a recipe's data."""
    if data.images_column is not None:
        return PICTURES
    return {"pairs": PAIRS, "classes": CLASSES}.get(data.format, TEXT)


def model_options(data: DataRecipe, pad_token_id: int | None) -> dict[str, Any]:
    """Return arguments of ``from_pretrained``: the class, and its head's config fields, as ``pad_token_id``."""
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
