"""What ``_compat/liger.py`` relies on of Liger Kernel."""

import sys
from typing import Any

import pytest

from .relied_on import relying

pytestmark = pytest.mark.liger
relies_on = relying("liger.py")


@relies_on("liger_kernel.transformers.monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN")
def test_a_models_modules_get_kernels(config: Any) -> None:
    """A family's function, given a ``model``, gives its modules a ``forward`` of their own, and their ``repr`` the
    kernel's name in place of the class's; a norm may have ``in_place``.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    from transformers import LlamaForCausalLM
    from transformers.models.llama import modeling_llama

    stock = dict(vars(modeling_llama))
    model = LlamaForCausalLM(config)
    try:
        MODEL_TYPE_TO_APPLY_LIGER_FN["llama"](
            model=model, cross_entropy=False, fused_linear_cross_entropy=False
        )
    finally:
        vars(modeling_llama).update(stock)
    mlp = model.model.layers[0].mlp
    assert "forward" in vars(mlp)
    assert "SwiGLU" in repr(mlp).partition("(")[0]
    assert repr(model).startswith(type(model).__name__)
    assert "in_place" in vars(model.model.norm)
    assert ".modeling_" in next(name for name in sys.modules if name.endswith("modeling_llama"))


@relies_on("liger_kernel.transformers.monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN")
def test_families_have_functions_with_switches() -> None:
    """``MODEL_TYPE_TO_APPLY_LIGER_FN`` maps a family to a function with a switch for each kernel and a ``model``."""
    import inspect

    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    switches = inspect.signature(MODEL_TYPE_TO_APPLY_LIGER_FN["llama"]).parameters
    assert {"model", "cross_entropy", "fused_linear_cross_entropy", "rms_norm"} <= switches.keys()


@relies_on("liger_kernel.ops.utils.torch_to_triton_dtype")
def test_types_with_kernels_are_listed() -> None:
    """``torch_to_triton_dtype`` has the types for which kernels have backward passes."""
    import torch
    from liger_kernel.ops.utils import torch_to_triton_dtype

    assert {torch.float32, torch.float16, torch.bfloat16} <= torch_to_triton_dtype.keys()
