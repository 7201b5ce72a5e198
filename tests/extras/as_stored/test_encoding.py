"""Weights are quantized again in the format of their checkpoint: what did not change keeps its bytes (pure part)."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hfscale.distributed.files import dequantized
from hfscale.distributed.files.writer import bytes_of
from hfscale.extras.as_stored import encoding

from ...checkpoint.test_stored_forms import CASES, DTYPES, FP8, opened
from ...stored_weights import WRITTEN, StoredWeight, fp8, mxfp4, nvfp4


@pytest.mark.parametrize("case", [*CASES, "mxfp4"])
def test_blocks_that_did_not_change_keep_their_bytes(
    case: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """One entry changes, and with it its block alone, to the nearest values that the block can hold."""
    monkeypatch.setattr(encoding, "_ENTRIES", 1)
    described, store = ({"quant_method": "mxfp4"}, mxfp4) if case == "mxfp4" else CASES[case]
    noise = torch.randn(
        3 if case == "mxfp4" else 1, 64, 96, generator=torch.Generator().manual_seed(3)
    )
    weight = store(noise if case == "mxfp4" else noise[0, :48])
    found = opened(tmp_path, weight, described)
    assert isinstance(found, dequantized.DequantizedOnDisk)
    for dtype in DTYPES:
        again = encoding.encode(found, weight.values(dtype))
        for name, (part, source) in found.stored_as.items():
            if part in again:
                assert bytes_of(again[part]) == bytes_of(source[...]), (name, dtype)
    value = weight.values(torch.float32)
    place = (1, 7, 5) if case == "mxfp4" else (5, 7)
    value[place] = (0.9 if case == "nvfp4" else 1.7) * value.abs().max()
    again = encoding.encode(found, value)
    tensors = {
        name.removeprefix("m"): again[part].view(source.shape) if part in again else source[...]
        for name, (part, source) in found.stored_as.items()
    }
    read = opened(tmp_path, StoredWeight(tensors, weight.values), described)
    read.load_as(torch.float32, merged=False)  # type: ignore[attr-defined]
    now = read[...]
    before = weight.values(torch.float32)
    changed = now != before
    rows, columns = (edges.max() - edges.min() + 1 for edges in changed.nonzero().unbind(1)[-2:])
    scales = found.parts["scales"]
    assert changed[place]
    assert rows <= (scales.columns if case == "mxfp4" else scales.rows).entries
    assert columns <= (scales.rows if case == "mxfp4" else scales.columns).entries
    assert (now - value)[changed].abs().max() <= 0.34 * value.max()
    assert abs(now[place] / value[place] - 1) <= 0.34


def test_a_weight_that_outgrows_the_scale_of_all(tmp_path: Path) -> None:
    weight = nvfp4(torch.randn(48, 96))
    found = opened(tmp_path, weight, CASES["nvfp4"][0])
    value = 3 * weight.values(torch.float32)
    again = encoding.encode(found, value)  # type: ignore[arg-type]
    tensors = {".weight_packed": again["values"], ".weight_scale": again["scales"]}
    tensors[".weight_global_scale"] = again["whole"]
    read = opened(tmp_path, StoredWeight(tensors, weight.values), CASES["nvfp4"][0])[...]
    assert (read - value).abs().max() <= 0.05 * value.abs().max()


def test_what_changed_is_quantized_as_the_host_does(tmp_path: Path) -> None:
    store = fp8((16, 32))
    found = opened(tmp_path, store(torch.randn(48, 96)), FP8)
    other = torch.randn(48, 96)
    expected = store(other).tensors
    again = encoding.encode(found, other)  # type: ignore[arg-type]
    assert bytes_of(again["values"]) == bytes_of(expected[".weight"])
    assert bytes_of(again["scales"]) == bytes_of(expected[".weight_scale_inv"])


def test_every_form_that_is_written_is_tried() -> None:
    tried = {way.description["quant_method"] for way in WRITTEN.values()}
    assert tried | {"mxfp8"} == set(encoding.ENCODED)
