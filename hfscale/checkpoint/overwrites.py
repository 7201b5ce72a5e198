"""Apply the writes of transformers' initialization to parameters that were already loaded.

After loading, transformers initializes every module. Loaded parameters are marked, and transformers' own functions skip
them. But model code that writes through ``.data`` or a slice ignores the mark and, for example, zeroes a row of a
loaded embedding (youtu, funnel). Stock models contain the result; on a shard, the same code would overwrite other
entries.

So initialization runs over placeholders that have the full shapes and no memory, and writes to them are dropped.
Buffers are real and get the values of stock models. If initialization tries to write into a loaded parameter, a full
model is initialized twice more with that parameter in real memory, and the written entries are copied to the shards.
"""

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.torch import TorchDispatchMode, schema_of, storage_key, written_by
from .._compat.transformers.loading import initializations, is_loaded, mark_loaded
from ..errors import CheckpointError
from ..plan import ParameterPlan
from ..train.runtime.parameter_names import put_buffer, put_parameter

# A parameter is filled with each of these values in turn; entries that are equal after both runs were overwritten.
_FILLS = (0.5, -3.25)
_SEED = 0  # seed of random values that initialization writes into loaded parameters


@dataclass(frozen=True)
class Overwrite:
    """Hold the entries of a loaded parameter that initialization overwrites: a mask (``where``) and the new values,
    both in the shape of the full parameter.
    """

    where: Tensor
    values: Tensor

    def apply(self, share: Tensor, planned: ParameterPlan, ranks: dict[str, int]) -> None:
        """Write the new values into ``share``, this rank's shard of the parameter. ``ranks`` are this rank's
        coordinates in the mesh.
        """
        here = planned.take(self.where, ranks).to(share.device)
        share[here] = planned.take(self.values, ranks).to(share)[here]


class _StandIns(TorchDispatchMode):
    """Replace parameters by placeholders of full ``shapes`` that drop all writes. The parameters named in ``real`` get
    memory instead, filled with ``fill``.
    """

    def __init__(
        self,
        model: Any,
        shapes: dict[str, tuple[int, ...]],
        real: Collection[str] = (),
        fill: float = 0.0,
    ) -> None:
        super().__init__()
        self.model = model
        self.own = dict(model.named_parameters(remove_duplicate=False))
        self.tensors: dict[str, nn.Parameter] = {}  # the placeholder of each parameter, by name
        self._names: dict[int, str] = {}
        self._kept: list[
            Tensor
        ] = []  # keeps storages alive, because _names uses their addresses as keys
        self._written: set[str] = set()
        for name, parameter in self.own.items():
            if name in real:
                wide = torch.promote_types(parameter.dtype, torch.float32)
                filled = nn.Parameter(
                    torch.full(parameter.shape, fill, dtype=wide), requires_grad=False
                )
                mark_loaded(filled)
                put_parameter(model, name, filled)
            else:
                self._stand_in(name, parameter, shapes.get(name, tuple(parameter.shape)))

    def initialize(self) -> set[str]:
        """Initialize all modules; return the names of loaded parameters that would have been overwritten or
        replaced.
        """
        self._written = set()
        for name, module, initialize in initializations(self.model):
            with self:
                initialize()
            for key, parameter in module.named_parameters(prefix=name, remove_duplicate=False):
                expected = self.tensors.get(key)
                if expected is not None and (
                    parameter is not expected or storage_key(parameter) not in self._names
                ):
                    self._written.add(key)
                    self._stand_in(key, expected, tuple(expected.shape))
        return {name for name in self._written if is_loaded(self.tensors[name])}

    def put_back(self) -> None:
        for name, parameter in self.own.items():
            # Initialization may freeze some parameters.
            parameter.requires_grad_(self.model.get_parameter(name).requires_grad)
            put_parameter(self.model, name, parameter)

    def _stand_in(self, name: str, parameter: Tensor, shape: tuple[int, ...]) -> None:
        one = torch.zeros(
            (), dtype=parameter.dtype, device="cpu" if parameter.is_meta else parameter.device
        )
        self.tensors[name] = made = nn.Parameter(
            one.expand(shape), requires_grad=parameter.requires_grad
        )
        if is_loaded(parameter):
            mark_loaded(made)
        self._names[storage_key(made)] = name
        self._kept.append(made)
        put_parameter(self.model, name, made)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        targets = written_by(func, args, kwargs)
        written = {
            self._names[key] for target in targets if (key := storage_key(target)) in self._names
        }
        if not written:
            return func(*args, **kwargs)
        self._written |= written
        returned = len(schema_of(func).returns)
        return None if returned == 0 else targets[0] if returned == 1 else tuple(targets[:returned])


def initialize_around(model: Any, shapes: dict[str, tuple[int, ...]]) -> set[str]:
    """Run transformers' initialization without changing parameters; return the names of
    loaded parameters that it would overwrite.
    """
    stand_ins = _StandIns(model, shapes)
    try:
        return stand_ins.initialize()
    finally:
        stand_ins.put_back()


def find_overwrites(model: Any, loaded: Collection[str]) -> dict[str, Overwrite]:
    """Return the entries that transformers' initialization overwrites in ``loaded`` parameters of a full meta model."""
    # Tied parameters get their owner's values at the end.
    written = _initialized(model, loaded, lambda stand_ins: stand_ins.initialize())
    names = sorted(name for name in written if model.all_tied_weights_keys.get(name) not in loaded)
    if not names:
        return {}

    def left(stand_ins: _StandIns) -> list[Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(_SEED)
            stand_ins.initialize()
        return [stand_ins.model.get_parameter(name).detach() for name in names]

    every = [_initialized(model, loaded, left, names, fill) for fill in _FILLS]
    result = {}
    for name, first, second in zip(names, *every, strict=True):
        equal = first == second
        if not bool((equal | (first == _FILLS[0]) & (second == _FILLS[1])).all()):
            raise CheckpointError(
                f"{type(model).__name__}._init_weights computes new values of {name} from the loaded ones, but each "
                "rank has only a shard of them: make _init_weights skip loaded parameters (marked _is_hf_initialized)"
            )
        result[name] = Overwrite(equal, first)
    return result


def _initialized(
    model: Any,
    loaded: Collection[str],
    run: Callable[[_StandIns], Any],
    real: Collection[str] = (),
    fill: float = 0.0,
) -> Any:
    """Return ``run(stand_ins)``, where ``stand_ins`` replace the parameters of a copy of ``model`` by placeholders
    without memory, except those named in ``real``. The copy's tensors named in ``loaded`` are marked as loaded.
    """
    model = copy.deepcopy(model)
    for name, buffer in list(model.named_buffers()):
        put_buffer(model, name, torch.zeros_like(buffer, device="cpu"))
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        if name in loaded:
            mark_loaded(tensor)
    return run(_StandIns(model, {}, real, fill))
