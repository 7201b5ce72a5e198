"""Pools of rank processes, one per world size, for the whole run."""

import gc
import os
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

# Nothing slow is imported here: xdist's workers start once the process that starts them has read this.
if TYPE_CHECKING:
    from hfscale.testing import RankPool

os.environ["HFSCALE_CACHE"] = "off"  # nothing is left in the user's cache, and nothing found there

# By all ranks: once for all in the process that they are forked from. PEFT recommends a package as it comes.
IMPORTED = (
    "peft",
    "hfscale.testing",
    "hfscale.api.build",
    "hfscale.recipes.run",
    "trl.trainer.grpo_trainer",
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "daily(*ids): the cases of a test that `make test` runs; the others are slow"
    )


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Mark cases slow that a test's own mark ``daily`` does not name."""
    made = yield
    daily = made[0].get_closest_marker("daily") if isinstance(made, list) and made else None
    if daily is not None:
        cases = {item.callspec.id: item for item in made}
        if unknown := set(daily.args) - cases.keys():
            raise pytest.UsageError(
                f"{made[0].originalname} has no case {sorted(unknown)}: it has {sorted(cases)}"
            )
        for case in cases.keys() - set(daily.args):
            cases[case].add_marker(pytest.mark.slow)
    return made


def pytest_collection_finish() -> None:
    import torch

    # Tiny products: threads of this process would only wait for those of the ranks.
    torch.set_num_threads(1)
    gc.freeze()  # what is imported stays: a tenth of a second or more for each collection that goes through it
    gc.set_threshold(20_000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-golden", action="store_true", help="rewrite tests/golden from what runs now"
    )


@pytest.fixture(scope="session")
def pools() -> "Iterator[Callable[[int], RankPool]]":
    from hfscale.testing import RankPool
    from hfscale.testing.pool import PRELOADED

    started: dict[int, RankPool] = {}

    def pool(world: int) -> RankPool:
        if world not in started:
            started[world] = RankPool(world, preload=(*PRELOADED, *IMPORTED))
        return started[world]

    yield pool
    for running in started.values():
        running.close()
