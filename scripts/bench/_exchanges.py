"""Count the collectives of a step by kind, and the bytes that leave the rank, whoever issued them.

Unlike :func:`hfscale.testing.count_traffic` it also sees functional collectives, which transformers uses, and tells
what of an uneven all-to-all stays on the rank.
"""

import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Beginnings of operators' names, without underscores, in torch's two namespaces of collectives.
_KINDS = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "isend": "send",
}
_SOURCES = ("input_tensors", "input_tensor", "inputs", "input_list", "input", "tensors", "tensor")


@dataclass
class Exchanges:
    """What one rank gave to collectives of more than one rank.

    Attributes:
        calls: kind -> how often; an all-to-all of integers is ``all-to-all of counts``.
        sent: kind -> bytes that go to other ranks, where reductions and gathers run as rings.
    """

    calls: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)


class _Counting(TorchDispatchMode):
    def __init__(self, exchanges: Exchanges) -> None:
        super().__init__()
        self.exchanges = exchanges

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # come again with what it does to local tensors
        if func.namespace in ("c10d", "_c10d_functional"):
            names = [argument.name for argument in func._schema.arguments]
            self._note(
                func._schema.name, {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            )
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, given: dict[str, Any]) -> None:
        plain = name.partition("::")[2].replace("_", "")
        kind = next((kind for start, kind in _KINDS.items() if plain.startswith(start)), None)
        group = _group(given)
        if kind is None or group.size() == 1:
            return
        source = next(given[key] for key in _SOURCES if key in given)
        tensors = [leaf for leaf in tree_leaves(source) if isinstance(leaf, Tensor)]
        if kind == "all-to-all" and not tensors[0].is_floating_point():
            kind = "all-to-all of counts"
        self.exchanges.calls[kind] += 1
        self.exchanges.sent[kind] += _leaving(kind, tensors, given.get("input_split_sizes"), group)


def _group(given: dict[str, Any]) -> dist.ProcessGroup:
    if "process_group" in given:
        return dist.ProcessGroup.unbox(given["process_group"])
    name = given.get("group_name")
    return _resolve_process_group(name) if isinstance(name, str) else name or dist.group.WORLD


def _leaving(
    kind: str, tensors: list[Tensor], splits: list[int] | None, group: dist.ProcessGroup
) -> int:
    ranks = group.size()
    own = group.rank()
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    if kind.startswith("all-to-all"):
        if len(tensors) == ranks > 1:  # a list, one for each rank
            return sum(sizes) - sizes[own]
        return sizes[0] - (
            sizes[0] * splits[own] // max(sum(splits), 1) if splits else sizes[0] // ranks
        )
    factors = {
        "all-reduce": 2 * (ranks - 1) / ranks,
        "all-gather": ranks - 1,
        "reduce-scatter": (ranks - 1) / ranks,
    }
    return round(sum(sizes) * factors.get(kind, 1.0))


@contextmanager
def count_exchanges() -> Iterator[Exchanges]:
    """Count within; CPU backward passes are included, since they run on the calling thread."""
    exchanges = Exchanges()
    with _Counting(exchanges), torch.autograd.set_multithreading_enabled(False):
        yield exchanges


def summary(
    deep: list[Exchanges], flat: list[Exchanges], layers: int, fewer: int
) -> dict[str, Any]:
    """What a step and a layer exchange, from what each rank counted with ``layers`` layers and with ``fewer``."""
    more = layers - fewer
    names = sorted(deep[0].calls)
    sent = {
        name: [a.sent[name] - b.sent[name] for a, b in zip(deep, flat, strict=True)]
        for name in names
    }
    return {
        "collectives per step": dict(sorted(deep[0].calls.items())),
        "collectives per layer": {
            name: (deep[0].calls[name] - flat[0].calls[name]) / more for name in names
        },
        "bytes sent per layer": {
            name: round(statistics.mean(values) / more) for name, values in sent.items()
        },
    }


def rows_away(model: Any, batches: list[Tensor], owned: int, ranks: int) -> float:
    """Rows that a rank's routers give to other ranks' experts, a mean over layers and ranks.

    A rank routes its batch, or its contiguous part of the only batch, and owns ``owned`` successive experts.
    """
    chosen: list[Tensor] = []
    handles = [
        layer.mlp.gate.register_forward_hook(lambda module, given, output: chosen.append(output[2]))
        for layer in model.model.layers
    ]
    away = []
    with torch.no_grad():
        for index, ids in enumerate(batches):
            model(input_ids=ids, use_cache=False)
            parts = [part for rows in chosen for part in enumerate(rows.chunk(ranks))]
            if len(batches) > 1:
                parts = [(index, rows) for rows in chosen]
            away += [(rows // owned != rank).sum().item() for rank, rows in parts]
            chosen.clear()
    for handle in handles:
        handle.remove()
    return statistics.mean(away)
