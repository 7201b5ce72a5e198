"""Install context parallelism (``cp_size > 1``) into a model: hooks for forward passes, steps and the sharding of
batches.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..._compat.torch import next_node_number
from ..._compat.transformers.computing import position_counter
from ...distributed.ops.segments import RankChain, Segments, keep_states_apart
from ...errors import ConfigError
from ...plan.context_plan import ContextPlan
from ...train.runtime import Batch, Part, Runtime, recomputing
from ...train.runtime.batches import Microbatch
from ...train.runtime.forward_passes import ForwardPasses
from ...train.runtime.runtime import ContextAxis
from ...train.runtime.shards import LocalWeights
from .attention_override import AttentionOverride, attention_configs, current_batch, learn
from .cut_batch import CutBatch, cut_batch
from .engine import gather_sequences
from .inner_hooks import WholeSequences, ask_for_all_positions, counting_tables, cut_inside
from .methods import ContextAttention

_BATCH = "context_batch"
"""The argument of a forward pass that carries the :class:`CutBatch`; a hook removes it before the model's forward."""


class ContextParallel(Part, ContextAxis):
    """Shard the sequences of batches over context ranks, and compute attention over the sharded sequences."""

    _runtime: Runtime
    _planned: ContextPlan
    _group: dist.ProcessGroup
    _attend: ContextAttention

    def __init__(self) -> None:
        self._override: AttentionOverride | None = None
        self._stack: list[ExitStack] = []
        # forward passes and their batches, for layers that read the batch when they are recomputed
        self._passes = ForwardPasses[CutBatch | None]()

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Replace the model's attention, and hook its token mixers and its text model; other modules run unchanged."""
        group = runtime.mesh.group("cp")
        model = runtime.model
        planned = runtime.plan.feature(ContextPlan)
        assert planned is not None
        assert group is not None
        runtime.context, self._runtime, self._planned, self._group = self, runtime, planned, group
        self._override = AttentionOverride(attention_configs(model))
        self._attend = ContextAttention(planned.method, runtime.mesh, planned.together)
        self._count = position_counter(model)
        text = model.get_submodule(planned.text)
        ask_for_all_positions(text)
        self._counts_tokens = bool(counting_tables(text))
        if planned.text:
            cut_inside(text, self._record_positions)
        mixers = WholeSequences(partial(gather_sequences, group=group), self._current_sequences)
        for name in filter(runtime.is_local, planned.whole):
            keep_states_apart(model.get_submodule(name), self._whole_segments)
            mixers.install(model.get_submodule(name), name in planned.reads_masks)
            if name in planned.reads_masks:
                self._override.leave_out(model.get_submodule(name))
        for name in filter(runtime.is_local, planned.handing):
            keep_states_apart(model.get_submodule(name), self._segments)
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)

    def take_out(self, runtime: Runtime, weights: LocalWeights) -> None:
        if self._override is not None:
            self._override.remove()

    @contextmanager
    def around_step(
        self, runtime: Runtime, microbatches: Sequence[Microbatch], train: bool
    ) -> Iterator[None]:
        """After a step, forget its forward passes, which were recorded for recomputed layers, unless some passes are
        still running. Passes of a plain loop may still wait for their backward passes.
        """
        start = next_node_number()
        try:
            yield
        finally:
            if not runtime.executor.under_way:
                self._passes.forget_since(start)

    def check_step(
        self, runtime: Runtime, batches: Sequence[Batch], user_loss: bool = False
    ) -> None:
        """Raise :class:`ConfigError` for a ``loss_fn``, which would only get the outputs of this rank's tokens."""
        if user_loss and runtime.mesh.group("cp") is not None:
            raise ConfigError(
                f"{runtime.mesh.layout.describe()}: a loss_fn needs the outputs of full sequences, but each context "
                "rank has the outputs of its own tokens only: use cp_size=1, or pass a score_loss instead, which "
                "gets the labels' log-probabilities of all tokens"
            )

    def shard_batch(self, batch: Microbatch) -> Microbatch:
        runtime = self._runtime
        inside = bool(self._planned.text)
        size = runtime.mesh.layout.cp
        rank = runtime.mesh.cp_rank
        assert runtime.loss is not None
        for feature in runtime.plan.features:
            if filled := feature.fill(batch, runtime.loss.shift):
                batch = batch.like({**batch, **filled})
        if self._counts_tokens and batch.get("position_ids") is not None:
            raise ConfigError(
                f"{runtime.plan.family!r} computes the positions of tokens itself with cp_size={size}, and would "
                "ignore the given position_ids: leave position_ids out"
            )
        shift = runtime.loss.shift
        counted = self._count(batch)
        whole_mask = self._planned.whole_mask
        added = runtime.plan.batch_fields
        whole, part = cut_batch(batch, size, rank, shift, counted, inside, whole_mask, added)
        if whole.padding is not None and not self._planned.pads:
            raise ConfigError(
                f"{runtime.plan.family!r} counts the positions of tokens from the end of a row's padding, which may "
                "be on another context rank: pack the examples into rows without padding, or use cp_size=1"
            )
        own = Microbatch({**part, _BATCH: whole})
        # Labels are shifted already. transformers must not read a jump of the positions as the start of an example.
        own.shifted = True
        own.tokens = whole.split.length(whole.rank)
        own.parts = batch.parts
        labels = part["labels"] if part.get("shift_labels") is None else part["shift_labels"]
        # Labels on a device are not counted here: the host would wait for their number.
        if labels.device.type == "cpu":
            own.valid = int(
                runtime.loss.count_labels(
                    {
                        "labels": labels,
                        "shift_labels": labels,
                    }
                )[0]
            )
        return own

    def gather_tokens(self, batch: Microbatch, own: Tensor) -> Tensor:
        return gather_sequences(own, batch[_BATCH], self._group)

    def own_tokens(self, batch: Microbatch, whole: Tensor) -> Tensor:
        return whole.index_select(1, batch[_BATCH].places(whole.device))

    def local_view(self, module: str) -> str | None:
        if self._override is None:
            return None
        return (
            "it gets this rank's tokens of sequences that context ranks share: computing each token by itself is "
            "right, mixing or keeping tokens is not; with cp_size=1 it gets all tokens"
        )

    def _record_positions(self, batch: CutBatch) -> None:
        """Record the batch with the positions that a multimodal model has computed for its text model."""
        learn(batch)
        self._passes.begin(batch)

    def _current_sequences(self) -> CutBatch | None:
        """Return the full sequences of the current forward pass, or of the pass of a layer that is being recomputed."""
        return current_batch() or (self._passes.current() if recomputing() else None)

    def _segments(self) -> Segments | None:
        batch = self._current_sequences()
        if batch is None:
            return None
        chain = RankChain(batch.split, batch.rank, batch.starts, self._group)
        return Segments(batch.split.pieces(batch.rank), batch.starts, chain)

    def _whole_segments(self) -> Segments | None:
        batch = self._current_sequences()
        return (
            None
            if batch is None or batch.starts is None
            else Segments(((0, batch.split.total),), batch.starts)
        )

    def _begin(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Start a forward pass over this rank's tokens (forward pre-hook of the model)."""
        batch: CutBatch | None = kwargs.pop(_BATCH, None)
        batch = None if batch is None else batch.to(next(model.parameters()).device)
        stack = ExitStack()
        self._passes.begin(batch)
        if batch is not None and self._override is not None:
            stack.enter_context(self._override.passing(batch, self._attend))
        self._stack.append(stack)
        return args, kwargs

    def _end(self, *_: Any) -> None:
        if self._stack:
            self._stack.pop().close()
