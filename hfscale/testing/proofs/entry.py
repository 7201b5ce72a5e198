"""Prove what comes before the first layers of a model, and their inputs."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..._compat.torch import tree_leaves
from ..._compat.transformers.hidden_states import hidden_states_of
from ...plan.drafting.boundary_modules import PROBED, direct_children
from .clones import tiny_model
from .probe import Probe, Reached, names_no_size


def prove_entry(model: Any, firsts: dict[str, str], embedding: str | None) -> tuple[dict[str, Any], bool]:
    """Trace the model itself (without memory, mostly), or, where its code looks at values, a tiny clone of it.

    Args:
        firsts: the first layer of each list -> the module that runs the list.

    Returns:
        ``before`` and ``direct`` of :class:`EntryProbe`, its ``failure``, and ``odd``: the shapes that are no samples,
        tokens and width.
    """
    probe = EntryProbe(model, firsts, embedding)
    clone = tiny_model(model) if probe.failure else None
    probe = probe if clone is None else EntryProbe(clone, firsts, embedding)
    odd = {owner: shape for owner, shape in probe.shapes.items() if len(shape) != 3 or shape[0] != PROBED[0]}
    before = {owner: sorted(called) for owner, called in probe.before.items()}
    answer = {"before": before, "direct": probe.direct, "odd": odd, "failure": probe.failure}
    return answer, not odd and names_no_size(probe.failure)


class EntryProbe(Probe):
    """Run a model up to its first layers, and note what was called before them.

    Attributes:
        before: owner -> modules directly below it that were called before its first layer.
        direct: the first layer that got what the embedding returned, when nothing else did.
        shapes: owner -> the shape of what its first layer got, where it got a tensor.
    """

    def __init__(self, model: Any, firsts: dict[str, str], embedding: str | None) -> None:
        super().__init__()
        modules: dict[str, Any] = dict(model.named_modules())
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
                raise Reached

        return hook

    def _after_embedding(self, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self._embedded, self._uses = output, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._embedded is not None and any(leaf is self._embedded for leaf in tree_leaves((args, kwargs))):
            self._uses += 1
        return func(*args, **(kwargs or {}))
