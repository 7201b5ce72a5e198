"""Backward passes in two halves."""

from typing import Any

import pytest
import torch

from hfscale.parallel.pipeline import split


def test_a_weight_that_is_used_twice() -> None:
    assert split.splits_exactly()


def test_halves_that_count_twice_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = split.backward_of_weights

    def twice(found: split.Split, weights: Any) -> None:
        weights = list(weights)
        whole(found, weights)
        for weight in weights:
            weight.grad *= 2

    monkeypatch.setattr(split, "backward_of_weights", twice)
    split.splits_exactly.cache_clear()
    assert not split.splits_exactly()
    monkeypatch.undo()
    split.splits_exactly.cache_clear()


def test_the_halves_of_a_stage_add_up() -> None:
    torch.manual_seed(0)
    shared, last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3, bias=False)
    norm, frozen = torch.nn.LayerNorm(4), torch.nn.Linear(4, 4).requires_grad_(False)
    modules = torch.nn.ModuleList([shared, last, norm, frozen]).double()

    def stage(x: torch.Tensor) -> torch.Tensor:
        x = x + shared(norm(x))
        x = x + frozen(shared(norm(x)).sigmoid())
        return last(x)

    given = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(5, 3, dtype=torch.float64)
    weights = [weight for weight in modules.parameters() if weight.requires_grad]
    expected = torch.autograd.grad(stage(given), [given, *weights], gradient)
    for _ in range(2):  # the second adds to the first
        found = split.backward_of_input(stage(given), gradient, given, modules.parameters())
        assert given.grad is not None
        split.backward_of_weights(found, modules.parameters())
    for tensor, wanted in zip([given, *weights], expected, strict=True):
        torch.testing.assert_close(tensor.grad, 2 * wanted)


@pytest.mark.parametrize("first", ["weight", "biases"])
def test_a_weight_of_two_layers_with_biases_of_their_own(first: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    biases = [torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    given = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weights = [weight, *biases] if first == "weight" else [*biases, weight]

    def use() -> torch.Tensor:
        one = torch.nn.functional.linear(given, weight, biases[0]).sin()
        return (one * torch.nn.functional.linear(given.cos(), weight, biases[1])).sum()

    expected = torch.autograd.grad(use(), weights)
    split.backward_of_weights(split.backward_of_input(use(), None, given, weights), weights)
    for tensor, wanted in zip(weights, expected, strict=True):
        torch.testing.assert_close(tensor.grad, wanted)


def test_a_hook_on_the_gradient_of_an_activation_acts_once() -> None:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2)
    ).double()
    given = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def use() -> torch.Tensor:
        normed = layers[1](layers[0](given))
        normed.register_hook(lambda gradient: gradient / 2)
        return layers[2](normed).square().sum()

    weights = list(layers.parameters())
    expected = torch.autograd.grad(use(), weights)
    split.backward_of_weights(split.backward_of_input(use(), None, given, weights), weights)
    for tensor, wanted in zip(weights, expected, strict=True):
        torch.testing.assert_close(tensor.grad, wanted)
