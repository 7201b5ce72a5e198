"""Undocumented names of torch's compiler: its backends by name, and an option of its partitioner for recomputation."""

from collections.abc import Callable
from functools import cache
from typing import Any

_OPTION = "ban_recompute_materialized_backward"


@cache  # layers that share a backend share their graphs
def repeating_backend(named: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return a backend of ``torch.compile`` that saves fewer activations than the backend ``named``. It recomputes
    cheap inputs of the backward pass's matrix products (outputs of norms, activations of gates) elementwise from
    tensors that are saved anyway. No matrix product and no attention is recomputed.
    """
    # Imported on use: the import takes a second, and most runs compile nothing.
    import torch._functorch.config as partitioner
    from torch._dynamo import lookup_backend

    made = lookup_backend(named)

    def backend(graph: Any, inputs: Any, **options: Any) -> Any:
        with partitioner.patch({_OPTION: False}):
            return made(graph, inputs, **options)

    return backend
