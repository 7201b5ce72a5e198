"""Pools of rank processes, one per world size, for the whole run."""

from collections.abc import Callable, Iterator

import pytest

from hfscale.testing import RankPool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-golden", action="store_true", help="rewrite tests/golden from what runs now")


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], RankPool]]:
    started: dict[int, RankPool] = {}

    def pool(world: int) -> RankPool:
        if world not in started:
            started[world] = RankPool(world)
        return started[world]

    yield pool
    for running in started.values():
        running.close()
