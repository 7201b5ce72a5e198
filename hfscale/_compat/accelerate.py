"""Objects that Accelerate prepares: which ones it has prepared, their state, and the steps of a learning-rate schedule.

Read and run with Accelerate 1.15.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from accelerate import PartialState
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, get_sampler
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset

from ..errors import CheckpointError, ConfigError
from .replaced import attribute_replaced

_BATCHES = "batches_of_a_step"


class BatchScheduler(AcceleratedScheduler):
    """Step a learning-rate schedule ``batches()`` times per optimizer step: once for each different batch that the
    ranks have, or once in total with ``split_batches``. Accelerate's own class steps it once per process. A schedule
    that follows a metric is stepped once for each value of the metric.
    """

    _batches: Callable[[], int]

    @classmethod
    def of(cls, prepared: Any, batches: Callable[[], int]) -> Any:
        """Return ``prepared``, a schedule that Accelerate has prepared, after it has become one of this class."""
        prepared.__class__ = cls
        prepared.split_batches = True  # one step per call
        prepared._batches = batches
        return prepared

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step like Accelerate's schedule. A schedule of a fixed length (one cycle) is not stepped beyond its end."""
        told = bool(args or kwargs)  # a metric's value, or an epoch
        for _ in range(self._batches() if self.gradient_state.sync_gradients and not told else 1):
            # Schedules made of other schedules, and schedules that follow a metric, do not count steps.
            if getattr(self.scheduler, "_step_count", 0) <= getattr(
                self.scheduler, "total_steps", math.inf
            ):
                super().step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state, with the number of schedule steps per optimizer step."""
        return {**super().state_dict(), _BATCHES: self._batches()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the same number of optimizer steps, even if the number of schedule steps per optimizer step
        has changed since the state was saved.
        """
        state = dict(state_dict)
        now = self._batches()
        then = state.pop(_BATCHES, 1)
        if then != now and not _follows_a_metric(self.scheduler):
            if not isinstance(self.scheduler, LambdaLR):  # others store step counts
                raise CheckpointError(
                    f"the saved state of {type(self.scheduler).__name__} counts steps of {then} distinct batches per "
                    f"optimizer step, but this layout has {now} distinct batches: use a layout with {then} distinct "
                    "batches, or a schedule of transformers.get_scheduler, which can resume with any number"
                )
            epoch = state["last_epoch"] * now // then
            state.update(
                last_epoch=epoch, _step_count=state["_step_count"] + epoch - state["last_epoch"]
            )
        super().load_state_dict(state)


class ScaledOptimizer(AcceleratedOptimizer):
    """Step an optimizer of models that may skip steps by themselves (``skips(optimizer)``), because gradients
    overflowed in float16. Accelerate's own class knows only the steps that its own scaler skips.
    """

    _skips: Callable[[Any], bool]

    @classmethod
    def of(cls, prepared: Any, skips: Callable[[Any], bool]) -> Any:
        """Return ``prepared``, an optimizer that Accelerate has prepared, after it has become one of this class."""
        prepared.__class__ = cls
        prepared._skips = skips
        return prepared

    @property
    def step_was_skipped(self) -> bool:
        """Return whether the last step changed no weights, so that a learning-rate schedule must not step."""
        return self._skips(self.optimizer)


def split_among(inputs: Any, count: int, index: int, pads: bool) -> Any:
    """Return the part of ``inputs`` that Accelerate gives to process ``index`` of ``count``; with ``pads``, all parts
    are equally long.
    """
    state = PartialState()
    with (
        attribute_replaced(state, "num_processes", count),
        attribute_replaced(state, "process_index", index),
        state.split_between_processes(inputs, apply_padding=pads) as part,
    ):
        return part


def _follows_a_metric(scheduler: Any) -> bool:
    """Return whether a schedule takes a metric's value in each step, like ``ReduceLROnPlateau``. Such a schedule does
    not count steps.
    """
    given = inspect.signature(type(scheduler).step).parameters.values()
    return any(argument.default is inspect.Parameter.empty for argument in list(given)[1:])


@dataclass
class LastBatch:
    """Hold one rank's batch of the last step of a streamed data set. All ranks' batches of this step together have
    ``left`` new rows; their remaining rows repeat earlier rows to fill the batches.
    """

    batch: Any
    left: int


def count_last_batch(loader: Any) -> None:
    """Let a prepared loader of a streamed data set set its ``remainder`` to the number of new rows in the last step,
    without the rows that are repeated to fill the batches.

    Accelerate would take one rank's number of rows for the number on all ranks, or would not know the number and drop
    no repeated row.
    """
    base = loader.base_dataloader
    made = base.__iter__

    def iterate() -> Iterator[Any]:
        for batch in made():
            loader.remainder = batch.left if isinstance(batch, LastBatch) else 0
            yield batch.batch if isinstance(batch, LastBatch) else batch

    base.__iter__ = iterate  # Accelerate calls ``__iter__`` of the instance


def is_prepared(what: Any) -> bool:
    """Return whether any accelerator has already prepared ``what``, a data loader or a schedule."""
    return isinstance(what, DataLoaderShard | DataLoaderDispatcher | AcceleratedScheduler)


@dataclass
class Prepared:
    """Hold the objects that an accelerator has prepared, in order, and the objects registered to be saved with them."""

    models: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    registered: list[Any] = field(default_factory=list)

    def forget(self) -> None:
        """Forget all objects except the registered ones, like Accelerate when it frees memory."""
        for held in (self.models, self.optimizers, self.schedulers, self.loaders):
            held.clear()

    def of_one_run(
        self, accelerator: Any, orders: list[Any]
    ) -> tuple[nn.Module, Any, dict[str, Any]]:
        """Return the model, its optimizer (``None`` without one), and a map of names to the other objects whose states
        are saved: schedules, data loaders, registered objects, and ``orders`` (the objects that hold the order of
        rows).

        Raise :class:`ConfigError` unless there is exactly one model and at most one optimizer.
        """
        if len(self.models) != 1 or len(self.optimizers) > 1:
            raise ConfigError(
                "saving or loading a state needs exactly one prepared model and at most one prepared optimizer, got "
                f"{len(self.models)} models and {len(self.optimizers)} optimizers: save each model by itself with "
                "hfscale.save_state(model, directory, optimizer=...)"
            )
        optimizer = self.optimizers[0].optimizer if self.optimizers else None
        stateful = self.loaders if accelerator.use_stateful_dataloader else []
        positions = [_Position(loader, accelerator.num_processes) for loader in stateful]
        kinds = {
            "scheduler": self.schedulers,
            "dataloader": positions,
            "order": orders,
            "custom": self.registered,
        }
        others = {
            f"{kind}_{index}": batch
            for kind, held in kinds.items()
            for index, batch in enumerate(held)
        }
        return self.models[0], optimizer, others


def save_hooks(accelerator: Any) -> list[Callable[..., Any]]:
    """Return the functions that the script registered with ``register_save_state_pre_hook``. They are called before a
    state is saved, with the models, their weights and the directory.
    """
    return list(accelerator._save_model_state_pre_hook.values())


def load_hooks(accelerator: Any) -> list[Callable[..., Any]]:
    """Return the functions that the script registered with ``register_load_state_pre_hook``. They are called before a
    state is loaded, with the models and the directory.
    """
    return list(accelerator._load_model_state_pre_hook.values())


def list_model(accelerator: Any, model: nn.Module) -> None:
    """List a model as prepared by Accelerate without changing the model; Trainer would prepare one if none
    is listed.
    """
    note(accelerator._models, model)


def note(held: list[Any], made: Any) -> Any:
    """Append a prepared object to a list unless the list has it, and return the object."""
    if not any(each is made for each in held):
        held.append(made)
    return made


class _Position:
    """Save the values that a prepared loader needs to resume in another layout, in addition to its own state: the
    number of rows of all ranks' batches in a step, and the epoch and the seed that determine the order of rows.
    """

    _ROWS = "hfscale_rows"
    _EPOCH = "hfscale_epoch"
    _SEED = "hfscale_seed"

    def __init__(self, loader: Any, world: int) -> None:
        self._loader, self._sampler = loader, get_sampler(loader)
        self._rows: int | None = getattr(loader.batch_sampler, "effective_batch_size", None)
        with suppress(AttributeError, TypeError):  # a batch sampler may not tell it
            # Accelerate's ``total_batch_size`` of a stream counts the rows of this process only.
            streamed = isinstance(loader.dataset, IterableDataset)
            self._rows = self._rows or loader.total_batch_size * (world if streamed else 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state, with the number of rows, the epoch and the seed."""
        loader = self._loader
        under_way = any(
            reference is loader for reference in loader.gradient_state.dataloader_references
        )
        epoch = loader.iteration + (under_way and loader.end_of_dataloader)  # the epoch has ended
        seed = getattr(self._sampler, "initial_seed", None)
        return {
            **loader.state_dict(),
            self._ROWS: self._rows,
            self._EPOCH: epoch,
            self._SEED: seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the loader's state; refuse it if the batches of all ranks have another number of rows than
        when saved.
        """
        own = (self._ROWS, self._EPOCH, self._SEED)
        rows, epoch, seed = (state.get(name) for name in own)
        if None not in (rows, self._rows) and rows != self._rows:
            raise CheckpointError(
                f"the batches of the data loader had {rows} rows over all ranks when its state was saved, but now have "
                f"{self._rows}, so rows would be repeated or left out: change its batch_size to make the two numbers "
                "equal"
            )
        self._loader.iteration = epoch or 0  # the loader passes the epoch to its sampler or stream
        if seed is not None and hasattr(self._sampler, "initial_seed"):
            self._sampler.initial_seed = seed
        self._loader.load_state_dict(
            {name: value for name, value in state.items() if name not in own}
        )


def stock_optimizer(optimizer: Any) -> Any:
    """Return the torch optimizer inside wrappers such as Accelerate's; keep ``None``; refuse any other object."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer | None):
        raise ConfigError(
            f"optimizer={optimizer!r} must be a torch.optim.Optimizer: pass one, or leave optimizer= out"
        )
    return optimizer
