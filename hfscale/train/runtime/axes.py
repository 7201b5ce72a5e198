"""Define the calls of a step to a single axis; each class here is for an axis with one rank: it does nothing."""

from torch import Tensor

from .batches import Microbatch


class DataAxes:
    """Reduce gradients and shard parameters over the data axes."""

    def before_backward(self, last: bool) -> None:
        """Prepare for a backward pass; gradients are reduced in the ``last`` one of a step."""

    def accumulate_late_gradients(self) -> None:
        """Add up gradients that were computed without autograd's hooks."""

    def after_microbatch(self) -> None:
        """Reduce the gradients of one of several microbatches, if the layout says so."""

    def release(self) -> None:
        """Free the gathered parameters that a forward pass keeps for its backward pass."""


class ContextAxis:
    """Shard the sequences of a batch over the context axis."""

    def shard_batch(self, batch: Microbatch) -> Microbatch:
        """Return this rank's shard of the sequences in ``batch``."""
        return batch

    def gather_tokens(self, batch: Microbatch, own: Tensor) -> Tensor:
        """All-gather a per-token output ``[b, s_local, ...]`` into ``[b, s, ...]``: the inverse of `shard_batch`."""
        return own

    def own_tokens(self, batch: Microbatch, whole: Tensor) -> Tensor:
        """Return this rank's tokens of ``whole [b, s, ...]``: the inverse of `gather_tokens`."""
        return whole


class SequenceAxis:
    """Shard the hidden states between blocks over the tensor axis (sequence parallelism)."""

    def local_seqlen(self, tokens: int) -> int:
        """Return how many of ``tokens`` per sample this rank has in the hidden states between blocks in training."""
        return tokens

    def is_seq_sharded(self, module: str) -> bool:
        """Return whether a module of the layers sees this rank's tokens only, in the present forward pass."""
        return False
