"""Stock names are found through any adapter's wrappers, and what is put at a name is where stock code looks for it."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hfscale.train.runtime.parameter_names import (
    computing,
    module_at,
    owner_of,
    parameter_at,
    put_buffer,
    put_parameter,
    stock_name,
    unwrapped,
)


class Block(nn.Module):
    """A column, a row, and a gate that adapters train whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)) * self.gate(x).sum()


def wrapped_model() -> tuple[nn.Module, nn.Module]:
    """A model of two blocks, and the same one as PEFT has changed it."""
    torch.manual_seed(0)
    stock = nn.ModuleDict({"layers": nn.ModuleList([Block(), Block()])})
    adapted = get_peft_model(
        stock, LoraConfig(r=2, target_modules=["up"], modules_to_save=["gate"])
    )
    return adapted.get_base_model(), adapted


@pytest.mark.parametrize(
    ("wrapped", "stock"),
    [
        ("layers.0.up.base_layer.weight", "layers.0.up.weight"),
        ("layers.0.up.base_layer.base_layer.bias", "layers.0.up.bias"),
        ("layers.1.gate.original_module.weight", "layers.1.gate.weight"),
        ("layers.1.down.weight", "layers.1.down.weight"),
        ("base_layers.weight", "base_layers.weight"),  # a part of a word is none
    ],
)
def test_stock_names(wrapped: str, stock: str) -> None:
    assert stock_name(wrapped) == stock


def test_modules_and_parameters_are_found_by_both_names() -> None:
    model, _ = wrapped_model()
    wrapper = model.get_submodule("layers.0.up")
    assert module_at(model, "layers.0.up") is wrapper
    assert not isinstance(wrapper, nn.Linear)
    assert module_at(model, "") is model
    assert unwrapped(wrapper) is wrapper.base_layer
    assert unwrapped(model) is model
    weight = wrapper.base_layer.weight
    assert (
        parameter_at(model, "layers.0.up.weight")
        is parameter_at(model, "layers.0.up.base_layer.weight")
        is weight
    )
    assert owner_of(model, "layers.0.up.weight") == (wrapper.base_layer, "weight")
    factor = "layers.0.up.lora_A.default.weight"
    assert parameter_at(model, factor) is model.get_parameter(factor)
    with pytest.raises(AttributeError, match="missing"):
        module_at(model, "layers.0.missing")


def test_a_wrapper_and_what_it_trains_a_copy_of_may_both_compute() -> None:
    model, _ = wrapped_model()
    gate = model.get_submodule("layers.0.gate")
    found = computing(gate)
    assert found[0] is gate.original_module
    assert found[1:] == [gate.modules_to_save["default"]]
    assert computing(model.get_submodule("layers.0.down")) == [model.get_submodule("layers.0.down")]


def test_what_is_put_keeps_its_place() -> None:
    model, adapted = wrapped_model()
    order = [name for name, _ in adapted.named_parameters()]
    new = nn.Parameter(torch.zeros(6, 4))
    put_parameter(model, "layers.0.up.weight", new)
    assert model.get_submodule("layers.0.up").base_layer.weight is new
    plain = torch.ones(4, 6)
    put_parameter(model, "layers.1.down.weight", plain)  # no parameter, for a while
    assert model.get_submodule("layers.1.down").weight is plain
    put_parameter(model, "layers.1.down.weight", nn.Parameter(plain))
    assert [name for name, _ in adapted.named_parameters()] == order
    put_buffer(model, "layers.1.scale", torch.full((1,), 3.0))
    assert dict(model.named_buffers())["layers.1.scale"].item() == 3
