"""The training loop: what hfscale leaves to its user, in one place."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from torch import Tensor
from transformers import get_scheduler

import hfscale

from ..config.environment import started_processes
from .batch_sizes import evaluation_steps, microbatches_of_step, sequences_of_step, share_of_step
from .main_process import total
from .rows import Rows
from .run_log import RunLog, peak_memory
from .saving import Saves
from .schema import Recipe, TrainingRecipe
from .scored import ClassRows, PairRows
from .tasks import Task, task_of
from .utilization import Utilization


class Measured(NamedTuple):
    """What an evaluation found.

    Attributes:
        loss: the mean over all labels.
        accuracy: the share of them that the model has right, where the task counts that.
    """

    loss: float
    accuracy: float | None


@dataclass(frozen=True)
class Outcome:
    """What a training run measured.

    Losses are in nats per label, which in text is every token; tokens leave padding out; memory is that of the largest
    process, in bytes.
    """

    train_loss: float
    first_validation_loss: float
    validation_loss: float
    tokens: int
    tokens_per_second: float
    memory: int
    memory_before: int
    accuracy: float | None = None


@dataclass
class Progress:
    """How far a run is: saved with its state, and restored, under the names of the fields."""

    step: int = 0
    tokens: int = 0
    logged_tokens: int = 0
    seconds: float = 0.0
    logged_seconds: float = 0.0
    train_loss: float = 0.0
    first_validation_loss: float = 0.0
    validation_loss: float = 0.0
    validation_accuracy: float | None = None
    losses: list[Tensor] = field(default_factory=list)
    """Of the steps since the last line of metrics."""
    started: float = field(default_factory=time.perf_counter)
    """Since when :attr:`seconds` have not been counted; not saved."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The time within does not count."""
        self.count_seconds()
        yield
        self.started = time.perf_counter()

    def count_seconds(self) -> None:
        """Bring :attr:`seconds` up to date."""
        now = time.perf_counter()
        self.seconds, self.started = self.seconds + now - self.started, now

    def state_dict(self) -> dict[str, Any]:
        """The fields, as plain data."""
        counted = {name: value for name, value in vars(self).items() if name != "started"}
        return {**counted, "losses": [float(loss) for loss in self.losses]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the fields back."""
        vars(self).update({**state, "losses": [torch.tensor(loss) for loss in state["losses"]]})

    def outcome(self, memory_before: int) -> Outcome:
        """What the run measured; call it on every rank."""
        losses = (self.train_loss, self.first_validation_loss, self.validation_loss)
        speed = self.tokens / self.seconds
        return Outcome(*losses, self.tokens, speed, peak_memory(), memory_before, self.validation_accuracy)


def train(
    model: Any, recipe: Recipe, train_data: Dataset, validation_data: Dataset, log: RunLog, tokenizer: Any = None
) -> Outcome:
    """Train ``model`` as the recipe says, from the start or from the saved state. Call it on every rank.

    Rows have ``input_ids``, and where they are not plain text ``labels`` and ``position_ids`` or ``attention_mask``:
    see :mod:`~hfscale.recipes.packing`, :mod:`~hfscale.recipes.scored` for pairs and classes, and
    :mod:`~hfscale.recipes.pictures`. A training loss in the log is the mean over the steps since the one before; time
    spent evaluating and saving does not count in tokens per second, nor do padding tokens.

    Args:
        tokenizer: the processor of the model, where rows have pictures.
    """
    training = recipe.training
    if training.gradient_checkpointing:
        # transformers 5.23 gives it a new name and warns at the old one.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    task = task_of(recipe.data)
    microbatches, size = microbatches_of_step(recipe, hfscale.batch_world(model))
    optimizer = make_optimizer(model, training)
    scheduler = make_scheduler(optimizer, training)
    train_rows, validation_rows = (rows_of(recipe, data, model, tokenizer) for data in (train_data, validation_data))
    memory_before, now = peak_memory(), Progress()
    with Saves(model, recipe, log, now, optimizer=optimizer, scheduler=scheduler) as saves:
        if not saves.resume():
            now.validation_loss, accuracy = evaluate(model, task, validation_rows, microbatches, size)
            now.first_validation_loss, now.validation_accuracy = now.validation_loss, accuracy
            log.evaluated(0, now.validation_loss, accuracy)
        if training.watchdog is not None:
            hfscale.watchdog(model, patience=training.watchdog, end=True)
        now.started = time.perf_counter()
        while now.step < training.steps:
            saves.before_step()
            model.train()
            sequences = sequences_of_step(now.step, training.batch_size, len(train_rows), recipe.seed)
            now.step += 1
            share = share_of_step(sequences, hfscale.batch_rank(model), microbatches, size)
            batches = train_rows.step([row for rows in share for row in rows], size)
            now.losses.append(hfscale.train_step(model, batches, task.loss))
            norm = hfscale.clip_grad_norm_(model, training.max_grad_norm)
            learning_rate = scheduler.get_last_lr()[0]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            now.tokens += int(train_rows.tokens[sequences].sum())
            log.stepped()
            if _is_due(now.step, training.log_every, training.steps):
                _log_step(model, recipe, now, log, learning_rate, norm)
            if _is_due(now.step, training.evaluate_every, training.steps):
                with now.aside():
                    found = evaluate(model, task, validation_rows, microbatches, size)
                    now.validation_loss, now.validation_accuracy = found
                    log.evaluated(now.step, *found)
            saves.after_step()
    return now.outcome(memory_before)


def _log_step(model: Any, recipe: Recipe, now: Progress, log: RunLog, learning_rate: float, norm: Tensor) -> None:
    """Of the steps since the last time."""
    now.train_loss = float(torch.stack(now.losses).mean())  # also waits for the device
    now.count_seconds()
    speed = (now.tokens - now.logged_tokens) / (now.seconds - now.logged_seconds)
    log.trained(
        now.step,
        loss=now.train_loss,
        lr=learning_rate,
        grad_norm=float(norm),
        tokens_per_second=round(speed, 1),
        memory=peak_memory(),
        tokens=now.tokens,
        seconds=round(now.seconds, 3),
        **Utilization.of(model.config, recipe, started_processes()).at(speed),
        **hfscale.metrics(model),
    )
    if recipe.routing:
        log.routed(now.step, hfscale.expert_load(model))
    now.losses, now.logged_tokens, now.logged_seconds = [], now.tokens, now.seconds


def _is_due(step: int, every: int, last: int) -> bool:
    return step % every == 0 or step == last


def rows_of(recipe: Recipe, data: Dataset, model: Any, tokenizer: Any) -> Rows:
    """The rows of a recipe's data, as the model takes them.

    Args:
        tokenizer: of the model, or its processor.
    """
    if recipe.data.images_column is not None:
        from .pictures import PictureRows  # needs pillow

        return PictureRows(data, tokenizer)
    if recipe.data.format in ("pairs", "classes"):
        kind = PairRows if recipe.data.format == "pairs" else ClassRows
        return kind(data, model.config.pad_token_id)
    return Rows(data)


def evaluate(model: Any, task: Task, data: Rows, microbatches: int, size: int) -> Measured:
    """The mean loss over all labels of ``data``, the same for every layout. Call it on every rank.

    A step has as many microbatches of ``size`` sequences as one of training: a pipeline that runs the one runs the
    other.
    """
    model.eval()
    loss, right = torch.zeros((), dtype=torch.float64), 0
    for rows, counted, everywhere in evaluation_steps(
        len(data), hfscale.batch_rank(model), hfscale.batch_world(model), microbatches * size
    ):
        step = data.step(rows, size, counted)
        if task.right is None:
            mean = hfscale.eval_step(model, step, task.loss)
        else:
            mean, outputs = hfscale.eval_step(model, step, task.loss, return_outputs=True)
            right += sum(int(task.right(*each)) for each in zip(outputs, step, strict=True))
        # The mean over the labels of the step, of which steps have more or fewer.
        loss += int(data.labels[everywhere].sum()) * mean.double().cpu()
    labels = int(data.labels.sum())
    if task.right is None:
        return Measured(float(loss) / labels, None)
    copies = started_processes() // hfscale.batch_world(model)  # ranks with the same batch
    return Measured(float(loss) / labels, total(right) / copies / labels)


def make_optimizer(model: Any, training: TrainingRecipe) -> torch.optim.Optimizer:
    """The optimizer of the recipe, over what trains; neither biases nor norms decay."""
    return hfscale.create_optimizer(
        model,
        training.optimizer,
        lr=training.learning_rate,
        weight_decay=training.weight_decay,
        betas=(0.9, 0.95),
        stochastic_rounding=training.stochastic_rounding,
    )


def make_scheduler(optimizer: torch.optim.Optimizer, training: TrainingRecipe) -> Any:
    """The cosine schedule of the recipe, behind its warm-up."""
    warmup = round(training.warmup_ratio * training.steps)
    return get_scheduler("cosine", optimizer, num_warmup_steps=warmup, num_training_steps=training.steps)
