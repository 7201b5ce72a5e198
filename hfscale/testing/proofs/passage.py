"""Prove what happens before, between and after the layers of one list."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..._host.torch import tree_leaves
from ..._host.transformers.hidden_states import hidden_states_of
from ...planner.around import ALONE, GIVEN, PROBED
from .clones import tiny_model
from .probe import Probe, names_no_size, skipped_experts


def prove_passage(model: Any, layer_list: str, items: Iterable[str]) -> tuple[dict[str, Any], bool]:
    """Run the model through one list of layers, or a tiny clone where its code looks at values.

    Args:
        items: names of the modules and parameters around the list.

    Returns:
        the attributes of :class:`PassageProbe`.
    """
    around = list(items)
    probe = PassageProbe(model, layer_list, around)
    clone = tiny_model(model) if probe.failure else None
    probe = probe if clone is None else PassageProbe(clone, layer_list, around)
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
