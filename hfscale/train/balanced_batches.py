"""Divide the rows of a step over data ranks and microbatches so that all ranks take about the same time."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from numpy import ndarray
from torch import Tensor, nn
from transformers.trainer_pt_utils import BatchRebalanceSampler

from .._compat.transformers.sampling import PackedBatches
from ..cost.model.step_time import pair_cost
from ..errors import check_count
from ..plan.cost_shares import share_by_cost
from .runtime import runtime_of


def balanced_batches(
    model: nn.Module,
    lengths: Sequence[Any],
    batch_size: int,
    microbatches: int = 1,
    *,
    padded: bool = True,
    **order: Any,
) -> BatchRebalanceSampler:
    """Return a ``batch_sampler`` for this rank's data loader, whose batches have different numbers of rows, so that all
    data ranks take about the same time. Times are estimated from the number of tokens (and, for attention, of pairs of
    tokens) of each row. A step has the same rows in every layout, so its loss, the mean over all labels, does not
    change::

        sampler = hfscale.balanced_batches(model, lengths, batch_size=64, microbatches=4)
        batches = iter(DataLoader(rows, batch_sampler=sampler, collate_fn=collate))
        for step in zip(*[batches] * 4):
            loss = hfscale.train_step(model, step)

    Args:
        lengths: the number of tokens of each row; for a packed row, a list of the lengths of its texts.
        batch_size: rows per step, over all data ranks.
        microbatches: batches per rank in a step; with pipeline stages, the microbatches of the schedule.
        padded: whether rows are padded to the longest row of their batch; otherwise they are concatenated.
        order: ``shuffle``, ``seed`` and ``drop_last`` of transformers' ``BatchRebalanceSampler``. With
            ``drop_last=False``, rows are repeated if an epoch's last step has too few rows for all ranks.

    Raises:
        ConfigError: ``batch_size`` is less than ``microbatches`` times the number of data ranks.
    """
    runtime = runtime_of(model)
    mesh = runtime.mesh
    pair = pair_cost(runtime.plan, runtime.model.config)
    check_count("microbatches", microbatches)
    check_count("batch_size", batch_size, least=mesh.batch_world * microbatches)
    lengths = lengths.tolist() if isinstance(lengths, Tensor | ndarray) else lengths
    given: Any = (batch_size, mesh.batch_world, microbatches)
    order["rank"] = mesh.batch_rank
    if padded:
        sampler = BatchRebalanceSampler(list(lengths), *given, **order)
        sampler.QUADRATIC_COST_COEF = pair
        return sampler
    rows: Any = ([length] if isinstance(length, Integral) else length for length in lengths)
    costs = [sum(tokens + pair * tokens**2 for tokens in texts) for texts in rows]
    batches = PackedBatches(costs, *given, **order)  # type: ignore[arg-type]
    batches.share = share_by_cost
    return batches
