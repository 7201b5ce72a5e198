"""Check cheaply, in every step, whether a model still has the same modules and parameters.

Walking through a few hundred modules mostly waits for memory that forward and backward passes have evicted from the
CPU's caches, so all checks of one step share one walk. The walk builds and compares lists without Python code for each
entry.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, filterfalse
from operator import attrgetter, is_, methodcaller
from typing import Any

from torch import nn

from ..._compat.torch import children_of, parameters_of

_values = methodcaller("values")
_type = attrgetter("dtype")
_missing = partial(is_, None)
_LEAVES = frozenset({nn.Linear, nn.Embedding, nn.Identity, nn.Dropout, nn.ParameterDict})
"""Classes of modules that normally have no children. A PEFT wrapper holds seven of them in addition to the wrapped
module.
"""
_BARE = frozenset({nn.ModuleDict, nn.ModuleList, nn.Identity, nn.Dropout})
"""Classes of modules that normally have no parameters themselves."""


class ModuleContents:
    """Record the children and the parameters of every module of a model, and the dtypes of parameters, to find out
    whether any of them has changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._version = 0
        self._fixed = False
        self.modules: list[nn.Module] = []  # every module once
        self._parents: list[nn.Module] = []
        self._holders: list[nn.Module] = []
        # modules whose children, or parameters, are only counted, since usually there are none
        self._leaves: list[nn.Module] = []
        self._bare: list[nn.Module] = []
        self._names: list[Any] = []
        self._held: list[Any] = []

    def version(self) -> int:
        """Return a number that changes when the children, the parameters or their dtypes of any module have changed
        since the last call.
        """
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
                self._leaves = [module for module in self.modules if type(module) in _LEAVES]
                self._bare = [module for module in self.modules if type(module) in _BARE]
                self._names, self._held = self._count_entries()
                self._version += 1
        return self._version

    @contextmanager
    def fixed(self) -> Iterator[None]:
        """Check the modules for changes only once, at the beginning of the ``with`` block, in which nothing may change
        them.
        """
        self.version()
        outer = self._fixed
        self._fixed = True
        try:
            yield
        finally:
            self._fixed = outer

    def _count_entries(self) -> tuple[list[Any], list[Any]]:
        """Return two lists that together change with the model's contents: numbers and names of all modules' children
        and parameters; and these children, parameters, and the parameters' dtypes.
        """
        # The dicts are fetched again each time, because `del layers[-1]` gives a ModuleList a new dict.
        children = list(map(children_of, self._parents))
        parameters = list(map(parameters_of, self._holders))
        own = list(filterfalse(_missing, chain.from_iterable(map(_values, parameters))))
        held = chain(chain.from_iterable(map(_values, children)), own, map(_type, own))
        dicts = children + parameters
        seldom = chain(map(children_of, self._leaves), map(parameters_of, self._bare))
        counts = map(len, chain(dicts, seldom))
        return [*counts, *chain.from_iterable(dicts)], list(held)
