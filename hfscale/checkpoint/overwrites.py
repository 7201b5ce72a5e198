"""Apply the writes of transformers' initialization to parameters that were already loaded.

After loading, transformers initializes every module. Loaded parameters are marked, and its own functions skip them; but
model code that writes through ``.data`` or a slice ignores the mark, and zeroes a row of a loaded embedding, say. Stock
models contain the result; over a shard, the same code would hit other entries.

So initialization runs over placeholders of the full shapes, without memory, whose writes are dropped; buffers are real,
and become what they are in stock models. If it tries to write into a loaded parameter, that module of a full model is
initialized again, with real memory, and the written entries are copied to the shards: the same way for every layout.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.torch import TorchDispatchMode, schema_of, storage_key
from .._compat.transformers.initialization import forget_loaded, initializations, is_loaded, mark_loaded
from ..errors import CheckpointError
from ..plan import ParameterPlan
from ..train.runtime.parameter_names import put_buffer, put_parameter

# A parameter is filled with each of these in turn: entries that are equal afterwards were written.
_FILLS = (0.5, -3.25)
_SEED = 0  # of random values that are written into loaded parameters


@dataclass(frozen=True)
class Overwrite:
    """The entries of a full parameter that initialization overwrites, and their values.

    Attributes:
        places: indices into the flattened parameter.
        values: one for each index.
    """

    places: Tensor
    values: Tensor

    def apply(self, share: Tensor, planned: ParameterPlan, ranks: dict[str, int]) -> None:
        """Write the entries that belong to the shard of the rank at ``ranks`` into ``share``."""
        where = torch.zeros(planned.shape, dtype=torch.bool)
        where.view(-1)[self.places] = True
        found = torch.zeros(planned.shape, dtype=share.dtype)
        found.view(-1)[self.places] = self.values.to(share.dtype)
        here = planned.take(where, ranks).to(share.device)
        share[here] = planned.take(found, ranks).to(share.device)[here]


class _StandIns(TorchDispatchMode):
    """A dispatch mode that puts placeholders without memory in place of a model's parameters.

    While a module is initialized, operations that would write into placeholders, or views of them, are skipped.

    Attributes:
        tensors: the placeholder of each parameter, by name.
    """

    def __init__(self, model: Any, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.model = model
        self.own = dict(model.named_parameters(remove_duplicate=False))
        self.tensors: dict[str, nn.Parameter] = {}
        self._names: dict[int, str] = {}
        self._kept: list[Tensor] = []  # keeps storages alive, since _names goes by their address
        self._written: set[str] = set()
        for name, parameter in self.own.items():
            self._stand_in(name, parameter, shapes.get(name, tuple(parameter.shape)))

    def initialize(self, name: str, module: nn.Module, initialize: Callable[[], None]) -> set[str]:
        """Initialize a module; return the names of parameters that would have been written into, or were replaced."""
        self._written = set()
        with self:
            initialize()
        for key, parameter in module.named_parameters(prefix=name, remove_duplicate=False):
            expected = self.tensors.get(key)
            if expected is not None and (parameter is not expected or storage_key(parameter) not in self._names):
                self._written.add(key)
                self._stand_in(key, expected, tuple(expected.shape))
        return self._written

    @contextmanager
    def without(self, name: str, other: nn.Parameter) -> Iterator[None]:
        """Put a real, writable parameter in place of a placeholder inside the `with` block."""
        stand_in = self.tensors.pop(name)
        put_parameter(self.model, name, other)
        try:
            yield
        finally:
            self.tensors[name] = stand_in
            put_parameter(self.model, name, stand_in)

    def put_back(self) -> None:
        """Put the model's own parameters back."""
        for name, parameter in self.own.items():
            parameter.requires_grad_(self.model.get_parameter(name).requires_grad)  # initialization may freeze some
            put_parameter(self.model, name, parameter)

    def _stand_in(self, name: str, parameter: Tensor, shape: tuple[int, ...]) -> None:
        one = torch.zeros((), dtype=parameter.dtype, device="cpu" if parameter.is_meta else parameter.device)
        self.tensors[name] = made = nn.Parameter(one.expand(shape), requires_grad=parameter.requires_grad)
        if is_loaded(parameter):
            mark_loaded(made)
        self._names[storage_key(made)] = name
        self._kept.append(made)
        put_parameter(self.model, name, made)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not schema_of(func).is_mutable:
            return func(*args, **kwargs)
        targets: list[Tensor] = []
        for index, argument in enumerate(schema_of(func).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                targets += value if isinstance(value, list | tuple) else [value] if value is not None else []
        found = {self._names[key] for target in targets if (key := storage_key(target)) in self._names}
        if not found:
            return func(*args, **kwargs)
        self._written |= found
        returned = len(schema_of(func).returns)
        return None if returned == 0 else targets[0] if returned == 1 else tuple(targets[:returned])


def initialize_around(model: Any, shapes: dict[str, tuple[int, ...]]) -> set[str]:
    """Run transformers' initialization of a ``model`` without letting it see or change the parameters.

    Args:
        model: a meta model whose loaded parameters and buffers have been put in and marked.
        shapes: of full parameters.

    Returns:
        names of loaded parameters that it would have written into.
    """
    stand_ins = _StandIns(model, shapes)
    try:
        written = [stand_ins.initialize(*each) for each in initializations(model)]
    finally:
        stand_ins.put_back()
    return {name for names in written for name in names if is_loaded(stand_ins.tensors[name])}


def find_overwrites(model: Any, loaded: Collection[str]) -> dict[str, Overwrite]:
    """Return the entries that transformers' initialization overwrites in loaded parameters.

    Args:
        model: a full model on the meta device, used up by this call.
        loaded: the names of loaded parameters and buffers.

    Raises:
        CheckpointError: the written values depend on the loaded ones.
    """
    for name, buffer in list(model.named_buffers()):
        put_buffer(model, name, torch.zeros_like(buffer, device="cpu"))
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        if name in loaded:
            mark_loaded(tensor)
    result: dict[str, Overwrite] = {}
    stand_ins = _StandIns(model, {})
    for name, module, initialize in initializations(model):
        for parameter in stand_ins.initialize(name, module, initialize):
            # Tied parameters get their owner's values in the end.
            if parameter in loaded and model.all_tied_weights_keys.get(parameter) not in loaded:
                last = _left_by(name, module, initialize, parameter, stand_ins)
                result[parameter] = _merged(result.get(parameter), last)
    return result


def _left_by(
    name: str, module: nn.Module, initialize: Callable[[], None], parameter: str, stand_ins: _StandIns
) -> Overwrite:
    """Return the entries of the loaded ``parameter`` that initializing ``module`` overwrites."""
    like = stand_ins.tensors[parameter]
    left = []
    for fill in _FILLS:
        real = nn.Parameter(torch.full(like.shape, fill, dtype=torch.promote_types(like.dtype, torch.float32)), False)
        mark_loaded(real)
        forget_loaded(module)
        with stand_ins.without(parameter, real), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(_SEED)
            stand_ins.initialize(name, module, initialize)
            left.append(stand_ins.model.get_parameter(parameter).detach().flatten())
    first, second = left
    written = first == second
    if not bool((written | (first == _FILLS[0]) & (second == _FILLS[1])).all()):
        raise CheckpointError(
            f"{type(module).__name__}._init_weights computes new values of {parameter} from the loaded ones, "
            "of which a rank has only a shard: make it skip loaded parameters (marked _is_hf_initialized)"
        )
    places = written.nonzero().flatten()
    return Overwrite(places, first[places].clone())


def _merged(before: Overwrite | None, last: Overwrite) -> Overwrite:
    if before is None:
        return last
    still = ~torch.isin(before.places, last.places)
    return Overwrite(torch.cat([before.places[still], last.places]), torch.cat([before.values[still], last.values]))
