"""Predict the memory of a rank before training, and compare it with the measurement afterwards."""

import math
from typing import Any

import hfscale

from .._compat.torch_device import accelerators
from .batch_sizes import per_rank
from .launch import layout_of
from .main_process import gathered, is_main
from .schema import Recipe, RecipeError
from .tasks import task_of

GIB = 2**30


def expect_memory(model: Any, recipe: Recipe, limit: float | None) -> Any:
    """Print the predicted memory of the largest rank by kind, and return its estimate; call it on every rank. More than
    ``limit`` GiB are too many; ``None`` makes no estimate.
    """
    if limit is None:
        return None
    layout = layout_of(recipe)
    own = hfscale.memory_estimate(model, recipe.training.optimizer, **of_one_microbatch(recipe, layout))
    most = max(gathered(own), key=lambda estimate: estimate.total)
    if is_main():
        print(f"memory predicted, of the rank with most:\n{most}", flush=True)
    if most.total > limit * GIB:
        kind, size = max(most.kinds.items(), key=lambda item: item[1])
        raise RecipeError(
            f"--max-memory={limit:g}: a rank would need about {most.total / GIB:.2f} GiB, most of it {kind} "
            f"({size / GIB:.2f} GiB): use more ranks, a smaller training.microbatch_size, "
            "training.gradient_checkpointing=true, an 8-bit training.optimizer, or an adapter over a quantized base"
        )
    return most


def of_one_microbatch(recipe: Recipe, layout: hfscale.ParallelConfig) -> dict[str, Any]:
    """Return the arguments of :func:`hfscale.memory_estimate` for a recipe's steps."""
    training = recipe.training
    microbatches, size = per_rank(training.batch_size, layout.batch_world, training.microbatch_size)
    count = layout.microbatches_of(microbatches)
    length, again = recipe.data.sequence_length, training.gradient_checkpointing
    tokens = math.ceil(microbatches * size / count) * length * task_of(recipe.data).rows
    sizes = {"tokens": tokens, "sequence_length": length}
    return {**sizes, "num_microbatches": count, "gradient_checkpointing": again}


def beside(expected: Any, outcome: Any) -> str:
    """Return a line with the predicted and the measured peak."""
    measured = f"measured {outcome.memory / GIB:.2f} GiB"
    if not accelerators().is_available():  # what the system counts, with Python and its libraries
        measured += f" of the whole process, {outcome.memory_before / GIB:.2f} GiB before the first step"
    return f"memory of the rank with most: predicted {expected.total / GIB:.2f} GiB, {measured}"
