"""What ``_compat/peft.py`` relies on of PEFT's wrappers and of what it saves."""

from typing import Any

import pytest
import torch
from torch import nn

from .relied_on import relying

WRAPPER = "peft.tuners.tuners_utils.BaseTunerLayer"
relies_on = relying("peft.py")


@pytest.fixture
def model() -> Any:
    """A projection and an embedding with factors of LoRA that are not zero."""
    from peft import LoraConfig, get_peft_model

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lookup = nn.Embedding(3, 4)
            self.project = nn.Linear(4, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.project(self.lookup(ids))

    config = LoraConfig(r=2, target_modules=["lookup", "project"], init_lora_weights=False)
    return get_peft_model(Model(), config).base_model.model


@relies_on(f"{WRAPPER}._disable_adapters")
def test_a_wrapper_computes_what_it_wraps(model: Any) -> None:
    """With ``_disable_adapters`` a wrapper computes its base layer's output."""
    x = torch.randn(2, 4)
    plain = model.project.base_layer(x)
    assert not torch.equal(model.project(x), plain)
    model.project._disable_adapters = True
    assert torch.equal(model.project(x), plain)


@relies_on(f"{WRAPPER}._cast_input_dtype")
def test_a_wrapper_casts_its_input_by_one_method(model: Any) -> None:
    """A wrapper's forward pass calls the instance's ``_cast_input_dtype(x, dtype)``, and computes with its result,
    which is ``x`` itself where nothing is cast.
    """
    seen = []
    stock = model.project._cast_input_dtype

    def cast(x: Any, dtype: Any) -> Any:
        seen.append((x, stock(x, dtype)))
        return seen[-1][1]

    model.project._cast_input_dtype = cast
    x = torch.randn(2, 4)
    model.project(x)
    ((given, made),) = seen
    assert given is made is x
    assert stock(x, torch.float64).dtype == torch.float64


@relies_on("peft.tuners.lora.layer.Embedding._embed")
def test_an_embeddings_wrapper_looks_up_by_one_method(model: Any) -> None:
    """The wrapper of an embedding calls the instance's ``_embed(ids, weight, ...)`` for its first factor; others have
    none.
    """
    seen = []
    assert not hasattr(model.project, "_embed")
    stock = model.lookup._embed

    def look_up(ids: Any, weight: Any, *rest: Any, **more: Any) -> Any:
        seen.append(weight.shape)
        return stock(ids, weight, *rest, **more)

    model.lookup._embed = look_up
    model.lookup(torch.tensor([0, 2]))
    assert seen == [(3, 2)]


@relying("peft.py", "lasting.py")("peft.utils.save_and_load._get_tp_info")
def test_state_dicts_of_adapters_ask_the_model_first(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``get_peft_model_state_dict`` calls ``_get_tp_info(model)`` of its file, however it was imported."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from peft.utils import save_and_load

    seen = []
    stock = save_and_load._get_tp_info

    def asked(given: Any) -> Any:
        seen.append(given)
        return stock(given)

    monkeypatch.setattr(save_and_load, "_get_tp_info", asked)
    adapted = get_peft_model(nn.Sequential(nn.Linear(2, 2)), LoraConfig(target_modules=["0"]))
    assert len(get_peft_model_state_dict(adapted)) == 2
    assert seen == [adapted]


@pytest.mark.parametrize("told", [["down"], "mlp.down", "down"])
@relies_on("peft.IA3Config:feedforward_modules")
def test_ia3_scales_inputs_by_ends_of_names_or_a_whole_pattern(told: Any) -> None:
    """``feedforward_modules`` are ends of names, or one pattern of a whole name: those modules' input is scaled."""
    from peft import IA3Config, get_peft_model

    model = nn.ModuleDict({"mlp": nn.ModuleDict({"up": nn.Linear(2, 3), "down": nn.Linear(2, 3)})})
    targets = r"mlp\.(up|down)|down"
    config = IA3Config(target_modules=targets, feedforward_modules=told)
    assert config.feedforward_modules == (set(told) if isinstance(told, list) else told)
    mlp = get_peft_model(model, config).base_model.model["mlp"]
    assert mlp["down"].is_feedforward == (told != "down")  # which is not the whole of mlp.down
    assert not mlp["up"].is_feedforward
