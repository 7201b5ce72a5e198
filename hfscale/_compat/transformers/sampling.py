"""transformers' sampler of batches with equal costs, for rows without padding."""

from collections.abc import Callable, Sequence

from transformers.trainer_pt_utils import BatchRebalanceSampler


class PackedBatches(BatchRebalanceSampler):
    """Sample batches of unpadded rows such that the batches of a step have about equal costs. transformers' ``lengths``
    are the costs of rows, and a batch costs the sum of its rows' costs. ``share(costs, bins)`` returns the rows of each
    of ``bins`` batches; consecutive batches have about equal costs.
    """

    share: Callable[[Sequence[float], int], list[list[int]]]

    def _assign(
        self,
        indices: Sequence[int],
        lengths: Sequence[float],
    ) -> list[list[list[int]]]:
        shares = self.share(lengths, self.dp_size * self.grad_accum)
        batches = [[indices[item] for item in items] for items in shares]
        return [batches[rank :: self.dp_size] for rank in range(self.dp_size)]
