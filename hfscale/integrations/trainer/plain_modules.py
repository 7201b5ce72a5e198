"""Leave modules that are no models of transformers to the stock Trainer, in one process, as stock code trains them.

Nothing of such a module is known: it has no plan and no runtime, which every hook of the mixin asks. So the trainer
gets a class that looks methods up past the mixins: the stock Trainer's, and those of a script's own subclass.
"""

from typing import Any

from torch import nn

from ..._compat.peft import is_a_hosts
from ..._compat.transformers.classes import is_distributed_by_host
from ..._compat.transformers.trainer import StockTrainer, TrainerHooks
from ..._compat.trl import DataHooks
from ...config.environment import started_processes
from ...config.parallel import ParallelConfig
from ...train.runtime import find_runtime


class _PastMixins(type):
    """Leave out the mixins in the order in which methods of a class are looked up."""

    def mro(cls) -> list[type]:
        """Return the classes that methods are looked up in; those that are trainers themselves stay."""
        own, *others = super().mro()
        return [own, *(kind for kind in others if not _is_mixin(kind))]


def _is_mixin(kind: type) -> bool:
    ours = issubclass(kind, TrainerHooks | DataHooks)
    return ours and not issubclass(kind, StockTrainer)


def is_of_stock(model: Any, parallel: ParallelConfig | None) -> bool:
    """Return whether only the stock Trainer knows how to train ``model``, in one process: a module that is none of
    transformers, or holds one (a compiled model), or a model that is spread over devices by a ``device_map``.
    """
    layout = parallel or ParallelConfig()
    if not isinstance(model, nn.Module) or max(layout.total_size, started_processes()) > 1:
        return False
    known = is_a_hosts(model) and is_distributed_by_host(model, spread=False) is None
    return not known and find_runtime(model) is None


def become_stock(trainer: Any) -> None:
    """Let a trainer be what its class is without the mixins."""
    kind = type(trainer)
    trainer.__class__ = _PastMixins(kind.__name__, (kind,), {"__module__": kind.__module__})
