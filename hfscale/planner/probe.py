"""Run a model on two tokens, mostly without memory, to see what its modules do in which order.

:class:`EntryProbe` stops where the layers begin; :class:`PassageProbe` goes all the way through one list of layers.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .._host.torch import TorchDispatchMode, tree_leaves
from .._host.torch_device import fork_random_state
from .._host.transformers.classes import from_config, takes_argument
from .._host.transformers.hidden_states import hidden_states_of
from ..families.clone import tiny_clone
from ..families.expert_modules import takes_routes
from ..families.fields import text_config
from ..plan.parameter import join_path
from .draft import Draft

PROBED = (1, 2)  # samples, and tokens of each
_LARGEST = 30_000_000  # parameters of a clone: a second or two of first values
ALONE = ", and only the stream travels between stages"


GIVEN = f"its layers are given what another layer computed, besides the stream{ALONE}"


def end_texts(ids: Tensor, config: Any) -> None:
    """Let texts for an encoder-decoder end with the token for that, by which it classifies them."""
    end = getattr(text_config(config), "eos_token_id", None)
    if config.is_encoder_decoder and isinstance(end, int):
        ids[:, -1] = end


class _Reached(Exception):
    """There is nothing more to see."""


def direct_children(modules: dict[str, Any], owner: str) -> list[str]:
    """Full names of the modules directly below ``owner``."""
    return [join_path(owner, name) if owner else name for name, _ in modules[owner].named_children()]


def tiny_model(model: Any) -> Any | None:
    """A tiny clone with real weights, where one can be built; in 32 bits, which every kernel of the host has."""
    return tiny_model_of(type(model), model.config, torch.float32)


def tiny_model_of(kind: Any, config: Any, dtype: torch.dtype, **changes: Any) -> Any | None:
    """The same of a class and a config; ``None`` also where sizes have names that made nothing small of them.

    Args:
        changes: as for :func:`hfscale.families.clone.tiny_clone`.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            small = tiny_clone(config, **changes)
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in from_config(kind, small, dtype=dtype).parameters())
            if size > _LARGEST:
                return None
            with torch.device("cpu"):
                return from_config(kind, small, dtype=dtype)
        except Exception:  # whatever stock code says of a clone it cannot build
            return None


def probe_entry(draft: Draft, firsts: dict[str, str], embedding: str | None) -> "EntryProbe":
    """Trace the model itself (without memory, mostly), or, where its code looks at values, a tiny clone of it."""
    probe = EntryProbe(draft.model, draft.modules, firsts, embedding)
    clone = tiny_model(draft.model) if probe.failure else None
    return probe if clone is None else EntryProbe(clone, dict(clone.named_modules()), firsts, embedding)


class Probe(TorchDispatchMode):
    """A run of a model with hooks on its modules.

    Attributes:
        failure: why the model could not be run, if so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failure = ""
        self._handles: list[Any] = []

    def _before(self, module: nn.Module, hook: Callable[..., None]) -> None:
        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _after(self, module: nn.Module, hook: Callable[..., None]) -> None:
        self._handles.append(module.register_forward_hook(hook))

    def _run(self, model: Any, **inputs: Any) -> None:
        device = next(model.parameters()).device
        ids = torch.full(PROBED, 3, dtype=torch.long, device=device)
        end_texts(ids, model.config)
        if device.type != "meta" and takes_argument(model, "use_cache"):
            # Without values, the host's masks want a cache; with them, classes without attention want none.
            inputs.setdefault("use_cache", False)
        modes = [(module, module.training) for module in model.modules()]
        inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}), **inputs}
        try:
            model.eval()  # some models leave out layers at random while they train
            with torch.no_grad(), fork_random_state(device), self:
                model(**inputs)
        except _Reached:
            pass
        except Exception as error:  # whatever stock code says of a run without memory
            self.failure = f"{type(error).__name__}: {error}".split("\n")[0][:100]
        finally:
            for module, training in modes:
                module.training = training
            while self._handles:
                self._handles.pop().remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class EntryProbe(Probe):
    """Run a model up to its first layers, and note what was called before them.

    Attributes:
        before: owner -> modules directly below it that were called before its first layer.
        direct: the first layer that got what the embedding returned, when nothing else did.
        shapes: owner -> the shape of what its first layer got, where it got a tensor.
    """

    def __init__(self, model: Any, modules: dict[str, Any], firsts: dict[str, str], embedding: str | None) -> None:
        super().__init__()
        self.before: dict[str, set[str]] = {}
        self.direct: str | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._embedded: Tensor | None = None
        self._uses = 0
        self._called: set[str] = set()
        for owner in set(firsts.values()):
            for name in direct_children(modules, owner):
                self._before(modules[name], lambda *_, n=name: self._called.add(n))
        for layer, owner in firsts.items():
            self._before(modules[layer], self._first_layer(layer, owner, len(firsts)))
        if embedding is not None:
            self._after(modules[embedding], self._after_embedding)
        self._run(model)

    def _first_layer(self, layer: str, owner: str, owners: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = hidden_states_of(args, kwargs)
            if x is self._embedded and x is not None and self._uses == 0:
                self.direct = layer
            if isinstance(x, Tensor):
                self.shapes[owner] = tuple(x.shape)
            self.before[owner] = set(self._called)
            if len(self.before) == owners:
                raise _Reached

        return hook

    def _after_embedding(self, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self._embedded, self._uses = output, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._embedded is not None and any(leaf is self._embedded for leaf in tree_leaves((args, kwargs))):
            self._uses += 1
        return func(*args, **(kwargs or {}))


class PassageProbe(Probe):
    """Run a model to its end, and note what happens before, between and after the layers of one list.

    Attributes:
        phases: module or parameter of ``items`` -> when it was used: ``"before"``, ``"between"`` or ``"after"`` the
            layers.
        returns: what a layer returns: ``None`` for a tensor, ``n`` for a tuple of ``n`` with the stream first.
        item_returns: the same of the modules among ``items`` that were called; 0 for anything else.
        shared: those of ``items`` that the layers get something from besides the stream (inputs per layer, positions
            from a table): every process would have to hold them.
        obstacles: what keeps the layers from being run by several processes that pass on the stream alone, in words.
    """

    def __init__(self, model: Any, layer_list: str, items: Iterable[str]) -> None:
        super().__init__()
        modules, layers = dict(model.named_modules()), list(model.get_submodule(layer_list))
        self.phases: dict[str, set[str]] = {}
        self.returns: int | None = None
        self.item_returns: dict[str, int | None] = {}
        self.obstacles: list[str] = []
        self.shared: set[str] = set()
        self._count, self._entered, self._left = len(layers), 0, 0
        self._inside = False
        self._stream: Tensor | None = None  # what the last layer returned
        self._sources = WeakTensorKeyDictionary()  # tensor -> the items that it depends on; "" for the layers
        self._offered: list[Tensor] = []  # by layers before, in a mapping, to the one that runs
        self._calling: list[str] = []
        self._uses: dict[int, str] = {}  # parameters that one item alone has -> the item
        for item in items:
            self._watch(model, modules, item)
        for index, layer in enumerate(layers):
            self._before(layer, self._enter(index))
            self._after(layer, self._leave)
        with skipped_experts(modules.values()):
            self._run(model)
        self._stream, self._offered = None, []  # what was seen is remembered longer than the model is
        self._sources = WeakTensorKeyDictionary()
        if not self.failure and (self._left, self._entered) != (self._count, self._count):
            self._obstacle(f"its {self._count} layers are run {self._entered} times in one pass")

    @property
    def _phase(self) -> str:
        if not self._entered:
            return "before"
        return "after" if self._left >= self._count and not self._inside else "between"

    def _obstacle(self, what: str) -> None:
        if what not in self.obstacles:
            self.obstacles.append(what)

    def _watch(self, model: Any, modules: dict[str, Any], item: str) -> None:
        owner, _, child = item.rpartition(".")
        found = getattr(modules.get(owner), child, None)
        tensors = list(found.parameters()) if isinstance(found, nn.Module) else [found] if found is not None else []
        for tensor in tensors:
            # A tensor that two items share (a tied head) is told apart by which module is called.
            self._uses[id(tensor)] = item if self._uses.get(id(tensor), item) == item else ""
        if isinstance(found, nn.Module):
            self._before(found, lambda *_: self._begin(item))
            self._after(found, lambda _, args, output: self._end(item, output))

    def _begin(self, item: str) -> None:
        self._used(item)
        self._calling.append(item)

    def _end(self, item: str, output: Any) -> None:
        self._calling.pop()
        self.item_returns[item] = _structure(output)

    def _used(self, item: str) -> None:
        self.phases.setdefault(item, set()).add(self._phase)

    def _enter(self, index: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = hidden_states_of(args, kwargs)
            if index != self._left or self._inside:
                self._obstacle("it does not call its layers one after the other")
            elif not isinstance(x, Tensor):
                self._obstacle("its layers do not get the stream as first argument")
            elif self._stream is not None and x is not self._stream:
                self._obstacle(f"it computes between its layers{ALONE}")
            given = tree_leaves((args, kwargs))
            for leaf in given:
                if isinstance(leaf, Tensor) and leaf is not x and leaf in self._sources:
                    if "" in self._sources[leaf]:
                        self._obstacle(GIVEN)
                    self.shared |= self._sources[leaf]
            # Layers may write to a mapping what no other reads (Gemma 4, where none share keys and values).
            lying = [leaf for leaf in _tensors_in_mappings(given) if leaf in self._sources]
            self._offered = [leaf for leaf in lying if "" in self._sources[leaf]]
            self.shared |= frozenset().union(*(self._sources[leaf] for leaf in lying)) - {""}
            self._entered, self._inside = self._entered + 1, True

        return hook

    def _leave(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        structure = _structure(output)
        if structure == 0:
            self._obstacle(f"its layers return a {type(output).__name__} that does not begin with the stream")
        elif self._left and structure != self.returns:
            self._obstacle("its layers do not all return the same")
        stream = output if structure is None else output[0] if structure else None
        if stream is not None and tuple(stream.shape[:2]) != PROBED:
            shape = f"{tuple(stream.shape)} for {PROBED[0]} sample of {PROBED[1]} tokens"
            self._obstacle(f"its stream does not begin with samples and tokens (it has the shape {shape})")
        self.returns = structure
        self._stream = stream
        self._left, self._inside = self._left + 1, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # Which item a tensor of two items (a tied head) is used for, the module that is being called says.
        items = [self._uses[id(leaf)] or "".join(self._calling[-1:]) for leaf in tensors if id(leaf) in self._uses]
        for item in filter(None, items):
            self._used(item)
        if self._inside and any(leaf is other for leaf in tensors for other in self._offered):
            self._obstacle(GIVEN)
        result = func(*args, **(kwargs or {}))
        known = (self._sources.get(leaf, frozenset()) for leaf in tensors)
        sources = frozenset([""]) if self._inside else frozenset(items).union(*known)
        for leaf in tree_leaves(result) if sources else ():
            if isinstance(leaf, Tensor):
                self._sources[leaf] = sources
        return result


@contextmanager
def skipped_experts(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within: experts pass their tokens on. What they do depends on values, and on kernels that not every type of
    number has; it stays inside a layer in any case.
    """
    skipped = [module for module in modules if takes_routes(module) and "forward" not in module.__dict__]
    for module in skipped:
        module.forward = lambda hidden_states, *args, **kwargs: torch.zeros_like(hidden_states)
    try:
        yield
    finally:
        for module in skipped:
            del module.forward


def _tensors_in_mappings(leaves: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors in mappings of the model's own among arguments of a call: keys and values that layers share."""
    for leaf in leaves:
        if isinstance(leaf, Mapping):
            inside = tree_leaves(dict(leaf))
            yield from (each for each in inside if isinstance(each, Tensor))
            yield from _tensors_in_mappings(inside)


def _structure(output: Any) -> int | None:
    """``None`` for a tensor, ``n`` for a tuple of ``n`` that begins with one, else 0."""
    if isinstance(output, Tensor):
        return None
    return len(output) if type(output) in (tuple, list) and output and isinstance(output[0], Tensor) else 0
