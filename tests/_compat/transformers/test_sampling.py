"""What ``_compat/transformers/sampling.py`` relies on of the sampler of batches of equal cost."""

from typing import Any

from ..relied_on import relying


@relying("transformers/sampling.py")(
    "transformers.trainer_pt_utils.BatchRebalanceSampler._assign",
    "transformers.trainer_pt_utils.BatchRebalanceSampler:dp_size",
    "transformers.trainer_pt_utils.BatchRebalanceSampler:grad_accum",
)
def test_the_samplers_batches_are_what_assign_returns() -> None:
    """The sampler calls ``_assign(indices, lengths)`` for each step, which returns for each of ``dp_size`` ranks
    ``grad_accum`` lists of indices, and yields those of its rank.
    """
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    class Own(BatchRebalanceSampler):
        def _assign(self, indices: Any, lengths: Any) -> Any:
            assert [self.lengths[index] for index in indices] == list(lengths)
            shares = [[index] for index in sorted(indices)]
            return [shares[rank :: self.dp_size] for rank in range(self.dp_size)]

    made = Own([1, 2, 3, 4], effective_batch_size=4, dp_size=2, grad_accum=2, rank=1)
    assert made.grad_accum == 2
    assert list(made) == [[1], [3]]
