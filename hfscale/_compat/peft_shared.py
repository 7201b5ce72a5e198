"""Private names of PEFT: frozen values with which adapters compute, and parameters that all wrappers of a model share.

In VeRA (Kopiczko et al. 2023), PVeRA and RandLoRA, all modules share a pair of matrices. In UniLoRA, all modules share
a vector, and tables tell which of its entries form the factors of a module. PEFT creates these values from the shapes
of all modules that it wraps.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from .replaced import attribute_replaced
from .torch import own_buffers, own_parameters

# Methods for which PEFT draws random matrices, large enough for the largest wrapped module.
_OF_LARGEST = ("VERA", "PVERA", "RANDLORA")
_WITH_TABLES = "UNILORA"
_FIXED = (
    "vera_A",
    "vera_B",
    "pvera_A",
    "pvera_B",
    "randlora_A",
    "randlora_B",
    "unilora_indices_A",
    "unilora_indices_B",
    "unilora_scales_A",
    "unilora_scales_B",
)


@contextmanager
def fixed_values_stay(config: Any) -> Iterator[None]:
    """Let PEFT draw adapters' frozen values (such as VeRA's shared matrices) in real memory, even for modules on the
    meta device, and also on a pipeline stage where no module is wrapped.
    """
    from peft.tuners._buffer_dict import BufferDict

    method = getattr(config.peft_type, "value", config.peft_type)
    if method not in (*_OF_LARGEST, _WITH_TABLES):
        yield
        return
    set_item = BufferDict.__setitem__

    def keep(held: Any, key: str, value: Tensor) -> None:
        before = own_buffers(held).get(key)
        if value.is_meta and before is not None and not before.is_meta:
            value = before.to(value.dtype)
        set_item(held, key, value)

    with (
        attribute_replaced(BufferDict, "__setitem__", keep),
        # PEFT also calls ``to`` of holders whose name contains the method's prefix.
        attribute_replaced(BufferDict, "to", lambda held, *_: held),
        _scales_stay() if method == _WITH_TABLES else _sizes_of_none(config),
    ):
        yield


@contextmanager
def _scales_stay() -> Iterator[None]:
    from peft.tuners.unilora.layer import UniLoraLayer

    update = UniLoraLayer.update_scaling

    def keep(layer: Any, name: str, of_a: Tensor, of_b: Tensor) -> None:
        update(layer, name, of_a, of_b)
        for held, scales in ((layer.unilora_scales_A, of_a), (layer.unilora_scales_B, of_b)):
            if held[name].is_meta:
                held[name] = scales.to(held[name].dtype)

    with attribute_replaced(UniLoraLayer, "update_scaling", keep):
        yield


@contextmanager
def _sizes_of_none(config: Any) -> Iterator[None]:
    """Let a pipeline stage on which no module is adapted draw the matrices that modules share for one input and one
    output feature, since the stage has no adapted module to take sizes from.
    """
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
    from peft.utils.constants import DUMMY_TARGET_MODULES

    if config.target_modules != DUMMY_TARGET_MODULES:
        yield
        return
    tuner = PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type]
    with attribute_replaced(tuner, "_find_dim", lambda *_: (1, 1)):
        yield


def fixed_values(peft_model: Any, name: str) -> dict[str, Any]:
    """Return the containers (PEFT's ``BufferDict``) that hold frozen values of the adapter ``name``, by their paths in
    PEFT's model; a shared container appears under each of its paths.
    """
    return {
        path: module
        for path, module in peft_model.named_modules(remove_duplicate=False)
        if path.rpartition(".")[2] in _FIXED and name in module
    }


def is_stored(holder: Any) -> bool:
    """Return whether the frozen values in a container are in a state dict, and hence in an adapter's file."""
    return bool(holder.persistent)


def shared_parameters(peft_model: Any) -> dict[str, nn.Parameter]:
    """Return the parameters that all wrappers share, by the names that they have in a state dict in addition to the
    names in the wrappers.
    """
    found: dict[str, nn.Parameter] = {}
    for path, module in peft_model.base_model.named_children():
        if isinstance(module, nn.ParameterDict):
            for key, parameter in own_parameters(module).items():
                if parameter is not None:
                    found[f"base_model.{path}.{key}"] = parameter
    return found


def sample_through(
    wrapper: Any, sample: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
) -> None:
    """Let a PVeRA wrapper sample its random vectors by ``sample(draw, mean)``, where ``draw(mean)`` is PEFT's own draw
    from a normal distribution with this mean. Other wrappers are left unchanged.
    """
    if not hasattr(wrapper, "_reparametrize"):
        return
    stock = wrapper._reparametrize

    def drawn(mean: Tensor, log_variance: Tensor, name: str) -> Tensor:
        return sample(lambda x: stock(x, log_variance, name), mean)

    wrapper._reparametrize = drawn
