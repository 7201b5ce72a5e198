"""Prove which modules run before, between and after a model's layers, which modules are unused, and whether layers can
use a loan.

A loan is a module of the first layer whose result all layers read (:class:`hfscale.plan.stages.Loan`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..._compat.torch import tree_leaves
from ..._compat.transformers.classes import takes_argument
from ..._compat.transformers.hidden_states import hidden_states_of
from ...models.module_kinds import takes_routes
from ...plan.drafting.boundary_modules import ALONE, GIVEN, PROBED, lend
from ...plan.drafting.layers import direct_children
from ...plan.stages import Loan
from .probe import (
    Probe,
    Reached,
    end_texts,
    names_no_size,
    probed,
    skipped_experts,
    tiny_model,
    without_cache,
)

_TOKENS = 5  # tokens of the text on which a loan is proved


def prove_entry(
    model: Any, firsts: dict[str, str], embedding: str | None
) -> tuple[dict[str, Any], bool]:
    """Trace the model up to its first layers. ``firsts`` maps the first layer of each layer list to the module that
    runs the list.

    The answer has ``before``: for each such module, its children that are called before its first layer; ``direct``:
    the layer that gets the output of ``embedding`` unchanged, if any; ``odd``: shapes of layer inputs that are not
    ``[samples, tokens, width]``; and ``failure``: why the model could not run, or empty.
    """
    probe = probed(_EntryProbe, model, firsts, embedding)
    odd = {
        owner: shape
        for owner, shape in probe.shapes.items()
        if len(shape) != 3 or shape[0] != PROBED[0]
    }
    before = {owner: sorted(called) for owner, called in probe.before.items()}
    answer = {"before": before, "direct": probe.direct, "odd": odd, "failure": probe.failure}
    return answer, not odd and names_no_size(probe.failure)


class _EntryProbe(Probe):
    """Run a model up to the first layer of each layer list; record the modules that are called before these layers."""

    def __init__(
        self,
        model: Any,
        firsts: dict[str, str],
        embedding: str | None,
    ) -> None:
        super().__init__(model)
        modules: dict[str, Any] = dict(model.named_modules())
        # owner -> its direct children that were called before its first layer
        self.before: dict[str, set[str]] = {}
        # the first layer that got the embedding's output, if no other operation used that output
        self.direct: str | None = None
        # owner -> the shape of its first layer's input, if the input is a tensor
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._embedded: Tensor | None = None
        self._uses = 0
        self._called: set[str] = set()
        for owner in set(firsts.values()):
            for name in direct_children(modules, owner):
                self._before(
                    modules[name],
                    lambda *_, n=name: self._called.add(n),
                )
        for layer, owner in firsts.items():
            self._before(modules[layer], self._first_layer(layer, owner, len(firsts)))
        if embedding is not None:
            self._after(modules[embedding], self._after_embedding)
        self._run()

    def _first_layer(self, layer: str, owner: str, owners: int) -> Callable[..., None]:
        def hook(
            _: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
        ) -> None:
            x = hidden_states_of(args, kwargs)
            if x is self._embedded and x is not None and self._uses == 0:
                self.direct = layer
            if isinstance(x, Tensor):
                self.shapes[owner] = tuple(x.shape)
            self.before[owner] = set(self._called)
            if len(self.before) == owners:
                raise Reached

        return hook

    def _after_embedding(
        self,
        _: nn.Module,
        args: tuple[Any, ...],
        output: Tensor,
    ) -> None:
        self._embedded = output
        self._uses = 0

    def _operated(self, given: list[Tensor], result: Any) -> None:
        self._uses += any(tensor is self._embedded for tensor in given)


def prove_passage(
    model: Any,
    layer_list: str,
    items: Iterable[str],
) -> tuple[dict[str, Any], bool]:
    """Run the model through the layers of ``layer_list``; return what :class:`PassageProbe` records about them, and
    about the use of ``items`` (modules or parameters outside the layers) before, between and after the layers.
    """
    probe = probed(PassageProbe, model, layer_list, list(items))
    answer = {
        "phases": {item: sorted(phases) for item, phases in probe.phases.items()},
        "returns": probe.returns,
        "item_returns": probe.item_returns,
        "obstacles": probe.obstacles,
        "shared": sorted(probe.shared),
        "failure": probe.failure,
    }
    return answer, names_no_size(probe.failure, *probe.obstacles)


class PassageProbe(Probe):
    """Run a model to its end; record which modules and parameters outside the layers of one list are used before,
    between and after these layers, and what keeps pipeline stages from running the layers.
    """

    def __init__(self, model: Any, layer_list: str, items: Iterable[str]) -> None:
        super().__init__(model)
        modules = dict(model.named_modules())
        layers = list(model.get_submodule(layer_list))
        # module or parameter among ``items`` -> phases of its use: ``"before"``, ``"between"`` or ``"after"`` the
        # layers
        self.phases: dict[str, set[str]] = {}
        # structure of a layer's result: ``None`` for a tensor, ``n`` for a tuple of ``n`` that begins with hidden
        # states
        self.returns: int | None = None
        # structure of the results of those ``items`` that are called, in the same form; 0 for anything else
        self.item_returns: dict[str, int | None] = {}
        # reasons, in words, why several processes cannot run the layers if they send each other only hidden states
        self.obstacles: list[str] = []
        # the ``items`` from which layers get more than hidden states (inputs per layer, positions from a table): every
        # process would need these items
        self.shared: set[str] = set()
        self._count = len(layers)
        self._entered = 0
        self._left = 0
        self._inside = False
        self._stream: Tensor | None = None  # hidden states of the last layer
        # Tensor -> the items that it depends on; "" means that it depends on layers.
        self._sources = WeakTensorKeyDictionary()
        # tensors that earlier layers have written into a mapping that this layer gets
        self._offered: list[Tensor] = []
        self._calling: list[str] = []
        self._uses: dict[int, str] = {}  # id of a parameter -> the only item with it
        for item in items:
            self._watch(modules, item)
        for index, layer in enumerate(layers):
            self._before(layer, self._enter(index))
            self._after(layer, self._leave)
        with skipped_experts(modules.values()):
            self._run()
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

    def _watch(self, modules: dict[str, Any], item: str) -> None:
        owner, _, child = item.rpartition(".")
        child_module = getattr(modules.get(owner), child, None)
        tensors = (
            list(child_module.parameters())
            if isinstance(child_module, nn.Module)
            else [child_module]
            if child_module is not None
            else []
        )
        for tensor in tensors:
            # If two items share a tensor (a tied head), the called module tells which item uses the tensor.
            self._uses[id(tensor)] = item if self._uses.get(id(tensor), item) == item else ""
        if isinstance(child_module, nn.Module):
            self._before(child_module, lambda *_: self._begin(item))
            self._after(child_module, lambda _, args, output: self._end(item, output))

    def _begin(self, item: str) -> None:
        self._used(item)
        self._calling.append(item)

    def _end(self, item: str, output: Any) -> None:
        self._calling.pop()
        self.item_returns[item] = _structure(output)

    def _used(self, item: str) -> None:
        self.phases.setdefault(item, set()).add(self._phase)

    def _enter(self, index: int) -> Callable[..., None]:
        def hook(
            _: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
        ) -> None:
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
            # Layers may write tensors into a mapping that no other layer reads (Gemma 4 without shared keys and
            # values).
            lying = [leaf for leaf in _tensors_in_mappings(given) if leaf in self._sources]
            self._offered = [leaf for leaf in lying if "" in self._sources[leaf]]
            self.shared |= frozenset().union(*(self._sources[leaf] for leaf in lying)) - {""}
            self._entered = self._entered + 1
            self._inside = True

        return hook

    def _leave(
        self,
        _: nn.Module,
        args: tuple[Any, ...],
        output: Any,
    ) -> None:
        structure = _structure(output)
        if structure == 0:
            self._obstacle(
                f"its layers return a {type(output).__name__} that does not begin with the stream"
            )
        elif self._left and structure != self.returns:
            self._obstacle("its layers do not all return the same")
        stream = output if structure is None else output[0] if structure else None
        if stream is not None and tuple(stream.shape[:2]) != PROBED:
            shape = f"{tuple(stream.shape)} for {PROBED[0]} sample of {PROBED[1]} tokens"
            self._obstacle(
                f"its stream does not begin with samples and tokens (it has the shape {shape})"
            )
        self.returns = structure
        self._stream = stream
        self._left = self._left + 1
        self._inside = False

    def _operated(self, given: list[Tensor], result: Any) -> None:
        # If two items share a tensor (a tied head), the module that is being called tells which item uses the tensor.
        items = [
            self._uses[id(tensor)] or "".join(self._calling[-1:])
            for tensor in given
            if id(tensor) in self._uses
        ]
        for item in filter(None, items):
            self._used(item)
        if self._inside and any(tensor is other for tensor in given for other in self._offered):
            self._obstacle(GIVEN)
        known = (self._sources.get(tensor, frozenset()) for tensor in given)
        sources = frozenset([""]) if self._inside else frozenset(items).union(*known)
        for leaf in tree_leaves(result) if sources else ():
            if isinstance(leaf, Tensor):
                self._sources[leaf] = sources


def _tensors_in_mappings(leaves: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors in mappings among a layer's arguments, such as the keys and values that layers share."""
    for leaf in leaves:
        if isinstance(leaf, Mapping):
            inside = tree_leaves(dict(leaf))
            yield from (each for each in inside if isinstance(each, Tensor))
            yield from _tensors_in_mappings(inside)


def _structure(output: Any) -> int | None:
    """Return the structure of a layer's output: ``None`` for a tensor, ``n`` for a tuple of ``n`` that begins with a
    tensor, and 0 for anything else.
    """
    if isinstance(output, Tensor):
        return None
    return (
        len(output)
        if type(output) in (tuple, list) and output and isinstance(output[0], Tensor)
        else 0
    )


def prove_reach(model: Any, layers: list[str]) -> tuple[dict[str, list[str]], bool]:
    """Return which of the ``layers`` are never called in a forward pass: under ``classes``, the classes of these layers
    if no layer of these classes is called, else under ``names``, the layers.
    """
    probe = _ReachProbe(model, layers)
    if probe.failure:
        return {"classes": [], "names": []}, True
    kinds = {layer: type(model.get_submodule(layer)).__name__ for layer in layers}
    left_out = [layer for layer in layers if layer not in probe.reached]
    classes = sorted({kinds[layer] for layer in left_out})
    if {kinds[layer] for layer in probe.reached}.isdisjoint(classes):
        return {"classes": classes, "names": []}, True
    return {"classes": [], "names": left_out}, False


def prove_unused(model: Any) -> tuple[list[str], bool]:
    """Return the largest modules that no operation uses, and unused parameters of the remaining modules."""
    probe = probed(_ReachProbe, model)
    items = list(_unused(probe.model, probe.used)) if not probe.failure else []
    return items, not any(part.isdigit() for item in items for part in item.split("."))


def _unused(
    module: nn.Module,
    used: set[int],
    path: str = "",
) -> Iterator[str]:
    """Yield the largest modules without any ``used`` parameter, and unused parameters of the remaining modules."""
    for name, parameter in module.named_parameters(recurse=False):
        if id(parameter) not in used:
            yield f"{path}{name}"
    for name, child in module.named_children():
        held = {id(parameter) for parameter in child.parameters()}
        if held and not takes_routes(child):  # an expert may get no token
            yield from _unused(child, used, f"{path}{name}.") if used & held else (f"{path}{name}",)


class _ReachProbe(Probe):
    """Run a model on tokens; record the layers that are called and the parameters that are used."""

    def __init__(self, model: Any, layers: Iterable[str] = ()) -> None:
        super().__init__(model)
        self.reached: set[str] = set()  # the layers that were called
        self.used: set[int] = set()  # ids of the parameters that operations use
        self._parameters = {id(parameter) for parameter in model.parameters()}
        for layer in layers:
            self._before(
                model.get_submodule(layer),
                lambda *_, name=layer: self.reached.add(name),
            )
        places = torch.zeros(*PROBED, 4, device=next(model.parameters()).device)
        # Boxes of the tokens on a page.
        self._run(**({"bbox": places} if takes_argument(model, "bbox") else {}))

    def _operated(self, given: list[Tensor], result: Any) -> None:
        self.used |= self._parameters.intersection(map(id, given))


def prove_loan(model: Any, loan: Loan) -> tuple[bool, bool]:
    """Return whether a clone computes the same if its other layers call the loan themselves. The loan is a module of
    the first layer whose result all layers read.
    """
    clone = tiny_model(model)
    # Stock code may raise anything if layers do not get their usual arguments.
    with suppress(Exception):
        return clone is not None and proved(clone, loan), True
    return False, True


@torch.no_grad()
def proved(model: Any, loan: Loan) -> bool:
    """Return whether a model computes the same if its layers get only hidden states and the result of the loan, a
    module of the first layer whose result all layers read; changes the model.
    """
    model.eval()
    lent = model.get_submodule(loan.name)
    for parameter in lent.parameters():  # zeros would prove nothing
        parameter.normal_()
    together = _output(model)
    first, *others = model.get_submodule(loan.layer_list)
    for layer in (first, *others):
        layer.register_forward_hook(  # return hidden states only, like a layer's stand-in
            lambda _, args, out: (
                (out[0], *(None for _ in out[1:])) if isinstance(out, tuple) else out
            )
        )
    for layer in others:
        lend(loan, lent, layer)
    return torch.equal(together, _output(model))


def _output(model: Any) -> Tensor:
    # All tokens differ, because attention to equal tokens does not depend on its scores.
    ids = torch.arange(3, 3 + _TOKENS)[None]
    inputs: dict[str, Any] = (
        {"decoder_input_ids": ids.flip(1)} if model.config.is_encoder_decoder else {}
    )
    end_texts(ids, model.config)
    return model(input_ids=ids, **inputs, **without_cache(model))[0]
