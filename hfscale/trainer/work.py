"""How many floating-point operations a batch is, as Trainer counts them."""

import math
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from .._host.transformers.classes import empty_copy
from ..runtime import Runtime

_counted: "WeakKeyDictionary[nn.Module, int]" = WeakKeyDictionary()


def operations(runtime: Runtime, inputs: Mapping[str, Any]) -> float:
    """``6 * tokens * parameters`` without embeddings, divided by the ranks that share the batch.

    Trainer adds up what all ranks say.
    """
    main = getattr(runtime.model, "main_input_name", "input_ids")
    if main not in inputs:  # as it is of prompts, which are a list
        return 0.0
    mesh = runtime.mesh
    sharing = mesh.layout.total_size / mesh.batch_world
    return 6.0 * float(inputs[main].numel()) * _parameters(runtime) / sharing


def _parameters(runtime: Runtime) -> int:
    """Of the whole model, adapters included; this rank holds a part of them."""
    if runtime.model not in _counted:
        adapters = sum(math.prod(runtime.plan.by_name[adapter.name].shape) for adapter in runtime.plan.adapters)
        _counted[runtime.model] = int(empty_copy(runtime.model).num_parameters(exclude_embeddings=True)) + adapters
    return _counted[runtime.model]
