"""The input embedding, cut along the vocabulary (Shoeybi et al. 2019, section 3).

Each rank looks up the tokens of its slice and contributes zeros for the others; one all-reduce of ``[b, s, h]`` makes
the sum. The backward pass needs no communication.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ConfigError
from ..mesh import Mesh
from ..ops import leave
from ..plan import ParameterPlan
from .sequence import Stream


class VocabParallelEmbedding(nn.Embedding):
    """An ``nn.Embedding`` whose weight holds the token ids ``[start, start + weight.shape[0])``."""

    _hfscale_start: int
    _hfscale_mesh: Mesh
    _hfscale_streams: list[Stream]

    def forward(self, input: Tensor) -> Tensor:
        """Token ids ``[...]`` -> embeddings ``[..., h]``, equal on all tensor ranks (or summed by the first layer)."""
        local = input - self._hfscale_start
        missing = (local < 0) | (local >= self.weight.shape[0])
        found = F.embedding(local.masked_fill(missing, 0), self.weight)
        if self.padding_idx is not None:  # the padding token's embedding is used, never trained
            found = found.where((input != self.padding_idx)[..., None], found.detach())
        found = found.masked_fill(missing[..., None], 0)
        if any(stream.sum_later(self) for stream in self._hfscale_streams):
            return found
        return leave(found, self._hfscale_mesh.group("tp"))


def install_vocab_parallel_embedding(
    module: nn.Module, planned: ParameterPlan, mesh: Mesh, streams: list[Stream]
) -> None:
    """Turn a stock ``nn.Embedding``, whose weight is already this rank's slice, into a vocabulary-parallel one."""
    cut = planned.cut_over("tp")
    if cut is None or not isinstance(module, nn.Embedding):
        raise ConfigError(f"{planned.name} is not an embedding cut over tp")
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise ConfigError(
            f"{planned.name}: an embedding with max_norm, scale_grad_by_freq or sparse gradients cannot be cut along "
            "the vocabulary: use tp_size=1"
        )
    stock = type(module)
    if stock is nn.Embedding:
        module.__class__ = VocabParallelEmbedding
    else:  # a subclass that wraps the lookup: behind it comes ours
        module.__class__ = type(stock.__name__, (stock, VocabParallelEmbedding), {"__module__": stock.__module__})
    module._hfscale_start = cut.spans(planned.shape[0], mesh.ranks["tp"])[0][0]  # type: ignore[assignment]
    module._hfscale_mesh = mesh  # type: ignore[assignment]
    module._hfscale_streams = streams  # type: ignore[assignment]
