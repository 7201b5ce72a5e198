"""A checkpoint seen through the plan."""

from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import save_file

from hfscale.distributed.files.reader import SafetensorsFile, ShareOnDisk
from hfscale.plan import Cut, ParameterPlan


def _on_disk(whole: torch.Tensor, directory: Path) -> SafetensorsFile:
    save_file({"t": whole}, directory / "f.safetensors")
    return SafetensorsFile(directory / "f.safetensors")


@given(data=st.data())
@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_reads_what_the_plan_takes(data: st.DataObject, tmp_path: Path) -> None:
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    cuts = []
    for axis in data.draw(st.sampled_from([(), ("tp",), ("dp_shard",), ("tp", "dp_shard")])):
        dim = data.draw(st.integers(0, len(shape) - 1))
        parts = ()
        if axis == "tp" and data.draw(st.booleans()):
            parts = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
            shape[dim] = sum(parts)
        cuts.append(Cut(axis, dim, data.draw(st.integers(1, 4)), parts))
    whole = torch.arange(float(prod(shape))).view(shape)
    planned = ParameterPlan("t", tuple(shape), whole.dtype, cuts=tuple(cuts))
    source = _on_disk(whole, tmp_path).slices()["t"]
    for coordinates in product(*(range(cut.size) for cut in cuts)):
        ranks = dict(zip([cut.axis for cut in cuts], coordinates, strict=True))
        share = ShareOnDisk(source, planned.cuts, ranks)
        expected = planned.take(whole, ranks)
        assert tuple(share.get_shape()) == share.shape == tuple(expected.shape)
        assert torch.equal(share[...], expected)


def test_an_index_is_taken_of_the_share(tmp_path: Path) -> None:
    whole = torch.arange(24).view(8, 3)
    share = ShareOnDisk(_on_disk(whole, tmp_path).slices()["t"], (Cut("tp", 0, 2),), {"tp": 1})
    assert torch.equal(share[1:3, 2], whole[5:7, 2])
    assert share.get_dtype() == "I64"
    assert share.dtype == torch.int64


def test_a_scalar_is_whole(tmp_path: Path) -> None:
    share = ShareOnDisk(_on_disk(torch.tensor(3.5), tmp_path).slices()["t"], (), {"tp": 1})
    assert share[...].item() == 3.5


@pytest.mark.parametrize(
    ("cuts", "rows"),
    [
        ((Cut("tp", 0, 4),), 3),
        ((Cut("tp", 0, 2), Cut("dp_shard", 0, 3)), 2),
        ((Cut("tp", 0, 2, (4, 4, 4)),), 6),  # query, key and value: three reads
        ((Cut("tp", 1, 2), Cut("dp_shard", 0, 4)), 3),
    ],
)
def test_only_the_rows_of_the_share_are_read(
    cuts: tuple[Cut, ...], rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _on_disk(torch.arange(96.0).view(12, 8), tmp_path)
    counted: list[int] = []
    stock = SafetensorsFile.read

    def count(self: SafetensorsFile, offset: int, buffer: torch.Tensor) -> None:
        counted.append(buffer.numel() * buffer.element_size())
        stock(self, offset, buffer)

    monkeypatch.setattr(SafetensorsFile, "read", count)
    _ = ShareOnDisk(file.slices()["t"], cuts, {"tp": 1, "dp_shard": 1})[...]
    assert sum(counted) == rows * 8 * 4
