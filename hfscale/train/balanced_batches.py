"""Share the rows of a step out over data ranks and microbatches by what they cost."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from torch import nn
from torch.utils.data import Sampler

from .._compat.transformers.sampling import BatchRebalanceSampler, PackedBatches
from ..cost.model.machines_known import find_machine, fitted
from ..cost.model.step_time import pair_cost
from ..errors import check_count
from ..plan.cost_shares import dealt_to_ranks, share_by_cost
from .runtime import runtime_of


def balanced_batches(
    model: nn.Module,
    lengths: Sequence[Any],
    batch_size: int,
    microbatches: int = 1,
    *,
    padded: bool = True,
    shuffle: bool = True,
    seed: int = 42,
    drop_last: bool = True,
) -> Sampler[list[int]]:
    """Return a ``batch_sampler`` for this rank whose batches, of few rows or many, take equally long on all data ranks,
    by the planner's seconds of a token and of a pair of tokens. Which rows all ranks have in a step depends on ``seed``
    and epoch alone, so its loss, a mean over all labels, is the same in every layout::

        sampler = hfscale.balanced_batches(model, lengths, batch_size=64, microbatches=4)
        batches = iter(DataLoader(rows, batch_sampler=sampler, collate_fn=collate))
        for step in zip(*[batches] * 4):
            loss = hfscale.train_step(model, step)

    Args:
        lengths: the tokens of each row; of a row of several texts that do not see each other, a list of theirs.
        batch_size: rows of a step, over all data ranks.
        microbatches: batches that each rank has in a step; through stages, the schedule's.
        padded: whether rows are padded to the longest of their batch; or they lie behind each other.
        shuffle: draw an order for each epoch: see the sampler's ``set_epoch``.
        drop_last: leave out the rows of an epoch's end that fill no step.

    Raises:
        ConfigError: a step has fewer rows than all ranks have microbatches.
    """
    mesh, pair = runtime_of(model).mesh, cost_of_pair(model)
    check_count("microbatches", microbatches)
    check_count("batch_size", batch_size, least=mesh.batch_world * microbatches)
    how = batch_size, mesh.batch_world, microbatches, shuffle, seed, mesh.batch_rank, drop_last
    if padded:
        sampler = BatchRebalanceSampler(lengths, *how)
        sampler.QUADRATIC_COST_COEF = pair
    else:
        rows = ([each] if isinstance(each, Integral) else each for each in lengths)
        sampler = PackedBatches([sum(tokens + pair * tokens**2 for tokens in texts) for texts in rows], *how)
        sampler.share = lambda costs, ranks, count: dealt_to_ranks(share_by_cost(costs, ranks * count), ranks)
    return sampler  # type: ignore[no-any-return]


def cost_of_pair(model: nn.Module) -> float:
    """Return :func:`.pair_cost` of a model, the same on all machines."""
    runtime = runtime_of(model)
    return pair_cost(runtime.plan, runtime.model.config, find_machine("h100"), fitted())
