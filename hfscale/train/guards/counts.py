"""The number of parameters of the full model, on a rank that holds shards of it."""

import functools
import math

from torch import nn

from ..._compat.transformers.classes import empty_copy
from ..runtime import Runtime


def count_whole(runtime: Runtime) -> None:
    """Make ``model.num_parameters()`` return the number of the full model, on every rank, without communication.

    Parameters of other stages' layers are assumed to train as when the model was built: adapters alone, or everything.
    """
    model, plan = runtime.model, runtime.plan
    adapters = {adapter.name: math.prod(plan.by_name[adapter.name].shape) for adapter in plan.adapters}

    @functools.lru_cache
    def whole() -> tuple[dict[str, int], set[str]]:
        """Return sizes by stock names, and the names of embeddings."""
        empty = empty_copy(model)
        embeddings = {f"{name}.weight" for name, module in empty.named_modules() if isinstance(module, nn.Embedding)}
        return {**{name: each.numel() for name, each in empty.named_parameters()}, **adapters}, embeddings

    def num_parameters(only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        sizes, embeddings = whole()
        counted = {name: size for name, size in sizes.items() if not (exclude_embeddings and name in embeddings)}
        if not only_trainable:
            return sum(counted.values())
        live = {name: parameter.requires_grad for name, parameter in runtime.live_parameters().items()}
        return sum(size for name, size in counted.items() if live.get(name, name in adapters or not adapters))

    model.num_parameters = num_parameters
