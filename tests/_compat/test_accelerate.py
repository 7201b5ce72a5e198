"""What ``_compat/accelerate.py`` relies on of Accelerate's lists of what was prepared, and of torch's schedules."""

from typing import Any

import pytest
import torch
from torch import nn

from .relied_on import relying

ACCELERATOR = "accelerate.Accelerator"
relies_on = relying("accelerate.py")


@pytest.fixture
def accelerator() -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True)


@relies_on(
    f"{ACCELERATOR}:_models",
    f"{ACCELERATOR}:_optimizers",
    f"{ACCELERATOR}:_schedulers",
    f"{ACCELERATOR}:_dataloaders",
    "torch.optim.Optimizer:_is_accelerate_prepared",
)
def test_what_is_prepared_is_listed_and_marked(accelerator: Any) -> None:
    """``prepare`` appends what it returns to ``_models``, ``_optimizers``, ``_schedulers`` or ``_dataloaders``, and
    sets ``_is_accelerate_prepared`` on it.
    """
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = torch.utils.data.DataLoader([1, 2])
    made = accelerator.prepare(model, optimizer, schedule, loader)
    lists = (
        accelerator._models,
        accelerator._optimizers,
        accelerator._schedulers,
        accelerator._dataloaders,
    )
    assert [[each] for each in made] == [*lists]
    assert all(each._is_accelerate_prepared for each in made[1:])
    assert not hasattr(loader, "_is_accelerate_prepared")


@relies_on(f"{ACCELERATOR}:_custom_objects")
def test_other_objects_of_a_state_are_listed(accelerator: Any) -> None:
    """``register_for_checkpointing`` appends to ``_custom_objects``."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1)
    accelerator.register_for_checkpointing(optimizer)
    assert accelerator._custom_objects == [optimizer]


@relies_on("torch.optim.lr_scheduler.LRScheduler:_step_count")
def test_a_schedule_counts_its_steps() -> None:
    """``_step_count`` of a schedule, also in its state, is one more than its steps, and bounded by ``total_steps``."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1, total_steps=2)
    optimizer.step()
    schedule.step()
    assert schedule._step_count == schedule.state_dict()["_step_count"] == 2
    assert schedule.last_epoch == 1
    assert schedule.total_steps == 2
