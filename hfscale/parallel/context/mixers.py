"""Run token-mixing modules other than attention (convolutions, recurrences) on full sequences on every rank.

Each rank runs the mixer on all tokens and keeps its own tokens of the output. The result is exact; the work is repeated
on every rank. Weight gradients are partial, since only a rank's own outputs have a gradient.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..._compat.torch import tree_map
from .attention_call import read
from .cut_batch import CutBatch
from .engine import OwnBlocks
from .masks import MaskBlocks
from .seam import AttentionCall, current_batch

Gather = Callable[[Tensor, CutBatch], Tensor]
"""``[b, own tokens, ...]`` -> ``[b, tokens, ...]`` in the order of the sequence; collective, differentiable."""


class WholeSequences:
    """Run a mixer on full sequences.

    Args:
        recomputed: the sequences that a layer is recomputed for, which is not within a pass of the model.
    """

    def __init__(self, gather: Gather, recomputed: Callable[[], CutBatch | None]) -> None:
        self._gather, self._recomputed = gather, recomputed

    def install(self, module: nn.Module) -> list[Any]:
        """Install hooks on a mixer; returns the handles of the hooks."""
        running: list[CutBatch | None] = []

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            batch = current_batch() or self._recomputed()
            running.append(batch)
            if batch is None:
                return None
            whole = tuple(self._whole("", value, batch) for value in args)
            return whole, {name: self._whole(name, value, batch) for name, value in kwargs.items()}

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            batch = running.pop()
            return output if batch is None else own_tokens(output, batch)

        return [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]

    def _whole(self, name: str, value: Any, batch: CutBatch) -> Any:
        own = batch.split.length(batch.rank)
        if isinstance(value, MaskBlocks):
            return value.of_one_rank(_read_alone)
        if "mask" in name and (value is None or (isinstance(value, Tensor) and value.ndim == 2)):
            return _padding(value, batch)
        if "position_ids" in name and isinstance(value, Tensor):
            return batch.whole_positions(value.device)

        def gathered(x: Any) -> Any:
            if isinstance(x, Tensor) and x.ndim > 1 and x.shape[1] == own:
                return self._gather(x, batch)
            return x

        return tree_map(gathered, value) if isinstance(value, (Tensor, tuple, list)) else value


def own_tokens(output: Any, batch: CutBatch) -> Any:
    """Cut a module's output for full sequences, tensors ``[b, s, ...]``, to this rank's tokens."""
    places = batch.places

    def cut(x: Any) -> Any:
        if isinstance(x, Tensor) and x.ndim > 1 and x.shape[1] == batch.split.total:
            return x.index_select(1, places.to(x.device))
        return x

    return tree_map(cut, output) if isinstance(output, (Tensor, tuple, list)) else output


def _padding(value: Tensor | None, batch: CutBatch) -> Tensor | None:
    """Return the padding mask of all tokens, also where the host passed none because nothing is padded."""
    if batch.padding is None:
        return None if value is None else value.new_ones(len(value), batch.split.total)
    return batch.padding.to(batch.padding.dtype if value is None else value.dtype)


def _read_alone(_: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: MaskBlocks, call: AttentionCall) -> Tensor:
    return read(q, k, v, call.sinks, mask, call, OwnBlocks())
