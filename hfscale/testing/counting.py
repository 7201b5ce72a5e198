"""Count the collectives of a rank and their bytes, whichever library calls them, at torch's dispatcher."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._compat.torch import TorchDispatchMode, schema_of, tree_leaves
from ..cost.model.traffic import ring_share


@dataclass
class Traffic:
    """Hold the number of calls and the bytes of each kind of collective that one rank has run."""

    calls: Counter[str] = field(default_factory=Counter)  # collective -> number of calls
    # collective -> bytes of its inputs (of an all-gather this rank's shard, of a reduce-scatter the full input)
    payload: Counter[str] = field(default_factory=Counter)

    def bytes_sent(self, ranks: int) -> float:
        """Return the bytes that each rank sends for the counted collectives, if each collective runs as a ring over
        ``ranks`` ranks.

        With ``n`` ranks, a rank sends ``2 (n-1)/n`` of an all-reduce's payload, ``n-1`` times an all-gather's, and
        ``(n-1)/n`` of a reduce-scatter's or an all-to-all's.
        """
        return sum(size * ring_share(name, ranks) for name, size in self.payload.items())


class _Counting(TorchDispatchMode):
    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if func.namespace == "c10d":
            name = (
                schema_of(func)
                .name.removeprefix("c10d::")
                .strip("_")
                .removesuffix("_base")
                .strip("_")
            )
            # allgather(outputs, inputs) and reduce_scatter(outputs, inputs): the input is the second argument
            source = (
                args[1] if name.startswith(("allgather", "reduce_scatter", "alltoall")) else args[0]
            )
            tensors = [leaf for leaf in tree_leaves(source) if isinstance(leaf, Tensor)]
            self.traffic.calls[name] += 1
            self.traffic.payload[name] += sum(
                tensor.numel() * tensor.element_size() for tensor in tensors
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the collectives that this rank runs inside the ``with`` block. Backward passes run on the calling thread,
    so that their collectives on the CPU are counted, too.
    """
    traffic = Traffic()
    with _Counting(traffic), torch.autograd.set_multithreading_enabled(False):
        yield traffic
