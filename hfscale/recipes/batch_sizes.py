"""Assign sequences to steps and ranks: pure functions of integers."""

from collections.abc import Iterator

import torch
from torch import Tensor

import hfscale

from .schema import Recipe, RecipeError


def per_rank(batch_size: int, batch_world: int, microbatch_size: int | None) -> tuple[int, int]:
    """Return the number of microbatches per rank in a step, and of sequences in each."""
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
            f"distinct batch(es) has of training.batch_size={batch_size}: use a divisor of {share}"
        )
    return share // size, size


def microbatches_of_step(recipe: Recipe, batch_world: int) -> tuple[int, int]:
    """Return :func:`per_rank` for a recipe; rows of several texts are divided here, and not by the pipeline."""
    training = recipe.training
    microbatches, size = per_rank(training.batch_size, batch_world, training.microbatch_size)
    if not recipe.data.is_whole:
        return microbatches, size
    wanted = hfscale.ParallelConfig(**recipe.parallel).microbatches_of(microbatches)
    if microbatches * size % wanted:
        raise RecipeError(
            f"the {microbatches * size} rows that a data rank has of training.batch_size={training.batch_size} do not "
            f"divide into {wanted} microbatches: change training.batch_size, or set parallel.num_microbatches"
        )
    return wanted, microbatches * size // wanted


def order_of(steps: int, batch_size: int, available: int, seed: int) -> Tensor:
    """Return the sequences of each optimizer step over all ranks: ``steps`` rows of ``batch_size``. Every epoch visits
    all sequences once, in an order of its own, and a step may begin in one epoch and end in the next.
    """
    epochs = range(-(-steps * batch_size // available))
    drawn = [torch.Generator().manual_seed(seed * 1_000_003 + epoch) for epoch in epochs]
    visited = torch.cat([torch.randperm(available, generator=generator) for generator in drawn])
    return visited[: steps * batch_size].view(steps, batch_size)


def dealt(order: Tensor, batch_world: int, microbatches: int, size: int) -> list[int]:
    """Return the sequences in a loader's order: to each batch rank in turn a microbatch, consecutive rows of a step."""
    return order.view(-1, batch_world, microbatches, size).transpose(1, 2).flatten().tolist()


def evaluation_steps(
    available: int, batch_rank: int, batch_world: int, size: int
) -> Iterator[tuple[list[int], int, range]]:
    """Yield the rows that one rank evaluates in each step: ``size`` sequences, as many as a step of training has, how
    many of them count (the rest fill up), and the range of those that count over all ranks. All ranks together visit
    every sequence once, in equally many steps.
    """
    for start in range(0, available, size * batch_world):
        total = min(size * batch_world, available - start)
        share = -(-total // batch_world)
        first = start + batch_rank * share
        counted = max(0, min(share, start + total - first))
        yield [first + index if index < counted else 0 for index in range(size)], counted, range(start, start + total)
