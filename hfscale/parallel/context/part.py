"""Context parallelism as a part."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from ..._host.transformers.classes import takes_argument
from ..._host.transformers.computing import recomputes
from ...errors import ConfigError
from ...plan.context import ContextPlan
from ...plan.recompute import recomputed
from ...runtime import Batch, Part, Runtime
from ...runtime.batches import Microbatch
from ...runtime.local_weights import LocalWeights
from ...sequences import CutBatch, Split, cut_batch, shape_of
from ...sequences.mixers import WholeSequences
from ...sequences.rotary import ask_for_all_positions
from ...sequences.seam import Seam, attention_configs
from .methods import ContextAttention
from .whole_sequences import TokenGather

_BATCH = "context_batch"
"""The argument of a forward pass that says of which sequences it computes a part; the model itself never sees it."""


class ContextParallel(Part):
    """Nothing where each rank has whole sequences."""

    def __init__(self) -> None:
        self._seam: Seam | None = None
        self._attend: ContextAttention | None = None
        self._stack: list[ExitStack] = []
        self._of_length: dict[int, CutBatch] = {}
        self._takes_positions = False

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Answer the model's attention; its other modules need not know."""
        group, model = runtime.mesh.group("cp"), runtime.model
        if group is None:
            return
        self._seam = Seam(attention_configs(model))
        planned = runtime.plan.feature(ContextPlan)
        assert planned is not None
        self._attend = ContextAttention(planned.method, runtime.mesh, planned.together)
        self._takes_positions = takes_argument(model, "position_ids")
        ask_for_all_positions(model)
        mixers = WholeSequences(TokenGather(group), self._of_length.get)
        for name in filter(runtime.is_local, planned.whole):
            mixers.install(model.get_submodule(name))
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)

    def take_out(self, runtime: Runtime, weights: LocalWeights) -> None:
        """Hooks are undone already."""
        if self._seam is not None:
            self._seam.remove()

    def check_step(self, runtime: Runtime, batches: Sequence[Batch]) -> None:
        """A recomputed mixer knows its sequences by how many tokens it is given."""
        planned, size = runtime.plan.feature(ContextPlan), runtime.mesh.layout.size("cp")
        self._of_length.clear()
        again = recomputed(runtime.plan).recomputes_weights or recomputes(runtime.model)
        if planned is None or not planned.whole or not again:
            return
        totals = {shape_of(batch)[1] for batch in batches}
        for rank in range(size):
            if len({Split(total, size).length(rank) for total in totals}) < len(totals):
                raise ConfigError(
                    f"microbatches of {', '.join(map(str, sorted(totals)))} tokens have parts of the same length, and "
                    f"recomputation could not tell them apart in {planned.whole[0]}: pad them to one length, or switch "
                    "gradient checkpointing off"
                )

    def own_tokens(self, runtime: Runtime, batch: Microbatch) -> Microbatch:
        """This rank's of the whole sequences that context ranks are all given."""
        size = runtime.mesh.layout.size("cp")
        if size == 1:
            return batch
        planned = runtime.plan.feature(ContextPlan)
        assert runtime.loss is not None
        assert planned is not None
        whole, part = cut_batch(batch, size, runtime.mesh.ranks["cp"], runtime.loss.shift, self._takes_positions)
        if whole.padding is not None and not planned.pads:
            raise ConfigError(
                f"{runtime.plan.family!r} counts from where padding ends, which a rank with a part of a sequence does "
                "not see: pack the examples into rows without padding, or use cp_size=1"
            )
        self._of_length[whole.split.length(whole.rank)] = whole
        own = Microbatch({**part, _BATCH: whole})
        own.shifted = True  # and it restarts nowhere: the host is not to look for examples in positions that jump
        return own

    def all_tokens(self, runtime: Runtime, batch: Microbatch, own: Tensor) -> Tensor:
        """Gathered over the context ranks, in the order of the sequences."""
        group = runtime.mesh.group("cp")
        return own if group is None else TokenGather(group)(own, batch[_BATCH])

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook of the model."""
        batch: CutBatch | None = kwargs.pop(_BATCH, None)
        stack = ExitStack()
        if batch is not None and self._seam is not None and self._attend is not None:
            device = next(model.parameters()).device
            stack.enter_context(self._seam.passing(batch.to(device), self._attend))
        self._stack.append(stack)
        return args, kwargs

    def _end(self, *_: Any) -> None:
        if self._stack:
            self._stack.pop().close()
