"""Count the FLOPs of a batch as Trainer does."""

from collections.abc import Mapping
from typing import Any

from ...train.runtime import Runtime


def operations(runtime: Runtime, inputs: Mapping[str, Any]) -> float:
    """Return ``6 * tokens * parameters`` without embeddings, divided by the number of ranks that share the batch.

    Trainer sums this over all ranks.
    """
    main = getattr(runtime.model, "main_input_name", "input_ids")
    if main not in inputs:  # prompts are a list
        return 0.0
    mesh = runtime.mesh
    sharing = mesh.layout.total_size / mesh.batch_world
    return 6.0 * float(inputs[main].numel()) * runtime.model.num_parameters(exclude_embeddings=True) / sharing
