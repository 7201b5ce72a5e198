"""Replay given routing decisions through a model's own routers, and record a model's decisions (Ma et al. 2025, routing
replay).

A stock router chooses experts with ``torch.topk``, and computes their weights from the returned scores. Only this call
is replaced: it returns the given experts, and the live router's scores of these experts. Softmax or sigmoid,
normalization, scaling and gradients stay the family's own code::

    batch["routes"] [b, s, layers, k] --sharded like ids--> forward pass --this layer, own tokens--> [n, k]
    logits --stock scores--> topk: given index, scores at index --stock weights--> experts(hidden, index, weights)

The given experts are an argument ``routes`` of the forward pass, which a hook removes before the model's own forward.
They are split into microbatches and distributed to context ranks and stages like token ids. A recomputed layer uses the
experts of its first forward pass again.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..._compat.replaced import attribute_replaced
from ..._compat.torch import is_compiled_in_place, next_node_number
from ..._compat.transformers.classes import class_name
from ...distributed.ops.collectives import all_gather, own_slice
from ...errors import ConfigError
from ...models.module_kinds import experts_per_token, used_names
from ...models.names import wild_name
from ...plan import ExpertsPlan
from ...plan.cut import share_evenly
from ...plan.feature_plans import ROUTES
from ...plan.sequence_split import tokens_of
from ...train.runtime import Batch, Part, Runtime, runtime_of
from ...train.runtime.batches import Microbatch
from ...train.runtime.forward_passes import ForwardPasses
from ...train.runtime.shards import LocalWeights
from .expert_routing import has_part_of_tokens

_CHOOSES = (torch.topk, Tensor.topk)
_HIDES = (torch.masked_fill, Tensor.masked_fill)


class _Choice(TorchFunctionMode):
    """Replace the result of a layer's top-k over ``count`` experts by ``given [n, k]`` (-1: the router's own choice).
    In a recomputed layer, replace it by the first forward pass's result.
    """

    def __init__(self, count: int, given: Tensor | None, is_part: bool) -> None:
        super().__init__()
        self.count = count
        self.given = given
        self.is_part = is_part
        self.index: Tensor | None = None  # the latest result of a top-k over experts
        self.made: Tensor | None = None  # ``[n, k]``, the result that the experts received
        # Scores after, and before, the router masked experts outside the chosen groups.
        self._hidden: tuple[Any, Any] = (
            None,
            None,
        )

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _HIDES:
            self._hidden = (result, args[0])
        if func not in _CHOOSES or args[0].shape[-1] != self.count:
            return result
        scores = args[0]
        own = result[1]
        given = self.given if self.made is None else self.made
        if given is not None and (given.shape[-1], given.numel()) != (own.shape[-1], own.numel()):
            return result  # a top-k over groups of experts
        given = own if given is None else given.view_as(own).to(own.dtype)
        self.index = given.where(given >= 0, own)
        scores = self._hidden[1] if scores is self._hidden[0] else scores
        self._hidden = (None, None)
        return torch.return_types.topk((scores.gather(-1, self.index), self.index))


@dataclass
class _Pass:
    """Hold the experts of each token in one forward pass: those given for replay, and those that are recorded."""

    given: Tensor | None  # ``[b, s, layers, k]`` of this rank's tokens; ``None``: routers choose
    # the arguments of the forward pass if its routes are recorded, else ``None``
    batch: Microbatch | None
    # index of a layer among the MoE layers -> the layer's choice of experts
    choices: dict[int, _Choice] = field(default_factory=dict)


class RouteReplay(Part):
    """Replay given choices of experts (``routes=``), and record a model's choices. Hooks are installed at the first
    use.
    """

    _passes: ForwardPasses[_Pass | None]

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._recorded: list[_Pass] | None = None

    def take_out(self, runtime: Runtime, weights: LocalWeights) -> None:
        """Remove the hooks that replay and record choices of experts."""
        while self._handles:
            self._handles.pop().remove()

    def check_step(
        self, runtime: Runtime, batches: Sequence[Batch], user_loss: bool = False
    ) -> None:
        """Raise :class:`ConfigError` if a batch has ``routes`` (each token's experts, to be replayed) that do not fit
        the batch or the model.
        """
        for batch in batches:
            if batch.get(ROUTES) is not None:
                self._hook(runtime)
                _check(runtime, batch, batch[ROUTES])

    @contextmanager
    def around_step(
        self, runtime: Runtime, microbatches: Sequence[Microbatch], train: bool
    ) -> Iterator[None]:
        """If choices of experts are being recorded, give each microbatch a record to which all stages of this rank add.
        After a training step, forget its passes.
        """
        if self._recorded is not None:
            for microbatch in microbatches:
                microbatch[ROUTES] = self._new_pass(microbatch.get(ROUTES), microbatch)
        start = next_node_number()
        try:
            yield
        finally:
            if train and self._handles and not runtime.executor.under_way:
                self._passes.forget_since(start)
                self._passes.begin(None)

    @contextmanager
    def record(self, runtime: Runtime) -> Iterator[list[Tensor]]:
        """Record each token's experts in all forward passes inside the with block: see
        :func:`hfscale.record_routes`.
        """
        if self._recorded is not None:
            raise ConfigError(
                "the experts of this model's tokens are being recorded already: leave the first "
                "hfscale.record_routes block before entering another"
            )
        refusal: ConfigError | None = None
        try:
            self._hook(runtime)
        except ConfigError as error:  # the error is about an MoE layer that only this stage has
            refusal = error
        if runtime.mesh.largest(refusal is not None)[0]:
            raise refusal or ConfigError(
                "the MoE layers of another pipeline stage cannot record routes: see the error of its ranks"
            )
        recorded = list[_Pass]()
        routes = list[Tensor]()
        with attribute_replaced(self, "_recorded", recorded):
            yield routes
            whole = [
                _routes_of_all_ranks(runtime, each, each.batch)
                for each in recorded
                if each.batch is not None
            ]
        while whole:
            parts = whole[0][1]
            routes.append(torch.cat([each for each, _ in whole[:parts]]).cpu())
            del whole[:parts]

    def _hook(self, runtime: Runtime) -> None:
        if self._handles:
            return
        _refuse(runtime)
        self._passes = ForwardPasses()
        model = runtime.model
        self._passes.begin(None)

        def begin(
            _: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
        ) -> Any:
            given = kwargs.pop(ROUTES, None)
            self._passes.begin(
                given if isinstance(given, _Pass) else self._new_pass(given, Microbatch(kwargs))
            )
            return args, kwargs

        def end(*_: Any) -> None:
            self._passes.begin(None)

        self._handles.append(model.register_forward_pre_hook(begin, with_kwargs=True, prepend=True))
        self._handles.append(model.register_forward_hook(end, always_call=True))
        for number, planned in _local_mixtures(runtime):
            self._hook_mixture(runtime, number, planned)

    def _new_pass(self, given: Tensor | None, batch: Microbatch) -> _Pass:
        if self._recorded is None:
            return _Pass(given, None)
        self._recorded.append(_Pass(given, batch))
        return self._recorded[-1]

    def _hook_mixture(self, runtime: Runtime, number: int, planned: ExpertsPlan) -> None:
        experts, block = map(
            runtime.model.get_submodule, (planned.name, planned.name.rpartition(".")[0])
        )
        running: list[_Choice] = []

        def enter(*_: Any) -> None:
            now = self._passes.current()
            if now is not None and (now.given is not None or now.batch is not None):
                if number not in now.choices:
                    now.choices[number] = _choice(runtime, number, planned, now.given)
                running.append(now.choices[number].__enter__())

        def check(
            _: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
        ) -> None:
            now = self._passes.current()
            if now is None or number not in now.choices:
                return
            choice = now.choices[number]
            got = [*args, *kwargs.values()][1]
            made = choice.index
            if made is None or (
                made.data_ptr() != got.data_ptr() and not torch.equal(made.view_as(got), got)
            ):
                raise ConfigError(
                    f"{wild_name(planned.name)}: {runtime.plan.family!r} calls its experts with indices that are not "
                    f"the result of one top-k of {choice.count} router scores, so the experts of tokens cannot be "
                    "replayed (routes=) or recorded: leave routes out"
                )
            choice.made = made.flatten(0, -2)

        def leave(*_: Any) -> None:
            if running:
                running.pop().__exit__(None, None, None)

        self._handles.append(block.register_forward_pre_hook(enter))
        self._handles.append(experts.register_forward_pre_hook(check, with_kwargs=True))
        self._handles.append(block.register_forward_hook(leave, always_call=True))


def record_routes(model: nn.Module) -> AbstractContextManager[list[Tensor]]:
    """Record the experts of every token inside the with block, in the form that ``routes=`` takes::

        with torch.no_grad(), hfscale.record_routes(model) as routes:
            before = hfscale.token_scores(model, batch)
        loss = hfscale.train_step(model, batch, routes=routes)

    Enter and leave the block on every rank. At the end of the block the list has one tensor for each batch of the
    block's steps: integers ``[rows, tokens, MoE layers, k]`` on the CPU, the experts of each token.

    ``routes=`` takes any ``k`` different experts per token in any order, or ``k`` times -1 for a token whose experts
    the router shall choose. The experts' weights, with gradients, are computed by the live router. Layers that are
    recomputed inside the block use the experts of the first forward pass, since rounding could change the choice.

    Raises:
        ConfigError: the model's routers do not choose by one top-k, or ``routing=`` replaces their choice.
    """
    runtime = runtime_of(model)
    # A model without MoE layers has no replay; a new RouteReplay raises an error with the reason.
    return (runtime.part(RouteReplay) or RouteReplay()).record(runtime)


def replayed(runtime: Runtime) -> list[ExpertsPlan]:
    """Return the MoE layers whose experts the argument ``routes=`` gives, in the model's order: all except those in
    layers that run only in training.
    """
    optional = tuple(f"{layer}." for layer in runtime.plan.optional_layers)
    return [
        planned for planned in runtime.plan.mixtures if not planned.name.startswith(optional or ())
    ]


def _local_mixtures(runtime: Runtime) -> list[tuple[int, ExpertsPlan]]:
    return [
        (number, planned)
        for number, planned in enumerate(replayed(runtime))
        if runtime.is_local(planned.name)
    ]


def _choice(runtime: Runtime, number: int, planned: ExpertsPlan, given: Tensor | None) -> _Choice:
    """Make the object that replaces one layer's choice of experts by the ``given`` experts of this rank's tokens, and
    records it.
    """
    is_part = has_part_of_tokens(runtime, planned)
    group = runtime.mesh.tp_group
    if given is not None:
        if is_part and group is not None:
            given = own_slice(given, share_evenly(given.shape[1], group.size()), 1, group)
        given = given[:, :, number].flatten(0, 1)
    return _Choice(planned.count, given, is_part)


def _refuse(runtime: Runtime) -> None:
    """Raise :class:`ConfigError` for a model whose choice of experts cannot be replayed or recorded."""
    model = runtime.model
    options = runtime.options.routing
    mixtures = replayed(runtime)
    family = runtime.plan.family
    if not mixtures or getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{class_name(model)} has no decoder whose layers call experts with the indices of each token's experts "
            "(transformers' use_experts_implementation), so these indices cannot be replayed (routes=) or recorded: "
            "leave routes out"
        )
    if options is not None and (options.router != "model" or options.force_balanced):
        raise ConfigError(
            f"routes= (the experts of every token) replays choices of the model's own router, but routing={options} "
            "replaces the router's choice: leave out either routes or routing"
        )
    if len({planned.layer for planned in mixtures}) < len(mixtures):
        raise ConfigError(
            f"{family!r} has several expert modules in a layer, each for some of the tokens, so the experts of a "
            "token cannot be replayed (routes=) or recorded: leave routes out"
        )
    if any(
        is_compiled_in_place(model.get_submodule(planned.layer))
        for _, planned in _local_mixtures(runtime)
    ):
        raise ConfigError(
            "the experts of tokens cannot be replayed (routes=) or recorded in layers that are compiled already: "
            "load the model without compile=True"
        )
    for _, planned in _local_mixtures(runtime):
        block = model.get_submodule(planned.name.rpartition(".")[0])
        if not any("topk" in used_names(type(module)) for module in block.modules()):
            raise ConfigError(
                f"{wild_name(planned.name)}: the router of {family!r} chooses experts otherwise than by top-k (for "
                "example at random), so the experts of tokens cannot be replayed (routes=) or recorded: leave routes "
                "out"
            )


def _check(runtime: Runtime, batch: Batch, routes: Tensor) -> None:
    """Raise :class:`ConfigError` for ``routes`` whose shape does not fit the batch, or in which a token's experts are
    neither ``k`` different ones nor all -1.
    """
    mixtures = replayed(runtime)
    place = tokens_of(batch)
    k = experts_per_token(runtime.model.config) or routes.shape[-1]
    if routes.shape != (*place, len(mixtures), k):
        raise ConfigError(
            "routes must have the shape [rows, tokens, layers with experts, experts per token], got "
            f"{list(routes.shape)} for {place[0]} rows of {place[1]} tokens and {len(mixtures)} layers with experts, "
            f"{k} experts per token: give routes of shape {[*place, len(mixtures), k]}"
        )
    counts = torch.tensor([planned.count for planned in mixtures], device=routes.device).unsqueeze(
        -1
    )
    ordered = routes.sort(-1).values
    unlike = ordered.diff(dim=-1).bool().all(-1) & (ordered >= 0).all(-1)
    strange = ~((unlike & (routes < counts).all(-1)) | (routes == -1).all(-1))
    if bool(strange.any()):
        row, token, layer = strange.nonzero()[0].tolist()
        raise ConfigError(
            f"the experts of a token must be its router's choice, got routes[{row}, {token}, {layer}] = "
            f"{routes[row, token, layer].tolist()} (indices: row, token, layer): give {k} different numbers below "
            f"{mixtures[layer].count}, the number of experts, or {k} times -1 to let the router choose. If all "
            "entries are zeros, the inference engine used kernels that do not record routes"
        )


@torch.no_grad()
def _routes_of_all_ranks(runtime: Runtime, made: _Pass, batch: Microbatch) -> tuple[Tensor, int]:
    """Return the experts ``[b, s, layers, k]`` of all tokens in one forward pass, gathered from all ranks; collective.

    Also return the number of microbatches into which the forward pass's batch was split.
    """
    mesh, (samples, length) = runtime.mesh, tokens_of(batch)
    tokens = batch.tokens or length
    taken = {
        number: choice.made for number, choice in made.choices.items() if choice.made is not None
    }
    k = max(
        (index.shape[-1] for index in taken.values()),
        default=experts_per_token(runtime.model.config) or 0,
    )
    own = torch.zeros(
        samples, tokens, len(replayed(runtime)), k, dtype=torch.int32, device=mesh.device
    )
    for number, index in taken.items():
        chosen = index.to(torch.int32).view(samples, -1, k)
        if made.choices[number].is_part and mesh.tp_group is not None:
            chosen = all_gather(chosen, share_evenly(tokens, mesh.layout.tp), 1, mesh.tp_group)
        own[:, :, number] = chosen
    whole = runtime.context.gather_tokens(batch, own)
    for group in mesh.groups("pp"):
        dist.all_reduce(whole, group=group)
    return whole, batch.parts
