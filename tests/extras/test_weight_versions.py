"""Asynchronous schedules: which version of the weights each stage uses, and what training with them computes."""

import pytest
import torch
from torch import Tensor, nn

from hfscale.extras.asynchronous.schedules import asynchronous_order
from hfscale.parallel.pipeline.orders import order
from tests.delayed_updates import stashed_versions, train_delayed, weight_versions

P = 4
LR = 0.05


def _loss(result: Tensor, target: Tensor) -> Tensor:
    return (result - target).square().sum()


def _stages(count: int = P) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double() for _ in range(count)]


def _data(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        tuple(torch.randn(2, 2, 3, generator=generator, dtype=torch.float64)) for _ in range(count)
    ]  # type: ignore[misc]


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_versions_of_pipedream(p: int) -> None:
    actions = order("pipedream", p, 20)
    versions = weight_versions("pipedream", actions, 20)
    assert versions == {(s, i): max(0, i - (p - s - 1)) for s in range(p) for i in range(20)}
    assert stashed_versions("pipedream", actions, 20) == tuple(p - s for s in range(p))


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 6), (8, 9)])
def test_versions_of_2bw(p: int, m: int) -> None:
    actions = order("pipedream_2bw", p, m, steps=4)
    versions = weight_versions("pipedream_2bw", actions, m)
    assert versions == {(s, i): max(0, i // m - 1) for s in range(p) for i in range(4 * m)}
    assert stashed_versions("pipedream_2bw", actions, m) == (2,) * p


def test_2bw_needs_as_many_microbatches_as_stages() -> None:
    with pytest.raises(ValueError, match="stage 0 has no version 1 for microbatch 4 yet"):
        weight_versions("pipedream_2bw", asynchronous_order(4, 2, 3), 2)


def test_updates_of_an_order() -> None:
    last = order("pipedream_2bw", 2, 2, steps=2)[1]
    assert "".join(f"{a.kind[0]}{a.microbatch}" for a in last) == "f0b0f1b1u0f2b2f3b3u1"


def _descend(
    w: list[dict[str, Tensor]], at: list[dict[str, Tensor]], batch: list[tuple[Tensor, Tensor]]
) -> list:
    """One step from ``w`` with the gradient at ``at``, by setting the weights of modules and calling backward."""
    stages = _stages(len(w))
    for stage, weights in zip(stages, at, strict=True):
        stage.load_state_dict(weights)
    for value, target in batch:
        _loss(nn.Sequential(*stages)(value), target).backward()
    return [
        {n: weights[n] - LR * q.grad for n, q in s.named_parameters()}
        for s, weights in zip(stages, w, strict=True)
    ]


def test_pipedream_is_its_formula() -> None:
    data = _data(7)
    run = train_delayed("pipedream", _stages(), data, _loss, LR)
    history = [[{k: v.detach() for k, v in s.state_dict().items()} for s in _stages()]]
    for i, minibatch in enumerate(data):
        stale = [history[max(0, i - (P - 1 - s))][s] for s in range(P)]
        history.append(_descend(history[-1], stale, [minibatch]))
    for s in range(P):
        assert len(run.weights[s]) == 8
        for version, weights in enumerate(run.weights[s]):
            for name, tensor in weights.items():
                torch.testing.assert_close(tensor, history[version][s][name], rtol=0, atol=1e-14)


def test_2bw_is_its_formula() -> None:
    data = _data(15)
    run = train_delayed("pipedream_2bw", _stages(), data, _loss, LR, num_microbatches=5)
    history = [[{k: v.detach() for k, v in s.state_dict().items()} for s in _stages()]]
    for t in range(3):
        history.append(_descend(history[t], history[max(0, t - 1)], data[5 * t : 5 * t + 5]))
    for s in range(P):
        for name, tensor in run.weights[s][-1].items():
            torch.testing.assert_close(tensor, history[3][s][name], rtol=0, atol=1e-14)


def test_one_stage_is_plain_gradient_descent() -> None:
    data = _data(4)
    stage = _stages(1)[0]
    run = train_delayed("pipedream", [stage], data, _loss, LR)
    optimizer = torch.optim.SGD(stage.parameters(), lr=LR)
    for index, (value, target) in enumerate(data):
        found = _loss(stage(value), target)
        torch.testing.assert_close(found.detach(), run.losses[index], rtol=0, atol=1e-14)
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
    for name, parameter in stage.named_parameters():
        torch.testing.assert_close(run.weights[0][-1][name], parameter.detach(), rtol=0, atol=1e-15)


def test_the_stages_keep_their_weights() -> None:
    stages = _stages()
    before = [p.detach().clone() for s in stages for p in s.parameters()]
    train_delayed("pipedream", stages, _data(3), _loss, LR)
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, (p for s in stages for p in s.parameters()), strict=True)
    )
    with pytest.raises(ValueError, match="3 microbatches are not whole steps of 2"):
        train_delayed("pipedream_2bw", stages, _data(3), _loss, LR, num_microbatches=2)
