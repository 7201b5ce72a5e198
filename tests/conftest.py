"""Pools of rank processes, one per world size, for the whole run."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from hfscale.testing import RankPool
from hfscale.testing.pool import PRELOADED


def pytest_configure() -> None:
    torch.set_num_threads(1)  # tiny products: threads of this process would only wait for those of the ranks


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported stays: a tenth of a second or more for each collection that goes through it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-golden", action="store_true", help="rewrite tests/golden from what runs now")


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], RankPool]]:
    started: dict[int, RankPool] = {}

    def pool(world: int) -> RankPool:
        if world not in started:
            started[world] = RankPool(world, preload=(*PRELOADED, "peft"))  # which recommends a package as it comes
        return started[world]

    yield pool
    for running in started.values():
        running.close()
