"""transformers' sampler of batches of equal cost, also for rows without padding."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import Sampler
from transformers import trainer_pt_utils

from ...errors import ConfigError


class _Missing(Sampler[list[int]]):
    def __init__(self, *_: Any, **__: Any) -> None:
        raise ConfigError("batches of equal cost need BatchRebalanceSampler of transformers: install a later version")


BatchRebalanceSampler: Any = getattr(trainer_pt_utils, "BatchRebalanceSampler", _Missing)


class PackedBatches(BatchRebalanceSampler):  # type: ignore[misc]
    """Sample batches of rows without padding, whose costs, in place of ``lengths``, add up; ``share(costs, ranks,
    microbatches)`` returns the places, in a step, of the rows of each rank's microbatches.
    """

    share: Callable[[Sequence[float], int, int], list[list[list[int]]]]

    def _assign(self, indices: Sequence[int], lengths: Sequence[float]) -> list[list[list[int]]]:
        found = self.share(lengths, self.dp_size, self.grad_accum)
        return [[[indices[place] for place in places] for places in rank] for rank in found]
