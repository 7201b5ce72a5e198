"""What ``_compat/accelerate.py`` relies on of Accelerate: by what name it makes schedules, and what it returns.

Most of these names are public, and what they do is not promised.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from .relied_on import relying

relies_on = relying("accelerate.py")


@pytest.fixture
def optimizer() -> Any:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1)


@relies_on("accelerate.Accelerator:_models")
def test_trainer_prepares_a_model_where_none_is_listed() -> None:
    """``_models`` has the prepared models; ``Trainer`` prepares its own for an evaluation where it is empty."""
    from accelerate import Accelerator
    from transformers import Trainer

    preparing = Accelerator(cpu=True)
    assert preparing._models == []
    model = preparing.prepare_model(nn.Linear(1, 1))
    assert preparing._models == [model]
    assert "_models" in Trainer.evaluation_loop.__code__.co_names


@relies_on(
    "accelerate.Accelerator:_save_model_state_pre_hook",
    "accelerate.Accelerator:_load_model_state_pre_hook",
)
def test_hooks_of_states_are_listed_by_number() -> None:
    """Both have a script's hooks in their order; what registers them is public, and what calls them is the save."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    hooks = [lambda *_: None, lambda *_: None]
    for hook in hooks:
        accelerator.register_save_state_pre_hook(hook)
        accelerator.register_load_state_pre_hook(hook)
    assert list(accelerator._save_model_state_pre_hook.values()) == hooks
    assert list(accelerator._load_model_state_pre_hook.values()) == hooks


@relies_on("accelerate.scheduler.AcceleratedScheduler")
def test_a_prepared_schedule_may_change_its_class(optimizer: Any, tmp_path: Any) -> None:
    """``prepare_scheduler`` returns an ``AcceleratedScheduler`` of the schedule and its optimizer, and saves that
    object's state; with its ``split_batches``, a step is one step of the schedule, whatever the number of processes.
    """
    from accelerate import Accelerator
    from accelerate.scheduler import AcceleratedScheduler

    class Mine(AcceleratedScheduler):
        def state_dict(self) -> Any:
            return {"mine": True, **super().state_dict()}

    preparing = Accelerator(cpu=True)
    stepped = preparing.prepare_optimizer(optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    found = preparing.prepare_scheduler(schedule)
    assert type(found) is AcceleratedScheduler
    assert (found.scheduler, found.optimizers) == (schedule, [stepped])
    found.__class__ = Mine
    found.split_batches = True
    optimizer.step()
    with patch("accelerate.scheduler.AcceleratorState", side_effect=AssertionError):
        found.step()  # does not ask for the number of processes
    assert schedule.last_epoch == 1
    preparing.save_state(tmp_path)
    assert torch.load(tmp_path / "scheduler.bin")["mine"]


def _loader_of_a_stream() -> Any:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter([1, 2])

    return torch.utils.data.DataLoader(Stream())


@relies_on("accelerate.data_loader.DataLoaderShard", "accelerate.data_loader.DataLoaderDispatcher")
def test_a_prepared_loader_is_of_two_classes() -> None:
    """``prepare_data_loader`` returns a ``DataLoaderShard``, or a ``DataLoaderDispatcher`` where one process reads."""
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, prepare_data_loader

    loader = torch.utils.data.DataLoader([1, 2])
    dispatched = prepare_data_loader(
        _loader_of_a_stream(), dispatch_batches=True, put_on_device=True
    )
    assert isinstance(Accelerator(cpu=True).prepare(loader), DataLoaderShard)
    assert isinstance(dispatched, DataLoaderDispatcher)


@relies_on("torch.optim.lr_scheduler.LRScheduler:_step_count")
def test_a_schedule_counts_its_steps(optimizer: Any) -> None:
    """``_step_count`` of a schedule, also in its state, is one more than its steps, and bounded by ``total_steps``."""
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1, total_steps=2)
    optimizer.step()
    schedule.step()
    assert schedule._step_count == schedule.state_dict()["_step_count"] == 2
    assert schedule.last_epoch == 1
    assert schedule.total_steps == 2
