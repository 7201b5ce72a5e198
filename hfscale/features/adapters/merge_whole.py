"""Merge adapters into full weights, one module at a time, in copies that leave the model unchanged.

Full weight and factors are put into a copy of the module that PEFT wrapped in the full model, and PEFT's own merge is
called there: so the result is that of one process, bit by bit.
"""

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..._compat.peft import COPY
from ...plan import AdapterParameter, Plan
from ...train.runtime.parameter_names import parameter_at, put_parameter
from .attach import Adapters
from .merge_adapters import merge_wrapper, refuse_tied
from .storage import stored_names


class WholeMerge:
    """A merge of full tensors, weight by weight.

    Attributes:
        factors: names of the adapters' own parameters.
    """

    def __init__(self, adapters: Adapters, plan: Plan) -> None:
        self._adapters, self._plan = adapters, plan
        self.factors = {adapter.name for adapter in plan.adapters}
        self._copies: dict[str, str] = {}  # owned name of a weight -> that of its trained copy
        self._around: dict[str, list[AdapterParameter]] = {}  # path of a module -> its adapters
        self._path_of: dict[str, str] = {}  # owned name of a weight -> path of its wrapped module
        for adapter in plan.adapters:
            base = plan.by_name[adapter.base]
            if adapter.kept_in == COPY:
                self._copies[base.tied_to or base.name] = adapter.tied_to or adapter.name
                continue
            path = adapter.base.rpartition(".")[0]
            self._around.setdefault(path, []).append(adapter)
            for name in (adapter.base, f"{path}.bias"):
                if name in plan.by_name:
                    self._path_of[plan.by_name[name].tied_to or name] = path

    def refuse_tied(self) -> None:
        """Raise :class:`ConfigError` if a weight to merge into is tied to one without the adapter."""
        refuse_tied(self._adapters, self._plan)

    def parts(self, name: str) -> list[str]:
        """Return the owned tensors that the merged weight ``name`` needs; weights of one module are merged together."""
        if name in self._copies:
            return [self._copies[name]]
        if name not in self._path_of:
            return [name]
        path = self._path_of[name]
        bases = [base for base, where in self._path_of.items() if where == path and base not in self._copies]
        return list(dict.fromkeys([*bases, *(a.tied_to or a.name for a in self._around[path])]))

    def merged(self, name: str, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return merged weights, by owned name, from the tensors that :meth:`parts` named."""
        if name in self._copies:
            return {name: parts[self._copies[name]]}
        if name not in self._path_of:
            return {name: parts[name]}
        path = self._path_of[name]
        wrapper: Any = copy.deepcopy(self._adapters.whole.get_base_model().get_submodule(path))
        bases = {base: base for base, where in self._path_of.items() if where == path and base in parts}
        for base in bases:
            put_parameter(wrapper, self._inside(base, path), nn.Parameter(parts[base].clone(), requires_grad=False))
        for adapter in self._around[path]:
            factor = nn.Parameter(parts[adapter.tied_to or adapter.name], requires_grad=False)
            put_parameter(wrapper, adapter.name.removeprefix(f"{path}."), factor)
        merge_wrapper(wrapper)
        return {base: parameter_at(wrapper, self._inside(base, path)).detach() for base in bases}

    def _inside(self, base: str, path: str) -> str:
        """Return the name of a weight inside its module; of a tied one, the name that is in this module."""
        names = [p.name for p in self._plan.parameters if base in (p.name, p.tied_to)]
        return next(name for name in names if name.startswith(f"{path}.")).removeprefix(f"{path}.")

    def keys(self) -> dict[str, str]:
        """Map names of the adapters' parameters to their keys in PEFT's files."""
        found = stored_names(self._adapters.whole, self._adapters.name, self._plan, False)
        return {name: key for name, key in found.items() if name in self.factors}
