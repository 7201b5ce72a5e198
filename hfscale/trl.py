"""Provide TRL's trainers for models in any layout: ``from hfscale.trl import SFTTrainer``, with TRL's own configs and
arguments.

Each trainer is a class such as ``class SFTTrainer(hfscale.TrainerMixin, trl.SFTTrainer)``, which is created when it is
first imported. A trainer of TRL that is not listed in ``__all__`` can be subclassed in the same way. See
:class:`hfscale.TrainerMixin` for the argument ``parallel``, and docs/trainer.md.
"""

import importlib
from typing import Any

from .errors import ConfigError
from .integrations.trainer.mixin import DistillationMixin, TrainerMixin

__all__ = [
    "DPOTrainer",
    "DistillationTrainer",
    "GRPOTrainer",
    "KTOTrainer",
    "RLOOTrainer",
    "RewardTrainer",
    "SFTTrainer",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}: use one of {', '.join(__all__)}"
        )
    try:
        stock = getattr(importlib.import_module("trl"), name)
    except ImportError as error:
        raise ConfigError(
            f"hfscale.trl.{name} needs TRL 1.15 or later ({error}): pip install 'hfscale[trl]'"
        ) from error
    mixin = DistillationMixin if name == "DistillationTrainer" else TrainerMixin
    made = type(
        name, (mixin, stock), {"__module__": __name__, "__doc__": f"``trl.{name}`` in any layout."}
    )
    globals()[name] = made
    return made


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
