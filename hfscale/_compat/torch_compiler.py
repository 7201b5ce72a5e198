"""Undocumented names of torch's compiler: its backends by name, and what its partitioner may compute again."""

from collections.abc import Callable
from functools import cache
from typing import Any

_OPTION = "ban_recompute_materialized_backward"


@cache  # layers that share a backend share their graphs
def repeating_backend(named: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return a backend of ``torch.compile`` that also computes again, elementwise, what a product of the backward pass
    reads, from what is kept in any case: norms of the stream, and activations of gates. It repeats no product and no
    attention. The backend itself would keep them.
    """
    # Imported on use: it takes a second, and most runs compile nothing.
    import torch._functorch.config as partitioner
    from torch._dynamo import lookup_backend

    made = lookup_backend(named)

    def backend(graph: Any, inputs: Any, **options: Any) -> Any:
        if not hasattr(partitioner, _OPTION):
            return made(graph, inputs, **options)
        with partitioner.patch({_OPTION: False}):
            return made(graph, inputs, **options)

    return backend
