"""Liger's kernels on a GPU: those of a model are those that Liger itself gives a stock one."""

import sys
from pathlib import Path

import pytest
import torch

import hfscale

from .test_gpu import stock, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_training_equals_ligers_own(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("liger_kernel.transformers")
    model = stock(tmp_path, family, dtype)
    names = vars(sys.modules[type(model).__module__])
    before = dict(names)
    transformers._apply_liger_kernel_to_instance(
        model, cross_entropy=False, fused_linear_cross_entropy=False
    )
    try:
        expected = train(model, ours=False)
    finally:
        names.update(before)
    ours = hfscale.from_pretrained(str(tmp_path), dtype=dtype, use_liger_kernel=True).train()
    assert all(names[name] is value for name, value in before.items())
    assert train(ours, ours=True)[0] == pytest.approx(
        expected[0], rel=1e-4 if dtype == torch.float32 else 2e-2
    )
