"""Gradients that are zero in truth are measured by rounding; all others by themselves."""

import pytest
import torch

from hfscale.testing.differences import gradient_difference

ROUNDING = 2.0**-52


def apart(
    wanted: list[float], found: list[float], largest: float = 1.0, loss: float = 1.0
) -> float:
    whole = torch.tensor(wanted, dtype=torch.float64)
    return gradient_difference(
        torch.tensor(found, dtype=torch.float64), whole, whole, largest, loss
    )


def test_rounding_is_no_difference_where_the_truth_is_zero() -> None:
    assert apart([2 * ROUNDING, 0.0], [-3 * ROUNDING, ROUNDING]) == 0.0
    assert apart([], []) == 0.0
    # A loss of 1 is a sum of numbers like it, whatever is left of its gradient.
    small = [1e-3 * ROUNDING]
    assert apart(small, [3 * ROUNDING], largest=1e-2) == 0.0


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ([2 * ROUNDING], [1000 * ROUNDING]),  # more than rounding makes
        ([1e-7], [1e-7 + 60 * ROUNDING]),  # not zero
        ([0.0, 1e-7], [60 * ROUNDING, 1e-7]),  # a zero within what is not
        ([2 * ROUNDING], [float("nan")]),
    ],
)
def test_what_is_more_is_a_difference(wanted: list[float], found: list[float]) -> None:
    assert apart(wanted, found) > 1e-9
