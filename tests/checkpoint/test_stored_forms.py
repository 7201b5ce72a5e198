"""Weights that are stored quantized: each box of them is what the host makes of the whole (pure part)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import save_file
from torch import Tensor

from hfscale import CheckpointError
from hfscale.checkpoint.stored_forms import forms, scheme
from hfscale.checkpoint.stored_forms.forms import as_plain
from hfscale.checkpoint.stored_forms.scheme import StoredForm
from hfscale.distributed.files import dequantized
from hfscale.distributed.files.reader import SafetensorsFile, TensorOnDisk

from ..stored_weights import (
    WRITTEN,
    StoredWeight,
    described_groups,
    e2m1_in_fp8,
    float8,
    fp8,
    gemma,
    integers,
    llm_int8,
    mxfp4,
    mxfp4_packed,
    mxfp8,
    nvfp4,
    table,
    torchao,
)

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    return described_groups(
        form, {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", **weights}
    )


FP8 = {"quant_method": "fp8", "weight_block_size": [16, 32]}
PACKED: dict[str, tuple[dict[str, Any], Callable[[Tensor], StoredWeight]]] = {
    f"{bits} bits": (compressed("pack-quantized", num_bits=bits, group_size=16), integers(bits))
    for bits in range(2, 9)
}
CASES: dict[str, tuple[dict[str, Any], Callable[[Tensor], StoredWeight]]] = {
    "fp8": (FP8, fp8((16, 32))),
    "fp8, other blocks than its config's": (FP8, fp8((8, 16))),
    "fp8, one scale": (FP8, fp8(None)),
    "fp8, scales in bfloat16": (FP8, fp8((16, 32), torch.bfloat16)),
    "fp8, scales as powers of two": (FP8, fp8((16, 32), torch.float8_e8m0fnu)),
    "fp8, an embedding": (FP8, table),
    "fp8, experts in E2M1": (FP8, e2m1_in_fp8),
    "mxfp8": ({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, mxfp8),
    **PACKED,
    "4 bits, a scale per row": (
        compressed("pack-quantized", strategy="channel"),
        integers(4, None),
    ),
    "4 bits, zero points": (
        compressed("pack-quantized", group_size=16),
        integers(4, symmetric=False),
    ),
    "3 bits, zero points": (
        compressed("pack-quantized", num_bits=3, group_size=16),
        integers(3, symmetric=False),
    ),
    "int8": (
        compressed("int-quantized", num_bits=8, strategy="channel"),
        integers(8, None, pack=False),
    ),
    "int8, zero points": (
        compressed("int-quantized", num_bits=8),
        integers(8, 32, False, pack=False),
    ),
    "float8 by rows": (compressed("float-quantized", strategy="channel"), float8(rows=True)),
    "float8, bfloat16 scale": (
        compressed("naive-quantized", strategy="tensor"),
        float8(False, torch.bfloat16),
    ),
    "nvfp4": (compressed("nvfp4-pack-quantized", strategy="tensor_group"), nvfp4),
    "mxfp4 in rows": (compressed("mxfp4-pack-quantized", group_size=32), mxfp4_packed),
}

READ_ONLY: dict[str, tuple[dict[str, Any], Callable[[Tensor], StoredWeight]]] = {
    "bitsandbytes, 8 bits": ({"quant_method": scheme.INT8}, llm_int8),
    "torchao, float8": (
        {"quant_method": scheme.TORCHAO},
        torchao(torch.float8_e4m3fn, torch.float32),
    ),
    "torchao, int8": ({"quant_method": scheme.TORCHAO}, torchao(torch.int8, torch.bfloat16)),
    "gemma, a table": (
        {"quant_method": scheme.GEMMA, "num_bits": 4},
        gemma(4, embedding=True),
    ),
    **{
        f"gemma, {bits} bits": (
            {"quant_method": scheme.GEMMA, "module_quant_configs": {"m": {"num_bits": bits}}},
            gemma(bits),
        )
        for bits in (2, 4, 8)
    },
}


def opened(
    directory: Path, weight: StoredWeight, described: dict[str, Any], name: str = "m"
) -> TensorOnDisk:
    """The lazy weight of stored tensors."""
    save_file(
        {name + end: t.contiguous() for end, t in weight.tensors.items()},
        directory / "f.safetensors",
    )
    stored = SafetensorsFile(directory / "f.safetensors").slices()
    ((_, found),) = as_plain(stored, StoredForm(described["quant_method"], described)).items()
    return found


def spans(draw: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    edges = [sorted(draw(st.integers(0, size)) for _ in range(2)) for size in shape]
    return tuple((start, stop) for start, stop in edges)


@pytest.mark.parametrize("case", [*CASES, *READ_ONLY, "mxfp4"])
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_box_is_that_of_the_whole(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Any
) -> None:
    monkeypatch.setattr(dequantized, "_ENTRIES", data.draw(st.sampled_from([1, 100, 1 << 19])))
    if case == "mxfp4":
        described = {"quant_method": "mxfp4"}
        weight = mxfp4(torch.ones(3, 64, 40))
    else:
        described, store = {**CASES, **READ_ONLY}[case]
        weight = store(torch.randn(48, 96, generator=torch.Generator().manual_seed(3)))
    found = opened(tmp_path, weight, described)
    box = spans(data.draw, found.shape)
    dtype = data.draw(st.sampled_from(DTYPES))
    found.load_as(dtype, merged=False)  # type: ignore[attr-defined]
    whole = weight.values(dtype)
    assert found.shape == whole.shape
    part = found.read(box)
    assert part.dtype == dtype
    assert torch.equal(part, whole[tuple(slice(*span) for span in box)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_scale_of_mxfp4(tmp_path: Path, dtype: torch.dtype) -> None:
    """Powers of two are the host's at either end too, one by one and many at a time."""
    weight = mxfp4(torch.ones(2, 64, 128))
    weight.tensors["_scales"].copy_(torch.arange(255).repeat(3)[:512].view(2, 128, 2))
    found = opened(tmp_path, weight, {"quant_method": "mxfp4"})
    found.load_as(dtype, merged=True)  # type: ignore[attr-defined]
    whole = weight.values(dtype)
    assert torch.equal(found[...], whole)
    assert torch.equal(found.read(((1, 2), (3, 4), (5, 6))), whole[1:2, 3:4, 5:6])


def test_blocks_that_do_not_fill_the_weight(tmp_path: Path) -> None:
    """DeepSeek-V3 has 576 rows in blocks of 128; the host refuses 5 scales for them, or guesses other blocks."""
    codes = torch.randn(40, 48).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2)
    weight = StoredWeight(
        {".weight": codes, ".weight_scale_inv": scales}, lambda dtype: codes.to(dtype)
    )
    found = opened(tmp_path, weight, FP8)
    found.load_as(torch.float32, merged=False)  # type: ignore[attr-defined]
    spread = scales.repeat_interleave(16, 0)[:40].repeat_interleave(32, 1)[:, :48]
    assert torch.equal(found[...], codes.float() * spread)


def test_a_box_reads_its_blocks_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    original = SafetensorsFile.read
    monkeypatch.setattr(
        SafetensorsFile,
        "read",
        lambda self, at, out: (read.append(out.nbytes), original(self, at, out))[1],
    )
    described, store = CASES["fp8"]
    found = opened(tmp_path, store(torch.randn(48, 96)), described)
    found.read(((15, 33), (0, 96)))  # rows of three blocks of 16
    assert sum(read) == 18 * 96 + 3 * 3 * 4
    read.clear()
    found = opened(tmp_path, mxfp4(torch.ones(3, 64, 40)), {"quant_method": "mxfp4"})
    found.read(((1, 2), (0, 64), (10, 20)))  # ten stored rows of one expert
    assert sum(read) == 10 * (32 + 2)


# Tensors that do not fit


def test_scales_that_are_no_blocks(tmp_path: Path) -> None:
    codes = torch.zeros(48, 96).to(torch.float8_e4m3fn)
    weight = StoredWeight(
        {".weight": codes, ".weight_scale_inv": torch.ones(5, 3)}, lambda dtype: codes.to(dtype)
    )
    with pytest.raises(
        CheckpointError, match=r"m of shape \(48, 96\) has scales of shape \(5, 3\)"
    ):
        opened(tmp_path, weight, FP8)


def test_codes_without_scales(tmp_path: Path) -> None:
    codes = torch.zeros(48, 96).to(torch.float8_e4m3fn)
    with pytest.raises(
        CheckpointError, match=r"m\.weight is stored in float8_e4m3fn without scales"
    ):
        opened(tmp_path, StoredWeight({".weight": codes}, lambda dtype: codes.to(dtype)), FP8)


def test_words_of_another_width(tmp_path: Path) -> None:
    weight = integers(3)(torch.randn(48, 96))
    with pytest.raises(
        CheckpointError, match="m has 9 32-bit words per row for 96 numbers of 4 bits"
    ):
        opened(tmp_path, weight, CASES["4 bits"][0])


def test_columns_in_another_order(tmp_path: Path) -> None:
    weight = integers(4)(torch.randn(48, 96))
    weight.tensors[".weight_g_idx"] = torch.arange(96)
    with pytest.raises(CheckpointError, match="without actorder"):
        opened(tmp_path, weight, CASES["4 bits"][0])


def test_every_form_is_tried() -> None:
    tried = {way.description["quant_method"] for way in WRITTEN.values()}
    only_read = {described["quant_method"] for described, _ in READ_ONLY.values()}
    assert tried | only_read == forms.FORMS.keys() - {"mxfp8"}
