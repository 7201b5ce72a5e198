"""How modules get Liger's kernels, with a package in its place that changes a model as Liger does: no Triton needed."""

import sys
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

import hfscale
from hfscale import ConfigError
from hfscale.features.precision import liger_kernels as liger
from hfscale.train.runtime import runtime_of

from ...mixtures import qwen3_moe
from ...tiny_models import tiny

IDS = torch.arange(24).view(2, 12)
calls: list[str] = []


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    calls.append("rope")
    return STOCK_ROTATE(q, k, cos, sin)


STOCK_ROTATE = modeling_llama.apply_rotary_pos_emb


def norm_forward(self: Any, x: Tensor) -> Tensor:
    calls.append("norm")
    return nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.variance_epsilon)


def mlp_forward(self: Any, x: Tensor) -> Tensor:
    calls.append("mlp")
    return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def apply_to_llama(
    model: Any,
    rope: bool = True,
    swiglu: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
) -> None:
    assert not cross_entropy
    assert not fused_linear_cross_entropy
    modeling_llama.LlamaRMSNorm = nn.RMSNorm
    if rope:
        modeling_llama.apply_rotary_pos_emb = rotate
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.in_place = True
            module.forward = MethodType(norm_forward, module)
        elif type(module).__name__ == "LlamaMLP" and swiglu:
            module.forward = MethodType(mlp_forward, module)
            module._get_name = MethodType(lambda self: "LigerSwiGLUMLP", module)
        elif type(module).__name__ == "Qwen3MoeExperts":
            module.forward = MethodType(mlp_forward, module)


KINDS = {"llama": apply_to_llama, "qwen3_moe": apply_to_llama, "qwen3": lambda **_: None}


def apply(model: Any, **switches: bool) -> None:
    KINDS[model.config.model_type](model=model, **switches)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that hfscale asks Liger for."""
    names: dict[str, dict[str, Any]] = {
        "liger_kernel": {},
        "liger_kernel.ops": {},
        "liger_kernel.ops.utils": {"torch_to_triton_dtype": {torch.float32: None}},
        "liger_kernel.transformers": {"_apply_liger_kernel_to_instance": apply},
        "liger_kernel.transformers.monkey_patch": {"MODEL_TYPE_TO_APPLY_LIGER_FN": KINDS},
    }
    for name, attributes in names.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(liger, "is_installed", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    calls.clear()


def step(config: Any, **given: Any) -> tuple[Any, Tensor]:
    model = hfscale.from_config(config, dtype=torch.float32, **given).train()
    return model, hfscale.train_step(model, {"input_ids": IDS, "labels": IDS})


def test_modules_of_this_model_get_them_and_nothing_else(package: None) -> None:
    config = tiny("llama")
    stock_norm = modeling_llama.LlamaRMSNorm
    expected = step(config)[1]
    assert calls == []
    model, loss = step(config, use_liger_kernel=True)
    assert sorted(calls) == ["mlp"] * 2 + ["norm"] * 5 + ["rope"] * 2
    torch.testing.assert_close(loss, expected)
    assert modeling_llama.apply_rotary_pos_emb is STOCK_ROTATE
    assert modeling_llama.LlamaRMSNorm is stock_norm
    # A split backward pass looks at the gradient of a norm's output again.
    assert model.model.norm.in_place is False
    calls.clear()
    step(config, use_liger_kernel={"rope": False, "swiglu": False})
    assert set(calls) == {"norm"}


def test_experts_stay_as_they_are(package: None) -> None:
    model, _ = step(qwen3_moe(), use_liger_kernel=True)
    assert "mlp" not in calls
    assert "norm" in calls
    assert "forward" not in vars(runtime_of(model).model.model.layers[0].mlp.experts)


@pytest.mark.parametrize(
    ("family", "given", "advice"),
    [
        (
            "llama",
            {"use_liger_kernel": {"swish": True}},
            "swish is none of Liger's kernels for llama: use rope, swiglu",
        ),
        (
            "llama",
            {"use_liger_kernel": {"fused_linear_cross_entropy": True}},
            "leave this entry out; hfscale computes head and loss in chunks",
        ),
        ("llama", {"use_liger_kernel": "yes"}, "must be True, False or a dict like"),
        ("gpt2", {"use_liger_kernel": True}, "no kernels for gpt2: leave use_liger_kernel out"),
        ("qwen3", {"use_liger_kernel": True}, "Liger replaces only the loss"),
        ("llama", {"use_liger_kernel": True, "dtype": torch.float64}, "dtype=torch.float32"),
    ],
)
def test_refusals(package: None, family: str, given: dict[str, Any], advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        hfscale.from_config(tiny(family), **given)


def test_another_activation_than_the_kernels(package: None) -> None:
    """Liger's own function computes silu there, whatever the config says."""
    config = tiny("llama", hidden_act="gelu")
    with pytest.raises(ConfigError, match=r"applies silu.*={'swiglu': False}"):
        hfscale.from_config(config, use_liger_kernel=True)
    step(config, use_liger_kernel={"swiglu": False})
    assert "mlp" not in calls


@pytest.mark.parametrize(
    ("installed", "advice"),
    [(False, "pip install liger-kernel"), (True, r"needs a GPU.*TRITON_INTERPRET=1")],
)
def test_a_machine_without_them(
    monkeypatch: pytest.MonkeyPatch, installed: bool, advice: str
) -> None:
    monkeypatch.setattr(liger, "is_installed", lambda: installed)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=advice):
        hfscale.from_config(tiny("llama"), use_liger_kernel=True)
