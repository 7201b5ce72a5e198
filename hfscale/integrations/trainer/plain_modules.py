"""Leave modules that are no transformers models to the stock Trainer, in one process.

Such a module has no plan and no runtime, which every hook of the mixin needs. So the trainer gets a class whose method
resolution skips the mixins: methods come from the stock Trainer and from a script's own subclass.
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
    """Omit the mixins from the method resolution order of a class."""

    def mro(cls) -> list[type]:
        """Return the method resolution order without mixins; classes that are trainers stay."""
        own, *others = super().mro()
        return [own, *(kind for kind in others if not _is_mixin(kind))]


def _is_mixin(kind: type) -> bool:
    ours = issubclass(kind, TrainerHooks | DataHooks)
    return ours and not issubclass(kind, StockTrainer)


def is_of_stock(model: Any, parallel: ParallelConfig | None) -> bool:
    """Return whether only the stock Trainer can train ``model``, in one process: a module that is no transformers
    model, a module that contains one (a compiled model), or a model that a ``device_map`` places on several devices.
    """
    layout = parallel or ParallelConfig()
    if not isinstance(model, nn.Module) or max(layout.total_size, started_processes()) > 1:
        return False
    known = is_a_hosts(model) and is_distributed_by_host(model, spread=False) is None
    return not known and find_runtime(model) is None


def become_stock(trainer: Any) -> None:
    """Change a trainer's class to one that behaves like its class without the mixins."""
    kind = type(trainer)
    trainer.__class__ = _PastMixins(kind.__name__, (kind,), {"__module__": kind.__module__})
