"""Weights of another program are found and read by a file outside of the package as by those inside."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import extensions
from hfscale.distributed.files.sources import find_source
from hfscale.extensions import register
from hfscale.testing import RankPool

from ..tiny_models import tiny

ADDED = '''
"""Read files of a program that puts ``own.`` before every name."""

from pathlib import Path

from hfscale.distributed.files.sources import AddedSource, Source
from hfscale.distributed.files.weight_files import open_tensors
from hfscale.extensions import Extension


class Own(AddedSource):
    def find(self, path):
        if not (path / "weights.own").exists():
            return None
        return Source("another program's weights", path, lambda path: open_tensors([path / "weights.own"]))

    def rename(self, tensors, config):
        if not all(name.startswith("own.") for name in tensors):
            return None
        return {name.removeprefix("own."): tensor for name, tensor in tensors.items()}


OWN = Own()
EXTENSION = Extension(name="own", sources={"own": "added_source:OWN"})
'''


def add(folder: str) -> None:
    sys.path.insert(0, folder)
    from added_source import EXTENSION  # type: ignore[import-not-found]

    register(EXTENSION)


def remove(folder: str) -> None:
    sys.path.remove(folder)
    sys.modules.pop("added_source")
    del extensions._registered["own"]
    extensions._found.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "added_source.py").write_text(ADDED)
    add(str(tmp_path))
    yield tmp_path
    remove(str(tmp_path))


def loaded(folder: str, directory: str, layout: dict[str, int]) -> dict[str, Any]:
    add(folder)
    try:
        parallel = hfscale.ParallelConfig(**layout)
        model = hfscale.from_pretrained(directory, parallel=parallel, dtype=torch.float64)
        return dict(hfscale.stream_weights(model))
    finally:
        remove(folder)


def test_its_weights_are_loaded_by_slices(pools: Any, folder: Path) -> None:
    pool: RankPool = pools(2)
    model = AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float64)
    expected = model.state_dict()
    directory = folder / "there"
    model.config.save_pretrained(directory)
    own = {f"own.{name}": tensor.clone() for name, tensor in expected.items()}
    save_file(own, directory / "weights.own")
    found = find_source(directory)
    assert found is not None
    assert found.describe() == "another program's weights"
    read = pool.run(loaded, str(folder), str(directory), {"tp_size": 2})[0]
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(read[name], tensor, rtol=0, atol=0)
