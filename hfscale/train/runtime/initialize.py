"""Initialize weights at random such that they do not depend on the layout.

The model's own code initializes one unit at a time (a decoder layer, the embedding, ...), full and on the CPU, with a
seed that is derived from the run's seed and the unit's name. Every rank keeps its shard and drops the rest. No rank
ever holds more than one full unit.

Tensors that the model's ``_init_weights`` does not write should keep the values that their module's constructor sets,
but here the constructor ran on the meta device, which holds no values. So a unit is filled with a marker value before
its initialization. Entries that still have the marker afterwards are copied from a second model, in which the
constructors of such modules ran with real memory, for all layers at once. Of 176 causal-LM families, only four have
such tensors (an activation's scalars, a head's bias, multipliers); only openai-gpt has large ones.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.transformers.loading import construct, initialize_weights
from ...distributed.files.reader import is_elsewhere
from ...distributed.mesh import Mesh
from ...errors import CheckpointError
from ...plan import Plan

_WHOLE_NUMBER = (
    113  # the marker of integer tensors, which no table of positions contains everywhere
)


def initialize_local_weights(
    template: Any,
    plan: Plan,
    mesh: Mesh,
    seed: int,
    wanted: Callable[[str], bool] = lambda name: True,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Initialize a model's weights at random. Return this rank's shards of the parameters for which ``wanted`` returns
    true, by name (a tied one under its first name), and the full buffers.

    ``template`` is the full stock model on the meta device; one of its modules at a time gets memory, and is emptied
    again.
    """
    rank = mesh.pp_rank
    held = plan.local_names(rank)
    shares: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    constructors = _Constructors(template, seed)
    for name, unit, recurse in _units(template, "", set(plan.layers)):
        prefix = f"{name}." if name else ""
        parameters = [prefix + key for key, _ in unit.named_parameters(recurse=recurse)]
        names = [
            key
            for key in parameters
            if plan.by_name[key].tied_to is None and key in held and wanted(key)
        ]
        every_buffer = [prefix + key for key, _ in unit.named_buffers(recurse=recurse)]
        buffer_names = [key for key in every_buffer if not is_elsewhere(plan, rank, key)]
        if not names and not buffer_names:
            continue
        unit.to_empty(device="cpu", recurse=recurse)
        _fill_with_marker(template.get_parameter(key) for key in names)
        _fill_with_marker(template.get_buffer(key) for key in buffer_names)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed_of(seed, name))
            initialize_weights(template, unit, recurse)
        constructors.fill([*names, *buffer_names])
        for key in names:
            whole = template.get_parameter(key).detach()
            shares[key] = plan.by_name[key].take(whole, mesh.ranks).to(mesh.device, copy=True)
        for key in buffer_names:
            buffers[key] = template.get_buffer(key).to(mesh.device)
        unit.to_empty(device="meta", recurse=recurse)
    return shares, buffers


def _fill_with_marker(tensors: Iterable[Tensor]) -> None:
    """Fill tensors before their initialization with a value that no initialization writes (NaN, or 113 in integer
    tensors), to find the entries that are not initialized.
    """
    for tensor in tensors:
        if tensor.dtype != torch.bool:
            tensor.detach().fill_(torch.nan if tensor.is_floating_point() else _WHOLE_NUMBER)


def _untouched(tensor: Tensor) -> Tensor:
    """Return a mask of the entries that initialization has not written, since they still have the value of
    :func:`_fill_with_marker`. In integer tensors, either all entries count as not written or none.
    """
    if tensor.is_floating_point():
        return tensor.isnan()
    alike = tensor.dtype != torch.bool and bool((tensor == _WHOLE_NUMBER).all())
    return torch.full_like(tensor, alike, dtype=torch.bool)


class _Constructors:
    """Set the entries of tensors that the model's ``_init_weights`` has not written to the values that modules'
    constructors set.
    """

    def __init__(self, template: Any, seed: int) -> None:
        self._template = template
        self._seed = seed
        self._kinds: set[type[nn.Module]] = set()
        self._made: Any = None

    def fill(self, names: list[str]) -> None:
        """Set the entries of parameters and buffers ``names`` that initialization has not written to the values that
        modules' constructors set. Raise :class:`CheckpointError` if constructors set none.
        """
        template = self._template
        tensors = {name: _tensor_at(template, name) for name in names}
        left = {
            name: where for name, tensor in tensors.items() if (where := _untouched(tensor)).any()
        }
        kinds = {type(template.get_submodule(name.rpartition(".")[0])) for name in left}
        if not kinds <= self._kinds:
            self._kinds |= kinds
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(self._seed)
                self._made = construct(template, self._kinds)
        for name, where in left.items():
            tensors[name].copy_(
                torch.where(
                    where,
                    _tensor_at(self._made, name),
                    tensors[name],
                )
            )
            if _untouched(tensors[name]).any():
                raise CheckpointError(
                    f"{type(template).__name__} sets no initial value for {name}, neither in its constructor nor in "
                    "its _init_weights: load a checkpoint, or use hfscale.parallelize on a model that has its values"
                )


def _tensor_at(model: Any, name: str) -> Tensor:
    owner, _, attribute = name.rpartition(".")
    return getattr(model.get_submodule(owner), attribute).detach()


def _units(
    module: nn.Module,
    name: str,
    layers: set[str],
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield the modules that are initialized one after another, as ``(name, module, recurse)``. With ``recurse``, the
    module is initialized with all its submodules: a layer, or a module that contains no layers. Without, only its own
    tensors are, because it contains layers.
    """
    inside = {child for child, _ in module.named_modules(prefix=name)}
    if name in layers or not inside & layers:
        yield name, module, True
        return
    yield name, module, False
    for child, submodule in module.named_children():
        yield from _units(submodule, f"{name}.{child}" if name else child, layers)


def seed_of(seed: int, name: str) -> int:
    """Return the seed for initializing the module ``name``, derived from the run's ``seed`` and the name."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
