"""A process group of one rank, in this process, as long as a test runs."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def world_of_one() -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
