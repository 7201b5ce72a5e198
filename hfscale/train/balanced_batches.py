"""Share the rows of a step out over data ranks and microbatches by what they cost."""

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
    """Return a ``batch_sampler`` for this rank whose batches, of few rows or many, take equally long on all data ranks,
    by the planner's seconds of a token and of a pair of tokens. A step has the same rows in every layout, and so its
    loss, a mean over all labels, does not change::

        sampler = hfscale.balanced_batches(model, lengths, batch_size=64, microbatches=4)
        batches = iter(DataLoader(rows, batch_sampler=sampler, collate_fn=collate))
        for step in zip(*[batches] * 4):
            loss = hfscale.train_step(model, step)

    Args:
        lengths: the tokens of each row; of a row of several texts that do not see each other, a list of theirs.
        batch_size: rows of a step, over all data ranks.
        microbatches: batches that each rank has in a step; through stages, the schedule's.
        padded: whether rows are padded to the longest of their batch; or they lie behind each other.
        order: ``shuffle``, ``seed`` and ``drop_last`` of transformers' ``BatchRebalanceSampler``. With
            ``drop_last=False`` rows are repeated where an epoch's last step has too few for all ranks.

    Raises:
        ConfigError: a step has fewer rows than all ranks have microbatches.
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
