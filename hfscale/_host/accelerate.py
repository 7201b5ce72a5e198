"""Names of Accelerate that it does not promise to keep: the lists of what was prepared.

Read and run with Accelerate 1.15.
"""

from typing import Any

from torch.optim import Optimizer


def is_prepared(what: Any) -> bool:
    """Whether a data loader or a schedule has been prepared already."""
    return bool(getattr(what, "_is_accelerate_prepared", False))


def prepared_models(accelerator: Any) -> list[Any]:
    """The models that were prepared; what is appended is one of them."""
    return accelerator._models


def prepared_optimizers(accelerator: Any) -> list[Any]:
    """The optimizers that were prepared, in Accelerate's wrappers."""
    return accelerator._optimizers


def prepared_schedulers(accelerator: Any) -> list[Any]:
    """The schedules that were prepared; what is appended is one of them."""
    return accelerator._schedulers


def prepared_loaders(accelerator: Any) -> list[Any]:
    """The data loaders that were prepared; what is appended is one of them."""
    return accelerator._dataloaders


def registered_objects(accelerator: Any) -> list[Any]:
    """What else has a state to be saved (``register_for_checkpointing``)."""
    return accelerator._custom_objects


def stock_optimizer(optimizer: Any) -> Any:
    """The torch optimizer that Accelerate, or whoever, has wrapped; ``None`` stays ``None``."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer
