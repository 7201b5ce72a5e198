"""Shard the input embedding along the vocabulary (Shoeybi et al. 2019, section 3).

Each rank looks up the tokens of its slice and contributes zeros for all other tokens; one all-reduce of ``[b, s, h]``
sums the ranks' results. The backward pass needs no communication.

The sum is made as late as possible: after an adapter's output is added, or in the first layer as a reduce-scatter along
the sequence. A stock class that computes something on the rows that it looked up (a norm, for example) gets summed rows
instead, so that its other parameters have full gradients on every rank.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional as F

from ..._compat.peft import adds_to_lookup, look_up_by
from ...distributed.mesh import Mesh
from ...distributed.ops.collectives import reduce_from_tp_region
from ...errors import ConfigError
from ...plan import ParameterPlan
from ...train.runtime.parameter_names import computing, unwrapped

if TYPE_CHECKING:  # imported only with sequence parallelism
    from .sequence.region import SequenceRegion


class VocabParallelEmbedding(nn.Embedding):
    """Replace ``nn.Embedding`` by an embedding that holds only the ids ``[start, start + weight.shape[0])``."""

    _hfscale_start: int
    _hfscale_sum: Callable[[Tensor], Tensor] | None

    def forward(self, input: Tensor) -> Tensor:
        """Look up ids ``[...]`` in this rank's slice of the vocabulary, and return ``[..., h]``, with zeros for ids of
        other slices.

        If the attribute ``_hfscale_sum`` is set, the result is summed over tensor ranks here; otherwise it must be
        summed later.
        """
        rows = self.look_up(input, self.weight)
        return rows if self._hfscale_sum is None else self._hfscale_sum(rows)

    def look_up(self, input: Tensor, weight: Tensor, **_: Any) -> Tensor:
        """Look up the ids of this rank's slice in ``weight``; all other ids get zeros."""
        local = input - self._hfscale_start
        missing = (local < 0) | (local >= weight.shape[0])
        rows = F.embedding(local.masked_fill(missing, 0), weight)
        # the padding token's embedding is used but gets no gradient
        if self.padding_idx is not None:
            rows = rows.where((input != self.padding_idx)[..., None], rows.detach())
        return rows.masked_fill(missing[..., None], 0)


def install_vocab_parallel_embedding(
    module: nn.Module, planned: ParameterPlan, mesh: Mesh, streams: "list[SequenceRegion]"
) -> None:
    """Make an embedding with this rank's slice of the weight, or an adapter around it, sum its output over ranks."""
    cut = planned.cut_over("tp")
    assert cut is not None
    start = cut.spans(planned.shape[0], mesh.tp_rank)[0][0]
    wraps = [_cut_lookup(stock, planned, start, mesh) for stock in computing(module)]
    adds = adds_to_lookup(module)
    if adds:
        look_up_by(module, unwrapped(module).look_up)  # type: ignore[arg-type]
    if any(wraps) and not adds:
        return  # the sum over ranks is made inside the stock class, after the lookup
    # The stock class's output is summed already, and is summed again with the adapter's: ranks other than 0 contribute
    # zeros, with the same gradient.
    if any(wraps) and mesh.tp_rank > 0:
        unwrapped(module).register_forward_hook(lambda _, args, whole: whole - whole.detach())

    def summed(_: nn.Module, args: Any, found: Tensor) -> Tensor:
        for stream in streams:
            if stream.sum_later(module):
                return found
        return reduce_from_tp_region(found, mesh.tp_group)

    module.register_forward_hook(summed, prepend=True)


def _cut_lookup(module: nn.Module, planned: ParameterPlan, start: int, mesh: Mesh) -> bool:
    """Shard an embedding along the vocabulary. Return whether its forward pass already sums the looked up rows over
    ranks, because the stock class computes something after the lookup.
    """
    if not isinstance(module, nn.Embedding):
        raise ConfigError(
            f"{planned.name} must belong to an nn.Embedding, got {type(module).__name__}: use tp_size=1"
        )
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise ConfigError(
            f"{planned.name} must belong to an embedding without max_norm, scale_grad_by_freq and sparse gradients, "
            "which cannot be sharded along the vocabulary: use tp_size=1"
        )
    stock = type(module)
    if stock is nn.Embedding:
        module.__class__ = VocabParallelEmbedding
    else:  # the stock subclass first, so that its forward calls ours
        module.__class__ = type(
            stock.__name__, (stock, VocabParallelEmbedding), {"__module__": stock.__module__}
        )
    group = mesh.tp_group
    wraps = stock.forward is not nn.Embedding.forward
    module._hfscale_start = start  # type: ignore[assignment]
    module._hfscale_sum = (lambda found: reduce_from_tp_region(found, group)) if wraps else None  # type: ignore[assignment]
    return wraps
