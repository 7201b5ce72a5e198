"""What ``_compat/bitsandbytes.py`` relies on of parameters in 4 and 8 bits, and of an optimizer's options."""

from typing import Any

import torch

from .relied_on import relying

MODULES = "bitsandbytes.nn.modules"
relies_on = relying("bitsandbytes.py")


@relies_on(
    f"{MODULES}.Params4bit:quant_state",
    f"{MODULES}.Params4bit:bnb_quantized",
    f"{MODULES}.Params4bit:compress_statistics",
    f"{MODULES}.Linear4bit:quant_state",
    f"{MODULES}.Linear4bit:support_avx512bf16_for_cpu",
)
def test_a_weight_in_4_bits_has_a_state() -> None:
    """A ``Params4bit`` that was packed has ``bnb_quantized`` and a ``quant_state`` with ``absmax``, ``code``,
    ``offset`` and ``nested``, by which its module computes; ``support_avx512bf16_for_cpu`` of the module is a switch.
    """
    import bitsandbytes.functional
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(0)
    module: Any = Linear4bit(64, 4, bias=False, compress_statistics=False, quant_type="nf4")
    assert module.support_avx512bf16_for_cpu in (True, False)
    module.support_avx512bf16_for_cpu = False
    assert not module.weight.bnb_quantized
    module.to("cpu")
    packed = module.weight
    assert packed.bnb_quantized
    assert type(packed).__name__ == "Params4bit"
    assert not packed.is_floating_point()
    assert not packed.compress_statistics
    state = packed.quant_state
    assert state.absmax.shape == (4,)
    assert len(state.code) == 16
    assert not state.nested
    assert hasattr(state, "offset")
    full = bitsandbytes.functional.dequantize_4bit(packed.data, state)
    x = torch.randn(2, 64)
    torch.testing.assert_close(module(x), x @ full.T)
    again = Linear4bit(64, 4, bias=False, quant_type="nf4")
    again.weight = packed
    again.quant_state = state
    torch.testing.assert_close(again(x), x @ full.T)


@relies_on(
    f"{MODULES}.Int8Params:SCB",
    "bitsandbytes.MatmulLtState:CB",
    "bitsandbytes.MatmulLtState:threshold",
    "bitsandbytes.MatmulLtState:use_pool",
    "bitsandbytes.MatmulLtState:has_fp16_weights",
)
def test_a_weight_in_8_bits_has_scales_of_rows() -> None:
    """An ``Int8Params`` that was quantized has scales ``SCB``, one for a row; ``matmul`` takes rows and scales from a
    ``MatmulLtState``, which a module keeps in ``state``.
    """
    import bitsandbytes as bnb
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    torch.manual_seed(0)
    full = torch.randn(4, 16)
    held: Any = Int8Params(full.clone(), requires_grad=False, has_fp16_weights=False).to("cpu")
    assert type(held).__name__ == "Int8Params"
    assert held.SCB.shape == (4,)
    torch.testing.assert_close(
        bnb.functional.int8_vectorwise_dequant(held.data, held.SCB), full, atol=0.02, rtol=0
    )
    module = Linear8bitLt(16, 4, bias=False, has_fp16_weights=False, threshold=6.0)
    assert module.state.threshold == 6
    state: Any = bnb.MatmulLtState()
    state.threshold = module.state.threshold
    state.use_pool = module.state.use_pool
    state.has_fp16_weights = False
    state.is_training = False
    state.CB = held.data
    state.SCB = held.SCB
    x = torch.randn(2, 16)
    found = bnb.matmul(x, state.CB, bias=None, state=state)
    torch.testing.assert_close(found, x @ full.T, atol=0.3, rtol=0)


@relies_on(
    "bitsandbytes.optim.optimizer.Optimizer8bit:mng",
    "bitsandbytes.optim.GlobalOptimManager:index2config",
)
def test_optimizers_share_options_by_place() -> None:
    """All optimizers of a process have one ``mng``, whose ``index2config`` maps places in the groups to options; an
    optimizer reads its own ``mng``.
    """
    import copy

    from bitsandbytes.optim import AdamW8bit

    one, other = (AdamW8bit([torch.nn.Parameter(torch.ones(2))]) for _ in range(2))
    assert one.mng is other.mng
    assert isinstance(one.mng.index2config, dict)
    one.mng = copy.copy(other.mng)
    one.mng.index2config = {(0, 0): {"optim_bits": 32}}
    parameter = one.param_groups[0]["params"][0]
    assert one.get_config(0, 0, one.param_groups[0])["optim_bits"] == 32
    assert other.get_config(0, 0, other.param_groups[0])["optim_bits"] == 8
    assert parameter is not None


@relies_on("bitsandbytes.backends.cpu.ops")
def test_a_package_is_recommended_in_known_words() -> None:
    """On import it recommends a package, by a logger of the name of its file and with words that are looked for."""
    import inspect
    import logging

    from bitsandbytes.backends.cpu import ops

    source = inspect.getsource(ops)
    assert "logger = logging.getLogger(__name__)" in source
    assert "`pip install kernels`" in source
    assert ops.logger is logging.getLogger("bitsandbytes.backends.cpu.ops")


def test_a_product_on_a_cpu_is_that_with_values() -> None:
    """``matmul_4bit`` of float32 and bfloat16 rows is torch's product with what ``dequantize_4bit`` returns."""
    import bitsandbytes

    for dtype in (torch.float32, torch.bfloat16):
        for double in (False, True):
            weight = torch.randn(48, 64, dtype=dtype)
            stored, state = bitsandbytes.functional.quantize_4bit(
                weight, blocksize=64, quant_type="nf4", compress_statistics=double
            )
            x = torch.randn(7, 64, dtype=dtype, requires_grad=True)
            values = bitsandbytes.functional.dequantize_4bit(stored, state)
            found = bitsandbytes.matmul_4bit(x, stored, quant_state=state)
            assert torch.equal(found, torch.nn.functional.linear(x, values))
