"""What ``_compat/torch_files.py`` relies on: where tensors lie in a file of ``torch.save``."""

from pathlib import Path

import torch

from .relied_on import relying

relies_on = relying("torch_files.py")


@relies_on(
    "torch._subclasses.fake_tensor.FakeTensorMode", "torch.UntypedStorage:_checkpoint_offset"
)
def test_a_fake_load_says_where_tensors_lie(tmp_path: Path) -> None:
    """Under ``FakeTensorMode`` ``torch.load(weights_only=True)`` makes tensors without memory, whose storages have the
    place of their bytes in the file as ``_checkpoint_offset``; tensors of one storage have one place.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.arange(12.0).view(3, 4)
    path = tmp_path / "x.bin"
    torch.save({"x": x, "part": x[1:], "y": torch.ones(2)}, path)
    with FakeTensorMode():
        found = torch.load(path, map_location="cpu", weights_only=True)
    start = found["x"].untyped_storage()._checkpoint_offset
    content = bytearray(path.read_bytes()[start : start + 48])
    assert torch.equal(torch.frombuffer(content, dtype=torch.float32).view(3, 4), x)
    assert found["part"].untyped_storage()._checkpoint_offset == start
    assert found["part"].storage_offset() == 4
    assert found["y"].untyped_storage()._checkpoint_offset != start
