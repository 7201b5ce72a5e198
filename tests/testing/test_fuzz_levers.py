"""What the judge of random draws knows of levers that round or scale."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fuzz import Draw
from tests.fuzz.levers import LossScale, kinds, unrounded
from tests.fuzz.low_rank import LowRank
from tests.fuzz.measures import EXACT, Yardstick
from tests.fuzz.reference import Record, Step


def factors(steps: list[Tensor], forgets: bool = False) -> list[Tensor]:
    """Gradients of rank 2 with error feedback; or without it."""
    factor = torch.randn(6, 2, dtype=torch.float64)
    error = torch.zeros_like(steps[0])
    found = []
    for gradient in steps:
        left = torch.linalg.qr((gradient + error) @ factor)[0]
        factor = (gradient + error).T @ left
        found.append(left @ factor.T)
        error = torch.zeros_like(error) if forgets else gradient + error - found[-1]
    return found


def worst(steps: list[Tensor], found: list[Tensor], terms: int = 1) -> float:
    judge = LowRank(2)
    return max(judge.difference("w", f, g, 1e-30, terms) for f, g in zip(found, steps, strict=True))


def test_factors_are_told_from_anything_else() -> None:
    torch.manual_seed(0)
    steps = [torch.randn(9, 6, dtype=torch.float64) for _ in range(3)]
    found = factors(steps)
    assert worst(steps, steps) <= EXACT
    assert worst(steps, found) <= EXACT
    assert worst(steps, factors(steps, forgets=True)) > 1e-3
    assert worst(steps, [2 * each for each in found]) > 1e-3
    assert worst(steps, [each * 0 for each in found]) > 1e-3
    assert worst(steps, [gradient + 1e-6 for gradient in steps]) > EXACT
    both = [
        one + other
        for one, other in zip(found, factors([each.flip(0) for each in steps]), strict=True)
    ]
    assert worst(steps, both) > 1e-3
    assert worst(steps, both, terms=2) <= EXACT
    assert worst(steps, [gradient * 1.01 for gradient in steps], terms=2) > 1e-3


def test_a_loss_scale_is_that_of_a_grad_scaler() -> None:
    how: dict[str, Any] = {"init_scale": 2.0**20, "growth_interval": 2, "backoff_factor": 0.25}
    draw = Draw("llama", dtype="float32", mixed_precision="fp16", loss_scaling=how)
    ours = LossScale(draw)
    theirs = torch.amp.GradScaler("cpu", **how)
    for overflows in (True, False, False, False):
        weights = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
        optimizer = torch.optim.SGD(weights, lr=1.0)
        theirs.scale(torch.ones(()))
        for weight, scale in zip(weights, (ours.scale, theirs.get_scale()), strict=True):
            weight.grad = torch.full((3,), float("inf") if overflows else 0.5 * scale)
        skips = ours.over(weights[:1])
        weights[0].grad = None
        theirs.step(optimizer)
        theirs.update()
        assert skips == overflows == bool((weights[1] == 0).all())
        assert ours.scale == theirs.get_scale()


def test_an_overflow_at_a_scale_that_fits_is_stock_codes() -> None:
    draw = Draw(
        "llama", dtype="float32", mixed_precision="fp16", loss_scaling={"init_scale": 256.0}
    )
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.full((1,), float("inf"))
    with pytest.raises(ArithmeticError, match="overflow float16 at a loss scale of 256"):
        LossScale(draw).over([weight])


def test_what_rounds_is_known() -> None:
    eight = Draw("llama", memory={"compress_activations": "1B", "recompute": "full"})
    sent = Draw("llama", layout={"dp_replicate_size": 2, "gradient_compression": "fp16"})
    assert kinds(eight) == ["float64", "8 bits"]
    assert kinds(sent) == ["float64", "float16"]
    assert kinds(Draw("llama", mixed_precision="fp8")) == ["float64"]
    assert kinds(Draw("llama", mixed_precision="fp8", dtype="float32")) == ["bfloat16"]
    assert unrounded(eight).memory == {"recompute": "full"}
    assert unrounded(sent).layout == {"dp_replicate_size": 2}


def test_what_is_rounded_backward_has_an_exact_loss() -> None:
    draw = Draw("llama", memory={"compress_activations": "1B"})
    one = torch.ones(1)
    record = Record(
        [Step([[1.0]], {"w": one}, 1.0, {"w": one})],
        [Step([[1.0]], {"w": 1.01 * one}, 1.01, {"w": one})],
    )
    for kind, found, right in (
        ("loss", 1 + 1e-8, False),
        ("loss", 1 + 1e-12, True),
        ("norm", 1.02, True),
    ):
        yardstick = Yardstick(draw, record, aligned=True, mixture=False)
        yardstick.scalar(kind, 0, found, 1.0, 1.01)
        assert (yardstick.worst.ratios[kind][0] <= 1) == right
    assert Yardstick(draw, record, aligned=True, mixture=False).kind == "8 bits"


def test_a_norm_may_be_off_by_as_much_as_stock_codes_gradients() -> None:
    """Where they are off, their norm is right by luck alone."""
    draw = Draw("llama", dtype="float32", mixed_precision="fp8")
    exact = torch.tensor([1.0, 0.0])
    for narrow, right in ((torch.tensor([0.9, 0.43589]), True), (torch.tensor([1.0, 1e-3]), False)):
        steps = [[Step([[1.0]], {"w": each}, 1.0, {"w": each})] for each in (exact, narrow)]
        yardstick = Yardstick(draw, Record(*steps), aligned=True, mixture=False)
        yardstick.scalar("norm", 0, 1.3, 1.0, 1.0)
        assert (yardstick.worst.ratios["norm"][0] <= 1) == right
