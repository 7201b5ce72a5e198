"""Tell cheaply, in every step, whether a model still has the modules and parameters that it had before.

Most of a walk through a few hundred modules is waiting for memory that the passes have displaced from the caches, so
all questions of one step are answered by one look. It makes and compares lists without Python code for each entry.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, filterfalse
from operator import attrgetter, is_, methodcaller
from typing import Any

from torch import nn

from ..._compat.torch import own_contents

_values = methodcaller("values")
_type = attrgetter("dtype")
_missing = partial(is_, None)
_LEAVES = frozenset({nn.Linear, nn.Embedding, nn.Identity, nn.Dropout, nn.ParameterDict})
"""Classes of modules that get no children. A wrapper of PEFT holds seven of them beside what it wraps."""
_BARE = frozenset({nn.ModuleDict, nn.ModuleList, nn.Identity, nn.Dropout})
"""Classes of modules that get no parameters of their own."""


class ModuleContents:
    """Remember the children and the parameters of every module of a model, and the parameters' types."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._version = 0
        self._fixed = False
        self.modules: list[nn.Module] = []  # every module once
        self._parents: list[nn.Module] = []
        self._holders: list[nn.Module] = []
        self._names: list[Any] = []
        self._held: list[Any] = []

    def version(self) -> int:
        """Return a number that is another one once any module has other children or parameters than before."""
        if not self._fixed:
            names, held = self._count_entries()
            same = (
                names == self._names
                and len(held) == len(self._held)
                and all(map(is_, held, self._held))
            )
            if not (same and self.modules):
                self.modules = list(self._model.modules())
                self._parents = [module for module in self.modules if type(module) not in _LEAVES]
                self._holders = [module for module in self.modules if type(module) not in _BARE]
                self._names, self._held = self._count_entries()
                self._version += 1
        return self._version

    @contextmanager
    def fixed(self) -> Iterator[None]:
        """Look at the modules once for the whole ``with`` block, in which nothing changes them."""
        self.version()
        outer = self._fixed
        self._fixed = True
        try:
            yield
        finally:
            self._fixed = outer

    def _count_entries(self) -> tuple[list[Any], list[Any]]:
        """Return the numbers of entries and the names, and what has them, children first."""
        # The dicts are asked for anew: `del layers[-1]` gives a ModuleList another one.
        children, parameters = own_contents(self._parents, self._holders)
        own = list(filterfalse(_missing, chain.from_iterable(map(_values, parameters))))
        held = chain(chain.from_iterable(map(_values, children)), own, map(_type, own))
        dicts = children + parameters
        return [*map(len, dicts), *chain.from_iterable(dicts)], list(held)
