"""QK-clip (Kimi Team 2025): after a step, scale down queries and keys of heads whose largest attention score is too
large.

Attention functions keep no scores, so hfscale computes them again. transformers looks up the attention function by a
name in the config. Under another name, hfscale registers a wrapper of the original function. The wrapper gets queries
and keys after norms and rotary embeddings, and multiplies them in blocks::

    some rows of q [b, h, s, d], all of k  -->  scores [b, h, rows, s]  --those not hidden-->  largest [h]
    q, k, v                                -->  the attention that was there

If the largest score ``s`` of a head exceeds the threshold ``t``, ``gamma = t / s``, else ``gamma = 1``. Among the query
heads that share a key head, ``g`` is the smallest ``gamma``. Rows of the projections' weights are multiplied by ::

    keys  sqrt(g)        queries of head h  gamma_h / sqrt(g)        so that scores of head h are multiplied by gamma_h
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._compat.torch import without_dispatch_modes
from ..._compat.transformers.classes import stock_class
from ..._compat.transformers.computing import answer
from ..._compat.transformers.implementations import implementation_of, set_implementation
from ...errors import ConfigError, check_number
from ...models.facts import ask
from ...models.fields import HEAD_FIELDS, first_count, text_config
from ...optim.added_options import AddedOption
from ...optim.catalog import or_none
from ...optim.sharded import Groups, Member, State, Stepper
from ...parallel.context.attention_override import attention_configs
from ...parallel.context.cut_batch import MaskBlocks
from ...parallel.context.engine import gather_sequences
from ...plan.parameter import MODEL_AXES
from ...train.runtime import Runtime, recomputing
from ...train.runtime.runtime import PassObserver

PROJECTIONS = ("q_proj", "k_proj")
_PREFIX = "measured_"
_SCORES = 1 << 26  # entries in memory at once
_ROWS = 256  # queries per block under a causal mask; later keys are skipped
_HIDDEN = -9e3  # masks hide a key by adding a dtype's minimum, or -1e4


class LargestScores(PassObserver):
    """Measure the largest score of each query head of some attention ``modules``, as long as this object is referenced.

    A score is query times key times scaling, before softcaps, biases and sinks. Hidden pairs do not count, and neither
    do evaluations, recomputed passes and infinite scores. ``context`` is the process group of context-parallel ranks.
    """

    needs_rows = "qk_clip, whose scores padding would change"

    def __init__(
        self,
        model: nn.Module,
        modules: Iterable[nn.Module],
        context: dist.ProcessGroup | None = None,
    ):
        self._found: dict[nn.Module, Tensor] = {}
        self._context = context
        for config in attention_configs(model):
            if not (host := implementation_of(config)).endswith(("sdpa", "eager")):
                raise ConfigError(
                    f"qk_clip reads attention masks as tensors, but attn_implementation={host} does not use them: load "
                    "the model with attn_implementation='sdpa'"
                )
            if not host.startswith(_PREFIX):
                set_implementation(config, answer(_PREFIX, host, _attention))
        _measures.update(dict.fromkeys(modules, ref(self)))

    def take(self) -> dict[nn.Module, Tensor]:
        """Return the largest scores ``[h]`` since the last call, for each module that has computed attention since."""
        largest = self._found
        self._found = {}
        return largest

    def drop(self) -> None:
        """Discard the attention scores collected since the last step, because the current step is skipped."""
        self._found = {}

    @torch.no_grad()
    def measure(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        mask: Any,
        scaling: float,
        causal: bool,
    ) -> None:
        """Include the scores of one attention call in the largest scores; collective over ``context`` if sequences are
        sharded.
        """
        if isinstance(mask, MaskBlocks):
            assert self._context is not None
            key = gather_sequences(key.transpose(1, 2), mask.batch, self._context).transpose(1, 2)
        samples, heads, length = query.shape[:3]
        triangle = causal and mask is None
        rows = max(
            1,
            min(
                _ROWS if triangle else length,
                _SCORES // max(1, samples * heads * key.shape[2]),
            ),
        )
        dtype = torch.promote_types(query.dtype, torch.float32)
        largest = self._found.setdefault(
            module, query.new_full((heads,), float("-inf"), dtype=dtype)
        )
        query = query * scaling  # before the product, which could overflow float16
        for start in range(0, length, rows):
            own = slice(start, min(start + rows, length))
            # Group the query heads that share a key head.
            asking = query[:, :, own].unflatten(1, (key.shape[1], -1)).flatten(2, 3)
            keys = key[:, :, : own.stop] if triangle else key
            scores = (asking @ keys.mT).view(samples, heads, -1, keys.shape[2])
            if triangle or mask is not None:
                _hide(mask, own, scores)
            of_heads = scores.flatten(2).amax(2).amax(0).to(dtype)
            torch.maximum(
                largest,
                of_heads.where(of_heads.isfinite(), float("-inf")),
                out=largest,
            )


_log = logging.getLogger(__name__)
_measures: WeakKeyDictionary[nn.Module, ref[LargestScores]] = WeakKeyDictionary()


def _attention(
    host: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    **kwargs: Any,
) -> Any:
    reference = _measures.get(module)
    trains = module.training and torch.is_grad_enabled() and not recomputing()
    if trains and reference is not None and (scores := reference()) is not None:
        scaling = kwargs.get("scaling")
        causal = kwargs.get("is_causal")
        scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        causal = getattr(module, "is_causal", True) if causal is None else causal
        with without_dispatch_modes():  # activation checkpointing's modes would save the products
            scores.measure(module, query, key, mask, scaling, causal)
    return host(module, query, key, value, mask, **kwargs)


def _hide(mask: Any, own: slice, scores: Tensor) -> None:
    """Set ``scores`` of this rank's queries ``own`` to minus infinity where a key is hidden from a query."""
    if isinstance(mask, MaskBlocks):
        hidden = ~mask.of_own(own)
    elif mask is None:  # a causal mask, which torch's attention itself applies
        # All of these queries read all keys before the first of them.
        scores = scores[..., own.start :]
        hidden = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
    else:
        part: Tensor = mask[:, :, own if mask.shape[2] > 1 else slice(1), : scores.shape[3]]
        hidden = ~part if part.dtype == torch.bool else part <= _HIDDEN
    scores.masked_fill_(hidden, float("-inf"))


def scale_scores(gamma: Tensor, outputs: Sequence[int]) -> list[Tensor]:
    """Return factors for the ``outputs`` of the query and the key projection that multiply each head's scores by
    ``gamma``.
    """
    width = outputs[0] // len(gamma)
    grouped = gamma.view(outputs[1] // width, -1)
    keys = grouped.amin(1, keepdim=True).sqrt()
    return [factors.flatten().repeat_interleave(width) for factors in (grouped / keys, keys)]


def along_outputs(factors: Tensor, shape: Sequence[int]) -> Tensor:
    """Expand one factor per output to the shape of a weight or a bias."""
    return factors.view(-1, *[1] * (len(shape) - 1)).expand(*shape)


@dataclass(frozen=True)
class _Attention:
    module: nn.Module
    own: Tensor  # indices of this rank's heads
    projections: list[list[Member]]  # query and key projection: weight, and bias if any


class QueryKeyClip(Stepper):
    """Clip the attention scores of a model's layers at ``threshold``, by scaling the weights of queries and keys after
    an optimizer step. The optimizer calls it after its updates of the weights.

    ``members`` are all parameters that the optimizer updates. Scores of all microbatches since the last step count;
    scores of a step that is skipped because of an overflow are dropped.
    """

    def __init__(self, threshold: float, members: Sequence[Member], runtime: Runtime) -> None:
        super().__init__((), runtime.mesh)
        check_number("qk_clip", threshold, above=0)
        layout = runtime.mesh.layout
        if not layout.flushes:
            raise ConfigError(
                f"qk_clip with pipeline_schedule={layout.pipeline_schedule!r} would read attention scores of older "
                "weights than those that it scales: use pipeline_schedule='1f1b'"
            )
        if runtime.compiled:
            raise ConfigError(
                "qk_clip must read attention scores inside of layers, but compiled layers hide these: "
                "use compile=False"
            )
        self._threshold = threshold
        self._heads = first_count(text_config(runtime.model.config), HEAD_FIELDS) or 1
        self._attentions = list(
            self._find({member.planned.name: member for member in members}, runtime)
        )
        modules = [attention.module for attention in self._attentions]
        self._runtime = runtime
        scores = LargestScores(runtime.model, modules, runtime.mesh.context)
        # Only the runtime references the scores, so that measuring ends on all ranks together if another optimizer is
        # made.
        runtime.observer = scores
        self._own = ref(scores)

    def step(self, groups: Groups, state: State) -> None:
        """Scale down the queries and keys of the heads whose scores have exceeded the threshold since the last step;
        makes one collective per mesh axis.
        """
        if (scores := self._own()) is None or scores is not self._runtime.observer:
            raise ConfigError(
                "another optimizer was made for the model after the one with qk_clip, so attention scores are no "
                "longer measured: make the optimizer with qk_clip last"
            )
        if not self._attentions:
            return
        scored = scores.take()
        if not scored and self._attentions[0].projections[0][0].parameter.grad is not None:
            _log.warning(
                "qk_clip has measured no attention scores since the last step, so it scales nothing: do not change "
                "attn_implementation after loading, and use gradient checkpointing only with use_reentrant=False"
            )
        dtype = torch.promote_types(
            self._attentions[0].projections[0][0].weight.dtype, torch.float32
        )
        largest = torch.full(
            (len(self._attentions), self._heads),
            float("-inf"),
            dtype=dtype,
            device=self._mesh.device,
        )
        for row, attention in zip(largest, self._attentions, strict=True):
            if attention.module in scored:
                row[attention.own] = scored[attention.module].to(dtype)
        for group in self._mesh.groups("tp", "dp_shard", "dp_replicate"):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        gammas = torch.where(largest > self._threshold, self._threshold / largest, 1.0)
        for gamma, attention in zip(gammas, self._attentions, strict=True):
            outputs = [weight.planned.shape[0] for weight, *_ in attention.projections]
            for factors, members in zip(
                scale_scores(gamma, outputs), attention.projections, strict=True
            ):
                for member in members:
                    every = along_outputs(factors.to(member.weight.device), member.planned.shape)
                    member.weight.mul_(member.planned.take(every, self._mesh.ranks))

    def _find(self, known: Mapping[str, Member], runtime: Runtime) -> Iterator[_Attention]:
        """Yield the attention modules of this rank's layers, with their query and key projections among ``known``, the
        optimizer's parameters; raise for modules whose scores cannot be clipped.
        """
        kind = stock_class(runtime.model)
        answers = ask("score scaling", runtime.model, stock=kind, kind=kind)
        if not answers:
            raise ConfigError(
                "qk_clip needs a model that computes attention by transformers' attention functions, and "
                f"{kind.__name__} does not: leave qk_clip out"
            )
        for layer in filter(runtime.is_local, runtime.plan.layers):
            for name, module in runtime.model.get_submodule(layer).named_modules(prefix=layer):
                if why := answers.get(type_name := stock_class(module).__name__):
                    raise ConfigError(
                        f"qk_clip does not fit {name}: {type_name} {why}: leave qk_clip out"
                    )
                if why is not None:
                    yield self._attention(name, module, known, runtime)

    def _attention(
        self, name: str, module: nn.Module, known: Mapping[str, Member], runtime: Runtime
    ) -> _Attention:
        """Return an attention module with the weights and biases of its query and key projections, taken from
        ``known``, the parameters that the optimizer updates; raise if one of them is not among these.
        """
        every = [[f"{name}.{each}.{kind}" for kind in ("weight", "bias")] for each in PROJECTIONS]
        for missing in (
            each for each in chain(*every) if each in runtime.plan.by_name and each not in known
        ):
            raise ConfigError(
                f"qk_clip scales {missing}, which this optimizer does not train (it has an adapter, is frozen, or is "
                "in none of the groups): train it, or leave qk_clip out"
            )
        projections = [[known[each] for each in names if each in known] for names in every]
        weight = projections[0][0].planned
        numbers = torch.arange(self._heads).repeat_interleave(weight.shape[0] // self._heads)
        own = weight.take(
            along_outputs(numbers, weight.shape),
            self._mesh.ranks,
            MODEL_AXES,
        )[:, 0]
        return _Attention(module, own.unique_consecutive().to(self._mesh.device), projections)


def _steppers(threshold: Any, members: Sequence[Member], runtime: Runtime) -> list[Stepper]:
    """Return the object that clips scores after the optimizer's updates, in a list; empty without a ``threshold``."""
    return [] if threshold is None else [QueryKeyClip(threshold, members, runtime)]


OPTION = AddedOption(optimizers=("muon",), parse=or_none(float), steppers=_steppers)
"""The maximum attention score of a head: ``create_optimizer(model, "muon", qk_clip=100.0)``."""
