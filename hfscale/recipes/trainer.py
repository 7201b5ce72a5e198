"""Train according to a recipe: a subclass of ``hfscale.Trainer`` with the recipe's batches, evaluation and metrics."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from tqdm import tqdm
from transformers import TrainerCallback, TrainingArguments

import hfscale

from .._compat.torch_device import accelerators
from ..config.environment import started_processes
from ..cost.model.machines_known import find_machine, machine_names
from ..cost.model.model_shape import shape_of
from ..cost.model.step_time import pair_cost
from ..errors import ConfigError
from ..train.preemption import stop_listening
from ..train.runtime import runtime_of
from .batch_sizes import by_cost, dealt, evaluation_steps, microbatches_of_step, order_of
from .main_process import gathered, is_main, peak_memory
from .pictures import PictureRows
from .rows import ClassRows, PairRows, Rows
from .run_log import MemoryUntilWritten, Profile, RunLog, resumes_of
from .schema import FinetuneRecipe, Recipe
from .tasks import Task, task_of


@dataclass(frozen=True)
class Outcome:
    """Hold the measurements of a finished run. Losses are in nats per label, tokens exclude padding, and memory is the
    peak, in bytes, of the process that needed most.
    """

    train_loss: float
    first_validation_loss: float
    validation_loss: float
    baseline: float
    tokens: int
    tokens_per_second: float
    memory: int
    memory_before: int
    accuracy: float | None = None


class RecipeTrainer(hfscale.Trainer):
    """Train a model according to a recipe.

    The loss is that of the recipe's task, or the model's own, averaged over all labels of a step. Evaluations log it
    together with a ``baseline``, the loss of a trivial predictor.
    """

    def __init__(
        self,
        model: Any,
        recipe: Recipe,
        data: Dataset,
        validation: Dataset,
        tokenizer: Any,
        baseline: float,
        teacher: Any = None,
    ) -> None:
        training = recipe.training
        batch_world = hfscale.batch_world(model)
        self._recipe, self._task, self._baseline, self._teacher = (
            recipe,
            task_of(recipe.data),
            baseline,
            teacher,
        )
        self._microbatches, self._size = microbatches_of_step(recipe, batch_world)
        rows, self._rows_to_validate = (
            rows_of(recipe, dataset, model, tokenizer) for dataset in (data, validation)
        )
        self._tokens = torch.from_numpy(rows.tokens.copy())
        self._order = order_of(training.steps, training.batch_size, len(rows), recipe.seed)
        if training.balanced_batches:
            costs = rows.costs(pair_cost(runtime_of(model).plan, model.config))
            self._order = by_cost(self._order, torch.from_numpy(costs), batch_world, self._size)
        self._resumes = resumes_of(recipe)
        self.trained: Any = model
        self._memory_before, self._clock = peak_memory(), Clock()
        if training.gradient_checkpointing:
            # transformers 5.23 renamed this method, and warns about the old name.
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        arguments = arguments_of(recipe, model, self._microbatches, self._size)
        super().__init__(
            model,
            TrainingArguments(
                **arguments, train_sampling_strategy="sequential"
            ),  # rows come in the recipe's order
            train_dataset=dealt(self._order, batch_world, self._microbatches, self._size),
            eval_dataset=validation,
            data_collator=lambda numbers: rows.step(numbers, len(numbers))[0],
            optimizers=(optimizer_of(recipe, model), None),
            callbacks=[self._clock, *callbacks_of(recipe, self._resumes)],
        )

    def fit(self) -> Outcome:
        """Train from the beginning, or from a saved state if the run resumes, and return the measurements. Call it on
        every rank.
        """
        self.args.eval_on_start = not self._resumes
        train_to_the_end(self, self._recipe, self._resumes)
        training, evaluation = (
            [r for r in self.state.log_history if k in r] for k in ("loss", "validation_loss")
        )
        last = training[-1]
        newest = evaluation[-1]
        return Outcome(
            last["loss"],
            evaluation[0]["validation_loss"],
            newest["validation_loss"],
            self._baseline,
            int(last["tokens"]),
            last["tokens"] / last["seconds"],
            peak_memory(),
            self._memory_before,
            newest.get("validation_accuracy"),
        )

    @property
    def uses_train_step(self) -> bool:
        """Return ``True``: every step runs :func:`hfscale.train_step`, with the loss of the recipe's task."""
        return True

    def run_microbatches(self, batches: list[Any], num_items_in_batch: Any) -> Tensor:
        """Run a step with the loss of the recipe's task, or with the model's own."""
        return hfscale.train_step(self.trained, batches, self._task.loss, teacher=self._teacher)

    def measured(self, model: Any) -> tuple[float, float | None]:
        """Return the mean validation loss of a model, and its accuracy if the task has right answers. Steps have the
        same size as in training: see :func:`measure`.
        """
        return measure(model, self._task, self._rows_to_validate, self._microbatches, self._size)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Measure the validation loss, log it together with the loss of a trivial predictor (for example, one that
        knows only how often each token occurs), and return these metrics.
        """
        loss, accuracy = self.measured(self.trained)
        metrics = {"validation_loss": loss, self._task.baseline_key: self._baseline}
        if accuracy is not None:
            metrics["validation_accuracy"] = accuracy
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def log(
        self,
        logs: dict[str, float],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Log a line of metrics. To lines with a training loss, add tokens per second, memory, tokens and seconds so
        far, and the model's own metrics.
        """
        super().log(self._measured(logs) if "loss" in logs else logs, *args, **kwargs)

    def _measured(self, logs: dict[str, float]) -> dict[str, float]:
        self._clock.count()
        before = next(
            (r for r in reversed(self.state.log_history) if "loss" in r),
            {"tokens": 0, "seconds": 0.0},
        )
        tokens = int(self._tokens[self._order[: self.state.global_step]].sum())
        seconds = self._clock.seconds
        speed = (tokens - before["tokens"]) / max(seconds - before["seconds"], 1e-9)
        routed = {}
        if self._recipe.routing:
            load = hfscale.expert_load(self.trained)
            routed = load.metrics()
            hfscale.ExpertLoadHistory(self._recipe.expert_loads).record(
                self.state.global_step, load
            )
        return {
            "loss": logs["loss"],
            "lr": logs["learning_rate"],
            "grad_norm": float(logs["grad_norm"]),
            "tokens_per_second": round(speed, 1),
            "memory": peak_memory(),
            "tokens": tokens,
            "seconds": round(seconds, 3),
            **utilization(self.trained.config, self._recipe, started_processes(), speed),
            **hfscale.metrics(self.trained),
            **routed,
        }


def train_to_the_end(trainer: Any, recipe: Recipe, resumes: bool) -> None:
    """Run the trainer, from a saved state if the run resumes. Raise :class:`hfscale.Preempted` if a signal stopped
    training before the last step.
    """
    config = trainer.model.config
    use_cache = config.use_cache
    try:
        trainer.train(resume_from_checkpoint=resumes or None)
    finally:
        stop_listening()
    config.use_cache = use_cache
    if trainer.state.global_step < recipe.training.steps:
        raise hfscale.Preempted


def callbacks_of(recipe: Recipe, resumes: bool) -> list[TrainerCallback]:
    """Return the trainer's callbacks for a recipe: saved states in memory, watchdog and preemption, metrics, and
    profiling.
    """
    every = recipe.training.memory_every
    memory = [MemoryUntilWritten(every)] if every else []
    return [
        *memory,
        Watch(recipe),
        RunLog(recipe, resumes),
        *([Profile(recipe)] if recipe.profile else []),
    ]


def optimizer_of(recipe: Recipe, model: Any) -> Any:
    """Create the optimizer that a recipe names."""
    training = recipe.training
    return hfscale.create_optimizer(
        model,
        training.optimizer,
        lr=training.learning_rate,
        weight_decay=training.weight_decay,
        betas=(0.9, 0.95),
        stochastic_rounding=training.stochastic_rounding,
    )


def arguments_of(
    recipe: Recipe,
    model: Any,
    microbatches: int,
    size: int,
) -> dict[str, Any]:
    """Return the recipe's settings as keyword arguments of ``TrainingArguments``."""
    training = recipe.training
    precision = runtime_of(model).options.around_products
    return {
        "output_dir": str(recipe.directory / "state"),
        "run_name": recipe.name,
        "max_steps": training.steps,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": microbatches,
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": round(training.warmup_ratio * training.steps),
        "max_grad_norm": training.max_grad_norm,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "seed": recipe.seed,
        "logging_steps": training.log_every,
        "logging_nan_inf_filter": False,
        "eval_strategy": "steps",
        "eval_steps": training.evaluate_every,
        "save_strategy": "steps" if training.save_every else "no",
        "save_steps": training.save_every or training.steps,
        "save_total_limit": 1,
        "report_to": [name for name in recipe.tracking if name != "csv"],
        "disable_tqdm": not is_main(),
        "use_cpu": not accelerators().is_available(),
        "dataloader_pin_memory": accelerators().is_available(),
        "remove_unused_columns": False,
    }


class Clock(TrainerCallback):
    """Measure the seconds spent in training steps, excluding evaluations and saves."""

    def __init__(self) -> None:
        self.seconds, self._since = 0.0, time.perf_counter()

    def count(self) -> None:
        """Add the time since the last call, or since the clock was restarted, to :attr:`seconds`."""
        now = time.perf_counter()
        self.seconds = self.seconds + now - self._since
        self._since = now

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock; in a resumed run, from the seconds that the last logged line holds."""
        self.seconds = max(
            (record.get("seconds", 0.0) for record in state.log_history), default=0.0
        )
        self._since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Add the time of the step that ended."""
        self.count()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restart the clock, so that the time of an evaluation or a save is not counted."""
        self._since = time.perf_counter()

    on_save = on_evaluate


class Watch(TrainerCallback):
    """Stop cleanly when a signal announces preemption, start the watchdog, and try a save after the first step, each if
    the recipe asks for it.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._check = recipe.save_check

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        """Install signal handlers for preemption if the recipe saves states, and start the watchdog if the recipe sets
        one.
        """
        training = self._recipe.training
        if training.save_every:
            hfscale.preempted(model)
        if training.watchdog is not None:
            hfscale.watchdog(model, patience=training.watchdog, end=True)

    def on_step_end(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        """After the first step, try a save if the recipe asks for it. After a signal, save and stop. After the last
        step, log metrics.
        """
        if self._check:
            self._check = False
            check = hfscale.check_save(model, optimizer.optimizer, self._recipe.directory)
            if is_main():
                tqdm.write(
                    f"a state takes {check.bytes / 2**30:.2f} of {check.free / 2**30:.2f} GiB that are free, "
                    f"{check.save_seconds:.1f} s to save and {check.load_seconds:.1f} s to load"
                )
        if state.global_step >= state.max_steps:
            control.should_log = True
        elif self._recipe.training.save_every and hfscale.preempted(model):
            control.should_save = control.should_training_stop = True


def rows_of(recipe: Recipe, data: Dataset, model: Any, tokenizer: Any) -> Rows:
    """Wrap a tokenized data set in the class that makes batches for its data format. ``tokenizer`` is the processor of
    a vision-language model.
    """
    if recipe.data.images_column is not None:
        return PictureRows(data, tokenizer)
    kind = {"pairs": PairRows, "classes": ClassRows}.get(recipe.data.format)
    return Rows(data) if kind is None else kind(data, model.config.pad_token_id)


def measure(
    model: Any, task: Task, data: Rows, microbatches: int, size: int
) -> tuple[float, float | None]:
    """Return the mean loss over all labels of ``data``, which does not depend on the layout, and the fraction of right
    answers (``None`` if the task has no right answers). Call it on every rank.

    ``microbatches`` and ``size`` (sequences per microbatch) are those of a training step, so that the pipeline schedule
    that trains can also evaluate.
    """
    model.eval()
    loss = torch.zeros((), dtype=torch.float64)
    right = 0
    for rows, counted, everywhere in evaluation_steps(
        len(data), hfscale.batch_rank(model), hfscale.batch_world(model), microbatches * size
    ):
        step = data.step(rows, size, counted)
        if task.right is None:
            mean = hfscale.eval_step(model, step, task.loss)
        else:
            mean, outputs = hfscale.eval_step(model, step, task.loss, return_outputs=True)
            right += sum(int(task.right(*each)) for each in zip(outputs, step, strict=True))
        # Weight each step's mean by its number of labels, which differs between steps.
        loss += int(data.labels[everywhere].sum()) * mean.double().cpu()
    labels = int(data.labels.sum())
    if task.right is None:
        return float(loss) / labels, None
    copies = started_processes() // hfscale.batch_world(model)  # ranks with the same batch
    return float(loss) / labels, sum(gathered(right)) / copies / labels


def utilization(
    config: Any, recipe: Recipe, devices: int, tokens_per_second: float
) -> dict[str, float]:
    """Return ``{"mfu": ...}``: the model FLOPs utilization, the fraction of the devices' peak FLOPs that training uses.
    Return an empty dict if the peak or the model's FLOPs are unknown.
    """
    adapted = isinstance(recipe, FinetuneRecipe) and bool(recipe.adapter)
    told = recipe.training.peak_tflops
    peak = devices * (peak_flops() if told is None else 1e12 * told)
    try:
        needed = flops_per_token(config, recipe.data.sequence_length, adapted)
    except ConfigError:  # raised unless the model is a decoder with layers of one kind
        return {}
    return {"mfu": round(tokens_per_second * needed / peak, 4)} if peak else {}


def flops_per_token(config: Any, sequence_length: int, adapted: bool) -> float:
    """Return the FLOPs that training needs per token (Chowdhery et al. 2022, PaLM).

    A forward pass needs ``2`` FLOPs for each weight that multiplies the token, and ``4 x width x tokens`` FLOPs per
    layer for attention, where ``width`` is that of all query heads. A backward pass needs twice as many, or the same
    number if ``adapted`` (only adapters train), since frozen weights get no gradients. Activation recomputation is not
    included.
    """
    shape = shape_of(config)
    weights = shape.layers * shape.active_weights + shape.table_weights
    forward = 2 * weights + 4 * shape.layers * shape.queries * sequence_length
    return forward * (2.0 if adapted else 3.0)


def peak_flops() -> float:
    """Return the peak dense 16-bit FLOPs per second of this process's device; 0 if unknown."""
    if not accelerators().is_available():
        return 0.0
    name = accelerators().get_device_name().lower()
    fitting = [machine for machine in machine_names() if machine.partition("-")[0] in name]
    return find_machine(fitting[0]).flops if fitting else 0.0
