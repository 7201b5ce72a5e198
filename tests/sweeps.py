"""Cases of which some run in ``make test-all`` only, since cheaper ones keep their property in ``make test``.

``@pytest.mark.daily`` says the same of a whole test, by the names of its cases.
"""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def cases(every: Iterable[Any], *, daily: Iterable[Any]) -> list[Any]:
    """Parameters of ``every`` case; those that are not ``daily`` are marked slow."""
    often = list(daily)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in often else pytest.mark.slow,
        )
        for case in every
    ]


def pairs(
    first: Iterable[Any], second: Iterable[Any], *, daily: Iterable[tuple[Any, Any]]
) -> list[Any]:
    """The same for every pair."""
    return cases(list(product(first, second)), daily=daily)
