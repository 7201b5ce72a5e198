"""What ``_compat/dcp_metadata.py`` relies on: the names in the metadata of torch's distributed checkpoints."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from .relied_on import relying

relies_on = relying("dcp_metadata.py")


@relies_on(
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_metadata_names_these_alone(tmp_path: Path) -> None:
    """``.metadata`` is one pickle, and refers to dataclasses of torch's metadata, a storage's place, a size, a type, a
    layout and a path.
    """
    dcp.save({"x": torch.ones(3), "step": 3}, checkpoint_id=tmp_path, no_dist=True)
    found: set[tuple[str, str]] = set()

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found.add((module, name))
            return super().find_class(module, name)

    with (tmp_path / ".metadata").open("rb") as file:
        Reader(file).load()
    inside = {name for module, name in found if module == "torch.distributed.checkpoint.metadata"}
    known = {"Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"}
    known |= {"BytesStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"}
    assert inside <= known
    rest = {each for each in found if each[0] != "torch.distributed.checkpoint.metadata"}
    assert {module.partition(".")[0] for module, _ in rest} <= {"torch", "pathlib"}
    places = "torch.distributed.checkpoint.filesystem"
    assert {name for module, name in rest if module == places} == {"_StorageInfo"}
    assert {name for module, name in rest if module == "torch.serialization"} <= {"_get_layout"}
