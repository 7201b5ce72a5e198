"""Recompute modules in the backward pass (activation checkpointing).

The ``forward`` of the modules that the plan names runs in torch's ``checkpoint``. The hooks of a tensor-parallel block
(attention or MLP), which communicate, stay outside of the block's checkpoint. The communication is therefore repeated
if the whole layer is recomputed, but not if only the block is recomputed. Recomputation runs with the RNG state,
autocast and function modes of the original forward pass.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ..._compat.torch import function_modes, kept_results, operators_named, tree_leaves
from ..._compat.transformers.computing import answer, without_cache
from ..._compat.transformers.hidden_states import hidden_states_of, with_hidden_states
from ..._compat.transformers.implementations import implementation_of, set_implementation
from ...cost.model.activation_bytes import layers_to_recompute
from ...cost.model.situation import Situation
from ...models.module_kinds import experts_per_token
from ...parallel.context.attention_override import attention_configs
from ...parallel.pipeline.microbatches import most_in_flight
from ...plan.feature_plans import recomputed
from ...plan.sequence_split import tokens_of
from ...train.runtime import Batch, Part, Runtime
from ...train.runtime.batches import Microbatch
from ...train.runtime.shards import LocalWeights
from .rematerialization import rematerialize

_PREFIX = "hfscale_recomputed_"


class Recomputation(Part):
    """Recompute the layers and modules that the plan names."""

    def __init__(self) -> None:
        # The layers that are recomputed. With a memory budget, ``None`` until the first step chooses them.
        self.chosen: frozenset[str] | None = None
        self._wanted = dict[str, Wanted]()  # by layer
        self._attention: list[tuple[Any, str]] = []

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Wrap the planned modules in torch's ``checkpoint``."""
        planned = recomputed(runtime.plan)
        model = runtime.model
        if planned.budget is None:
            self.chosen = frozenset(planned.layers)
        elif planned.tokens is not None:
            self._choose(runtime, runtime.mesh.layout.own_tokens(planned.tokens), 0, None)
        for name in filter(runtime.is_local, planned.modules):
            recompute(model.get_submodule(name), Wanted(True), tile=planned.tile)
        for name in filter(runtime.is_local, runtime.plan.layers if planned.elementwise else ()):
            rematerialize(model.get_submodule(name))
        for name in filter(runtime.is_local, planned.layers):
            self._wanted[name] = Wanted(name in (self.chosen or ()))
            recompute(model.get_submodule(name), self._wanted[name], planned.keep)
        # for training loops without train_step
        if self.chosen is None and runtime.plan.stages is None:
            model.register_forward_pre_hook(partial(self._before, runtime), with_kwargs=True)
        if planned.attention:
            for config in attention_configs(model):
                host = implementation_of(config)
                self._attention.append((config, host))
                set_implementation(config, answer(_PREFIX, host, _attend))

    def take_out(self, runtime: Runtime, weights: LocalWeights) -> None:
        """Restore transformers' attention implementation."""
        for config, host in self._attention:
            set_implementation(config, host)

    def around_step(
        self, runtime: Runtime, microbatches: Sequence[Microbatch], train: bool
    ) -> AbstractContextManager[None]:
        """With a memory budget, choose the layers to recompute at the first training step, on every rank."""
        if train and self.chosen is None:
            self._choose_for(runtime, microbatches)
        return nullcontext()

    def _before(
        self,
        runtime: Runtime,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if self.chosen is None and model.training and torch.is_grad_enabled():
            named = dict(zip(inspect.signature(model.forward).parameters, args, strict=False))
            self._choose_for(runtime, [{**named, **kwargs}])

    def _choose_for(self, runtime: Runtime, batches: Sequence[Batch]) -> None:
        shapes = [tokens_of(batch) for batch in batches]
        most = max(rows * length for rows, length in shapes), max(length for _, length in shapes)
        # Ranks that exchange tokens in a layer must make the same choice for it, so all ranks use the same shapes.
        tokens, sequence = runtime.mesh.largest(*most)
        self._choose(runtime, tokens, sequence, len(batches))

    def _choose(
        self, runtime: Runtime, tokens: int, sequence: int, microbatches: int | None
    ) -> None:
        trained = frozenset(p.name for p in runtime.plan.owned())
        if microbatches is not None:
            trained = frozenset(
                planned.name for planned, p in runtime.parameters() if p.requires_grad
            )
        situation = Situation(
            tokens=tokens,
            pp_rank=runtime.mesh.pp_rank,
            in_flight=most_in_flight(runtime.plan, microbatches),
            mixed=runtime.options.mixed_precision,
            trained=trained,
            routes=experts_per_token(runtime.model.config),
            sequence_length=sequence,
        )
        self.chosen = layers_to_recompute(runtime.plan, situation)
        for name, wanted in self._wanted.items():
            wanted.now = name in self.chosen


@dataclass
class Wanted:
    """Hold whether a module is recomputed. Compiled layers with the same value share their graphs."""

    now: bool


def recompute(
    module: nn.Module,
    wanted: Wanted,
    keep: Sequence[str] = (),
    tile: int = 0,
) -> None:
    """Make ``module`` recompute its activations in the backward pass if ``wanted.now``. Results of the operators
    ``keep`` are saved instead of recomputed. A positive ``tile`` computes and recomputes tiles of ``tile`` tokens.
    """
    forward = module.forward
    operators = frozenset(operator for name in keep for operator in operators_named(name) or ())

    def forward_recomputed(*args: Any, **kwargs: Any) -> Any:
        if not (module.training and torch.is_grad_enabled() and wanted.now):
            return forward(*args, **kwargs)
        args, kwargs = without_cache(args, kwargs)
        run = partial(_checkpointed, forward, operators=operators)
        return _in_tiles(run, tile, args, kwargs) if tile else run(*args, **kwargs)

    forward_recomputed.__wrapped__ = forward  # type: ignore[attr-defined]  # transformers inspects forward's signature
    module.forward = forward_recomputed  # type: ignore[method-assign]


def _in_tiles(
    run: Callable[..., Any],
    tile: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a module on tiles of ``tile`` tokens of its input ``[..., s, d]``; autograd sums gradients over tiles. A
    module with several tensor inputs is run on all tokens at once.
    """
    x = hidden_states_of(args, kwargs)
    if sum(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))) != 1 or x.ndim < 2:
        return run(*args, **kwargs)
    rows = max(1, math.prod(x.shape[:-2]))
    done = []
    for piece in x.split(max(1, tile // rows), dim=-2):
        some, more = with_hidden_states(args, kwargs, piece.contiguous())
        done.append(run(*some, **more))
    return torch.cat(done, dim=-2)


def _checkpointed(
    function: Callable[..., Any],
    *args: Any,
    operators: frozenset[Any] = frozenset(),
    **kwargs: Any,
) -> Any:
    function, args, kwargs = _with_tensor_by_position(function, args, kwargs)
    # compiled graphs have no modes to restore, and support no closure here
    if torch.compiler.is_compiling():
        if operators:
            kwargs = {
                **kwargs,
                "context_fn": partial(create_selective_checkpoint_contexts, list(operators)),
            }
        return checkpoint(function, *args, use_reentrant=False, **kwargs)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        modes = function_modes()
        if not operators:
            return nullcontext(), _Again(modes)
        first, again = kept_results(operators)
        return first, _Again(modes, again)

    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _with_tensor_by_position(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the call with at least one tensor passed by position, if it has a tensor: ``checkpoint`` saves the RNG
    state only of devices of positional tensors.
    """
    name = (
        None
        if _has_tensor(args)
        else next((key for key, value in kwargs.items() if _has_tensor(value)), None)
    )
    if name is None:
        return function, args, kwargs

    def by_position(moved: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **{name: moved}, **kwargs)

    return (
        by_position,
        (kwargs[name], *args),
        {key: value for key, value in kwargs.items() if key != name},
    )


def _has_tensor(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


class _Again:
    """Enter the function modes of the original forward pass, and further contexts, around a recomputation."""

    def __init__(self, modes: Sequence[Any], *contexts: AbstractContextManager[Any]) -> None:
        self._modes, self._contexts, self._stacks = modes, contexts, list[ExitStack]()

    def __enter__(self) -> None:
        stack = ExitStack()
        seen = function_modes()
        for mode in (mode for mode in self._modes if not any(mode is one for one in seen)):
            stack.enter_context(mode)
        for context in self._contexts:
            stack.enter_context(context)
        self._stacks.append(stack)

    def __exit__(self, *raised: Any) -> None:
        self._stacks.pop().__exit__(*raised)


def _attend(
    host: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    **kwargs: Any,
) -> Any:
    """Call transformers' attention in ``checkpoint``, which saves only queries, keys and values."""
    if not (module.training and torch.is_grad_enabled()):
        return host(module, query, key, value, mask, **kwargs)

    def core(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return host(module, query, key, value, mask, **kwargs)

    return _checkpointed(core, query, key, value)
