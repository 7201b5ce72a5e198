"""The training loop: what hfscale leaves to its user, in one place."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import get_scheduler

import hfscale

from ..config import started_processes
from .batch_sizes import evaluation_steps, per_rank, sequences_of_step, share_of_step
from .rows import IGNORED, Rows, divided
from .run_log import RunLog, peak_memory
from .saving import Saves
from .schema import Recipe, TrainingRecipe
from .utilization import Utilization


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
        return Outcome(*losses, self.tokens, self.tokens / self.seconds, peak_memory(), memory_before)


def train(model: Any, recipe: Recipe, train_data: Dataset, validation_data: Dataset, log: RunLog) -> Outcome:
    """Train ``model`` as the recipe says, from the start or from the saved state. Call it on every rank.

    Rows have ``input_ids``, and where they are not plain text ``labels`` and ``position_ids`` or ``attention_mask``:
    see :mod:`~hfscale.recipes.packing`. A training loss in the log is the mean over the steps since the one before;
    time spent evaluating and saving does not count in tokens per second, nor do padding tokens.
    """
    training = recipe.training
    if training.gradient_checkpointing:
        # transformers 5.23 gives it a new name and warns at the old one.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    microbatches, size = per_rank(training.batch_size, hfscale.batch_world(model), training.microbatch_size)
    optimizer = make_optimizer(model, training)
    scheduler = make_scheduler(optimizer, training)
    train_rows, validation_rows = Rows(train_data), Rows(validation_data)
    memory_before, now = peak_memory(), Progress()
    with Saves(model, recipe, log, now, optimizer=optimizer, scheduler=scheduler) as saves:
        if not saves.resume():
            now.first_validation_loss = now.validation_loss = evaluate(model, validation_rows, microbatches, size)
            log.evaluated(0, now.validation_loss)
        if training.watchdog is not None:
            hfscale.watchdog(model, patience=training.watchdog, end=True)
        now.started = time.perf_counter()
        while now.step < training.steps:
            saves.before_step()
            model.train()
            sequences = sequences_of_step(now.step, training.batch_size, len(train_rows), recipe.seed)
            now.step += 1
            share = share_of_step(sequences, hfscale.batch_rank(model), microbatches, size)
            batch = train_rows.batch([row for rows in share for row in rows])
            now.losses.append(hfscale.train_step(model, divided(batch, size)))
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
                    now.validation_loss = evaluate(model, validation_rows, microbatches, size)
                    log.evaluated(now.step, now.validation_loss)
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


def evaluate(model: Any, data: Rows, microbatches: int, size: int) -> float:
    """The mean loss over all labels of ``data``, the same for every layout. Call it on every rank.

    A step has as many microbatches of ``size`` sequences as one of training: a pipeline that runs the one runs the
    other.
    """
    model.eval()
    total = torch.zeros((), dtype=torch.float64)
    for rows, counted, everywhere in evaluation_steps(
        len(data), hfscale.batch_rank(model), hfscale.batch_world(model), microbatches * size
    ):
        batch = data.batch(rows)
        batch["labels"][counted:] = IGNORED
        step = divided(batch, size)
        # The mean over the labels of the step, of which steps have more or fewer.
        total += int(data.labels[everywhere].sum()) * hfscale.eval_step(model, step).double().cpu()
    return float(total) / int(data.labels.sum())


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
