"""Assign sequences to steps and ranks, and predict the memory of the rank that needs most."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import hfscale

from .._compat.torch_device import accelerators
from .launch import layout_of
from .main_process import gathered, is_main
from .schema import Recipe, RecipeError
from .tasks import task_of

GIB = 2**30


def per_rank(batch_size: int, batch_world: int, microbatch_size: int | None) -> tuple[int, int]:
    """Return the number of microbatches that each data rank runs in a step, and the number of sequences per microbatch.
    ``batch_size`` counts the sequences of a step over all ranks, ``batch_world`` its distinct batches.
    """
    if batch_size % batch_world:
        raise RecipeError(
            f"training.batch_size={batch_size} does not divide over the {batch_world} distinct batches of the layout: "
            f"use a multiple of {batch_world}"
        )
    share = batch_size // batch_world
    size = microbatch_size or share
    if share % size:
        raise RecipeError(
            f"training.microbatch_size={size} does not divide the {share} sequences that each of {batch_world} "
            f"distinct batch(es) gets of training.batch_size={batch_size}: use a divisor of {share}"
        )
    return share // size, size


def microbatches_of_step(recipe: Recipe, batch_world: int) -> tuple[int, int]:
    """Return the number of microbatches that each data rank runs in a step, and the number of data rows per microbatch.

    They are those of :func:`per_rank`, unless a row becomes several texts or pictures (such as the two texts of a
    preference pair). A pipeline could then split a row between microbatches, so the result has exactly as many
    microbatches as the pipeline runs.
    """
    training = recipe.training
    microbatches, size = per_rank(training.batch_size, batch_world, training.microbatch_size)
    if not recipe.data.is_whole:
        return microbatches, size
    wanted = layout_of(recipe).microbatches_of(microbatches)
    if microbatches * size % wanted:
        raise RecipeError(
            f"the {microbatches * size} rows of each data rank, its share of "
            f"training.batch_size={training.batch_size}, do not divide into {wanted} microbatches: change "
            "training.batch_size, or set parallel.num_microbatches"
        )
    return wanted, microbatches * size // wanted


def order_of(steps: int, batch_size: int, available: int, seed: int) -> Tensor:
    """Return a tensor ``[steps, batch_size]`` with the indices of the sequences that each step trains on, over all
    ranks.

    The ``available`` sequences are shuffled again for every epoch, seeded by ``seed`` and the epoch's number.
    """
    epochs = range(-(-steps * batch_size // available))
    drawn = [torch.Generator().manual_seed(seed * 1_000_003 + epoch) for epoch in epochs]
    visited = torch.cat([torch.randperm(available, generator=generator) for generator in drawn])
    return visited[: steps * batch_size].view(steps, batch_size)


def by_cost(order: Tensor, costs: Tensor, batch_world: int, size: int) -> Tensor:
    """Reorder the sequences within each step so that all data ranks get sequences of about the same total cost, when
    :func:`dealt` gives them out in microbatches of ``size`` sequences.

    Args:
        order: indices of the sequences of each step, ``[steps, batch_size]``.
        costs: the computing cost of every sequence, in any unit.
        batch_world: the number of data ranks with distinct batches.
    """
    falling = order.gather(
        1,
        costs[order].argsort(dim=1, descending=True, stable=True),
    )
    rounds = falling.view(len(order), -1, batch_world, size)
    # The rank with the costliest microbatch of one round gets the cheapest microbatch of the next round.
    rounds[:, 1::2] = rounds[:, 1::2].flip(2)
    return rounds.transpose(1, 2).flatten(1)


def dealt(order: Tensor, batch_world: int, microbatches: int, size: int) -> list[int]:
    """Return all sequences as one list for Accelerate's data loader, which gives ``size`` entries to each data rank in
    turn.

    ``order`` holds the sequences of each step, ``[steps, batch_size]``. A step's row consists of ``batch_world`` equal
    intervals, one per data rank, each with ``microbatches`` times ``size`` sequences; the list is ordered so that every
    rank gets its interval, one microbatch after another.
    """
    return order.view(-1, batch_world, microbatches, size).transpose(1, 2).flatten().tolist()


def evaluation_steps(
    available: int, batch_rank: int, batch_world: int, size: int
) -> Iterator[tuple[list[int], int, range]]:
    """Yield three values for each evaluation step: the ``size`` row indices of this data rank; how many of them are
    evaluated (the rest are padding, to keep the size); and the range of all rows that the ranks evaluate in this step.
    """
    for start in range(0, available, size * batch_world):
        total = min(size * batch_world, available - start)
        share = -(-total // batch_world)
        first = start + batch_rank * share
        counted = max(0, min(share, start + total - first))
        yield (
            [first + index if index < counted else 0 for index in range(size)],
            counted,
            range(start, start + total),
        )


def expect_memory(model: Any, recipe: Recipe, limit: float | None) -> Any:
    """Print the memory estimate of the rank that needs most, and return it; raise :class:`RecipeError` if it is more
    than ``limit`` GiB. Do nothing without a limit.
    """
    if limit is None:
        return None
    layout = layout_of(recipe)
    own = hfscale.memory_estimate(
        model, recipe.training.optimizer, **of_one_microbatch(recipe, layout)
    )
    most = max(gathered(own), key=lambda estimate: estimate.total)
    if is_main():
        print(f"predicted memory of the largest rank:\n{most}", flush=True)
    if most.total > limit * GIB:
        kind, size = max(most.kinds.items(), key=lambda item: item[1])
        raise RecipeError(
            f"--max-memory={limit:g}: a rank would need about {most.total / GIB:.2f} GiB, most of it {kind} "
            f"({size / GIB:.2f} GiB): use more ranks, a smaller training.microbatch_size, "
            "training.gradient_checkpointing=true, an 8-bit training.optimizer, or an adapter over a quantized base"
        )
    return most


def of_one_microbatch(recipe: Recipe, layout: hfscale.ParallelConfig) -> dict[str, Any]:
    """Return the arguments of :func:`hfscale.memory_estimate` that describe the recipe's microbatches: tokens per
    microbatch, sequence length, number of microbatches, and activation checkpointing.
    """
    training = recipe.training
    microbatches, size = per_rank(training.batch_size, layout.batch_world, training.microbatch_size)
    count = layout.microbatches_of(microbatches)
    length = recipe.data.sequence_length
    again = training.gradient_checkpointing
    tokens = math.ceil(microbatches * size / count) * length * task_of(recipe.data).rows
    return {
        "tokens": tokens,
        "sequence_length": length,
        "num_microbatches": count,
        "gradient_checkpointing": again,
    }


def beside(expected: Any, outcome: Any) -> str:
    """Return a line that compares the predicted with the measured peak memory of the rank that needs most."""
    measured = f"measured {outcome.memory / GIB:.2f} GiB"
    if not accelerators().is_available():  # resident memory, Python and its libraries included
        measured += (
            f" of the whole process, {outcome.memory_before / GIB:.2f} GiB before the first step"
        )
    return f"memory of the rank with most: predicted {expected.total / GIB:.2f} GiB, {measured}"
