"""Projections whose weight gradients are computed while the gradient of their input is summed: plain linear layers."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from hfscale.distributed.ops.collectives import (
    Started,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from hfscale.distributed.ops.overlap import (
    Products,
    column_parallel_linear,
    enter_overlapped,
    take_factors,
)
from hfscale.parallel.pipeline.split import backward_of_input, backward_of_weights
from hfscale.testing import RankPool

from . import pieces
from .pieces import loss, piece, values

ROWS = 2
LENGTHS = (4, 3)
IN = 5
OUT = (3, 2)


def _weights(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of one projection with a bias, and of one whose weight is stored transposed."""
    one = values(10, sum(OUT), IN)
    other = values(11, IN, sum(OUT))
    bias = values(12, sum(OUT))
    own = (piece(one, OUT, 0, rank), piece(other, OUT, 1, rank), piece(bias, OUT, 0, rank))
    return tuple(tensor.clone().requires_grad_() for tensor in own)  # type: ignore[return-value]


def _of_outputs(rank: int) -> tuple[Tensor, Tensor]:
    return tuple(
        piece(values(seed, ROWS, sum(LENGTHS), sum(OUT)), OUT, -1, rank) for seed in (20, 21)
    )  # type: ignore[return-value]


def overlapped(sequence: bool, regather: bool) -> dict[str, Tensor]:
    rank = dist.get_rank()
    group = dist.group.WORLD
    whole = values(0, ROWS, sum(LENGTHS), IN)
    x = (piece(whole, LENGTHS, 1, rank) if sequence else whole).clone().requires_grad_()
    gather: Any = (
        partial(start_all_gather, lengths=LENGTHS, dim=1, group=group) if sequence else None
    )
    scatter = partial(start_reduce_scatter, lengths=LENGTHS, dim=1, group=group)
    reduce: Any = scatter if sequence else lambda grad: start_all_reduce(grad.clone(), group)
    one, other, bias = _weights(rank)
    projections = [(one, False, Products()), (other, True, Products())]
    inside, later = enter_overlapped(x, projections, reduce, gather, regather)
    first = column_parallel_linear(inside, later[0], bias)
    second = column_parallel_linear(inside, later[1], None)
    weights = _of_outputs(rank)
    (loss(first, weights[0]) + loss(second, weights[1])).backward()
    found = {"first": first.detach(), "second": second.detach()}
    return {**found, "x": x.grad, "one": one.grad, "other": other.grad, "bias": bias.grad}


def _plain() -> tuple[Tensor, list[dict[str, Tensor]]]:
    """The gradient of the whole input, and what each rank has of the rest."""
    x = values(0, ROWS, sum(LENGTHS), IN).requires_grad_()
    ranks = []
    total = torch.zeros((), dtype=torch.float64)
    for rank in range(2):
        one, other, bias = _weights(rank)
        first = F.linear(x, one, bias)
        second = x @ other
        weights = _of_outputs(rank)
        total = total + loss(first, weights[0]) + loss(second, weights[1])
        ranks.append({"first": first, "second": second, "one": one, "other": other, "bias": bias})
    total.backward()
    grads: Sequence[str] = ("one", "other", "bias")
    return x.grad, [
        {k: v.grad if k in grads else v.detach() for k, v in rank.items()} for rank in ranks
    ]  # type: ignore[misc, return-value]


@pytest.mark.parametrize(("sequence", "regather"), [(False, False), (True, False), (True, True)])
def test_equals_plain_projections(
    pools: Callable[[int], RankPool], sequence: bool, regather: bool
) -> None:
    to_input, expected = _plain()
    for rank, found in enumerate(pools(2).run(overlapped, sequence, regather)):
        wanted = {
            **expected[rank],
            "x": piece(to_input, LENGTHS, 1, rank) if sequence else to_input,
        }
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-13, atol=1e-13, msg=name)


class Asking(Products):
    """Products that ask other ranks, of whom there are none."""

    agrees = True


@pytest.mark.parametrize("products", [Products, Asking])
def test_each_half_of_a_backward_pass_makes_its_own_products(products: type[Products]) -> None:
    """The first that of the input, the second that of the weight, which leaves no gradients behind."""
    given = values(0, 3, IN).requires_grad_()
    weights = [values(seed, sum(OUT), IN) for seed in (1, 2)]
    asked = [(weight.requires_grad_(), False, products()) for weight in weights]
    inside, later = enter_overlapped(
        given * 2, asked, lambda grad: Started(None, grad.clone), agrees=products.agrees
    )
    output = sum((column_parallel_linear(inside, each, None) for each in later), torch.zeros(()))
    with pieces.Products() as first, torch.autograd.set_multithreading_enabled(False):
        split = backward_of_input(output, torch.ones_like(output), given, weights)
    with pieces.Products() as second, torch.autograd.set_multithreading_enabled(False):
        backward_of_weights(split, weights)
    assert first.shapes == [(3, IN)] * 2
    assert second.shapes == [(sum(OUT), IN)] * 2
    assert (later[0].entry is not None) == products.agrees  # else each makes its own
    assert later[0].entry is None or not later[0].entry.left
    torch.testing.assert_close(given.grad, 2 * (weights[0] + weights[1]).sum(0).expand(3, IN))


def test_a_copy_of_a_module_has_no_tokens() -> None:
    """Those of a pass that did not take them hold a graph, which cannot be copied."""
    module = torch.nn.Linear(2, 2)
    weight = module.weight
    given = (2 * values(0, 2, 2)).requires_grad_()
    factors = [(module, weight, weight)]
    enter_overlapped(given * 1, [], lambda grad: Started(None, grad.clone), factors=factors)
    copied = copy.deepcopy(module)
    assert take_factors(copied) is None
    assert take_factors(module) is not None
    assert take_factors(module) is None
