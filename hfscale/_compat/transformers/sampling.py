"""transformers' sampler of batches of equal cost, for rows without padding."""

from collections.abc import Callable, Sequence

from transformers.trainer_pt_utils import BatchRebalanceSampler


class PackedBatches(BatchRebalanceSampler):
    """Sample rows whose costs, given in place of ``lengths``, add up; ``share(costs, bins)`` returns the items of bins,
    of which those that follow each other cost alike.
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
