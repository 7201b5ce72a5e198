"""Let recurrences and convolutions of stock models begin anew with each document of packed rows."""

from torch import Tensor, nn

from ..._compat.transformers.computing import documents_here
from ...distributed.ops.segments import Segments, keep_states_apart, starts_of
from ..runtime.forward_passes import ForwardPasses, recomputing


class DocumentStates:
    """Tell the mixers of a model where documents begin, also when a layer is computed again in a backward pass."""

    def __init__(self) -> None:
        self._passes: ForwardPasses[Segments | None] = ForwardPasses()
        self._passes.begin(None)
        self._documents: Tensor | None = None  # of the latest pass

    def install(self, model: nn.Module) -> None:
        """Wrap the mixers that are known."""
        keep_states_apart(model, self._segments)

    def _segments(self) -> Segments | None:
        if recomputing():
            return self._passes.current()
        documents = documents_here()
        if documents is not self._documents:
            self._documents = documents
            row = () if documents is None else ((0, documents.shape[-1]),)
            self._passes.begin(None if documents is None else Segments(row, starts_of(documents)))
        return self._passes.latest
