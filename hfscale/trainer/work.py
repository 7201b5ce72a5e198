"""How many floating-point operations a batch is, as Trainer counts them."""

from collections.abc import Mapping
from typing import Any

from ..runtime import Runtime


def operations(runtime: Runtime, inputs: Mapping[str, Any]) -> float:
    """``6 * tokens * parameters`` without embeddings, divided by the ranks that share the batch.

    Trainer adds up what all ranks say.
    """
    main = getattr(runtime.model, "main_input_name", "input_ids")
    if main not in inputs:  # as it is of prompts, which are a list
        return 0.0
    mesh = runtime.mesh
    sharing = mesh.layout.total_size / mesh.batch_world
    return 6.0 * float(inputs[main].numel()) * runtime.model.num_parameters(exclude_embeddings=True) / sharing
