"""Routers, room at experts, and the exchange through fixed slots, each against a few plain lines."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import OlmoeConfig

import hfscale
from hfscale import ConfigError, ParallelConfig, RoutingConfig
from hfscale.distributed.ops import collectives
from hfscale.parallel.experts.router_functions import (
    gshard,
    noisy_topk,
    queue_places,
    room,
    round_robin,
    switch,
)
from hfscale.train.runtime import runtime_of
from tests.parity.test_balance import _SMALL, _microbatches, _together
from tests.tiny_models import tiny


def _model(
    routing: RoutingConfig | None, layout: ParallelConfig | None = None, **changes: Any
) -> Any:
    config = OlmoeConfig(**{**_SMALL, "num_experts": 4, **changes})
    return hfscale.from_config(
        config, parallel=layout, dtype=torch.float64, routing=routing
    ).train()


def _layers(model: Any) -> list[Any]:
    return [layer.mlp.experts.forward.__self__.routing for layer in model.model.layers]


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"router": "swich"}, "router='swich' is unknown: did you mean 'switch'"),
        ({"balance_loss": -0.1}, "balance_loss=-0.1 is invalid"),
        ({"z_loss": math.inf}, "z_loss=inf is invalid"),
        ({"capacity_factor": 0}, "capacity_factor=0 is invalid: use a number above 0"),
        ({"capacity": 1.0}, "no field 'capacity'; did you mean 'capacity_factor'"),
        ({"noise_std": 0.1}, "needs router='noisy_topk'"),
        ({"force_balanced": 1}, "force_balanced=1 is not a switch"),
        ({"balance_scores": "tanh"}, "balance_scores='tanh' is unknown"),
    ],
)
def test_impossible_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        RoutingConfig(**options)


def test_room_of_the_papers_by_default() -> None:
    factors = {
        router: RoutingConfig(router).capacity
        for router in ("model", "switch", "gshard", "noisy_topk")
    }
    assert factors == {"model": None, "switch": 1.25, "gshard": 1.0, "noisy_topk": None}
    assert RoutingConfig("switch", capacity_factor=math.inf).capacity is None


def test_a_model_that_lacks_what_is_asked_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no such experts"):
        hfscale.from_config(tiny("llama"), routing=RoutingConfig())
    with pytest.raises(ConfigError, match="OlmoeForCausalLM has no such router: use balance_loss"):
        _model(RoutingConfig(bias_update_rate=0.001))
    with pytest.raises(ConfigError, match="would balance experts twice"):
        _model(RoutingConfig(balance_loss=0.01), output_router_logits=True)
    with pytest.raises(ConfigError, match=r"routing must be a hfscale.RoutingConfig, got"):
        _model({"balance_loss": 0.01})  # type: ignore[arg-type]


def test_a_family_that_does_not_name_its_logits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.olmoe.modeling_olmoe import OlmoePreTrainedModel

    for kind in (OlmoePreTrainedModel, *OlmoePreTrainedModel.__subclasses__()):
        monkeypatch.setattr(kind, "_can_record_outputs", {}, raising=False)
    with pytest.raises(ConfigError, match=r"'olmoe' does not name them \(_can_record_outputs"):
        _model(RoutingConfig(z_loss=0.001))
    _model(RoutingConfig(capacity_factor=1.0))


# --- who goes where ---------------------------------------------------------------------------------------------------


def _naive_queues(index: Tensor, limits: list[int], count: int) -> Tensor:
    """Which of ``index [b, s, k]`` find room, one route after the other."""
    samples, length, k = index.shape
    kept = torch.zeros_like(index, dtype=torch.bool)
    for sample in range(samples):
        taken = [0] * count
        for choice in range(k):
            for token in range(length):
                expert = int(index[sample, token, choice])
                if expert < count and taken[expert] < limits[sample]:
                    kept[sample, token, choice] = True
                    taken[expert] += 1
    return kept


@pytest.mark.parametrize(("length", "k", "count"), [(1, 1, 2), (9, 1, 4), (13, 2, 4), (7, 3, 5)])
def test_queues_fill_route_by_route(length: int, k: int, count: int) -> None:
    torch.manual_seed(length)
    index = torch.stack([torch.randperm(count + 1)[:k] for _ in range(3 * length)]).view(
        3, length, k
    )
    limits = [1, 2, length]
    kept = (queue_places(index, count) < torch.tensor(limits).view(3, 1, 1)) & (index < count)
    assert torch.equal(kept, _naive_queues(index, limits, count))


def test_no_tokens_make_no_queue() -> None:
    """As on a tensor rank that a sequence is too short for."""
    assert queue_places(torch.empty(3, 0, 2, dtype=torch.int64), 4).shape == (3, 0, 2)


def test_room_is_the_same_as_number_and_as_tensor() -> None:
    for tokens, factor, k, count in itertools.product(
        (0, 1, 7, 10, 96), (0.1, 1.0, 1.1, 2.0), (1, 2), (3, 4, 10)
    ):
        expected = room(tokens, factor, k, count)
        assert int(room(torch.tensor([tokens]), factor, k, count)) == expected
        assert expected >= min(tokens, factor * k * tokens / count - 1e-6)
    assert room(10, 1.1, 1, 1) == 10
    # 1.1 / 10 * 100 is a little more than 11 in floating point
    assert room(100, 1.1, 1, 10) == int(room(torch.tensor([100]), 1.1, 1, 10)) == 11


def test_switch_and_gshard_token_by_token() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 5, dtype=torch.float64, requires_grad=True)
    draws = torch.rand(40)
    top = switch(logits)
    pair = gshard(logits, draws)
    for token in range(40):
        p = (logits[token].exp() / logits[token].exp().sum()).tolist()
        best, second = sorted(range(5), key=lambda expert: -p[expert])[:2]
        assert top[0][token].tolist() == [best]
        assert top[1][token].tolist() == pytest.approx([p[best]])
        share = p[second] / (p[best] + p[second])
        assert pair[0][token].tolist() == [best, second if 2 * share > draws[token] else 5]
        assert pair[1][token].tolist() == pytest.approx([1 - share, share])
    assert 0 < int((pair[0] == 5).sum()) < 40
    assert int((gshard(logits, None)[0] == 5).sum()) == 0
    (gradient,) = torch.autograd.grad(top[1].sum(), logits)
    assert (gradient.abs().sum(1) > 0).all()


def test_noisy_topk_is_a_softmax_over_the_noisy_best() -> None:
    torch.manual_seed(0)
    logits = torch.randn(20, 6, dtype=torch.float64)
    noise = torch.randn(20, 6)
    index, weights = noisy_topk(logits, 3, noise)
    noisy = logits + noise
    for token in range(20):
        best = sorted(range(6), key=lambda expert: -float(noisy[token, expert]))[:3]
        assert index[token].tolist() == best
        assert torch.allclose(weights[token], noisy[token, best].softmax(0))


def test_round_robin_is_even_and_gives_a_token_different_experts() -> None:
    index = round_robin(torch.zeros(10, 3, dtype=torch.int64), 4)
    assert sorted(index.flatten().bincount().tolist()) == [7, 7, 8, 8]
    assert all(len(set(row)) == 3 for row in index.tolist())


# --- in a model -------------------------------------------------------------------------------------------------------


def _naive_switch(model: Any, routing: RoutingConfig) -> int:
    """Run layer 0's mixture by hand, expert by expert; returns how many routes were dropped."""
    batch = _together(_microbatches())
    block = model.model.layers[0].mlp
    seen: list[tuple[Tensor, Tensor]] = []
    handle = block.register_forward_hook(
        lambda module, args, output: seen.append((args[0], output))
    )
    model(**batch)
    handle.remove()
    hidden, found = seen[0]
    real = batch["attention_mask"].bool()
    dropped = 0
    expected = torch.zeros_like(hidden)
    for sample, length in enumerate(real.sum(1).tolist()):
        # type: ignore[operator]
        taken = [0] * 4
        limit = math.ceil(routing.capacity * length / 4)
        for token in range(length):
            p = (hidden[sample, token] @ block.gate.weight.t()).softmax(0)
            expert = int(p.argmax())
            if taken[expert] == limit:
                dropped += 1
                continue
            taken[expert] += 1
            gate, up = (hidden[sample, token] @ block.experts.gate_up_proj[expert].t()).chunk(2)
            row = (torch.nn.functional.silu(gate) * up) @ block.experts.down_proj[expert].t()
            expected[sample, token] = p[expert] * row
    # the router computes in 32 bits where stock code says so; the weights of routes do not
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)
    return dropped


def test_switch_in_a_model_drops_and_counts_like_a_loop() -> None:
    routing = RoutingConfig("switch", capacity_factor=1.0)
    model = _model(routing)
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight.mul_(40)
    dropped = _naive_switch(model, routing)
    load = hfscale.expert_load(model).layers[0]
    assert dropped > 3
    assert load.dropped == dropped
    assert sum(load.tokens) + dropped == int(_together(_microbatches())["attention_mask"].sum())


@pytest.mark.parametrize("router", ["switch", "gshard", "noisy_topk", "model"])
def test_evaluation_draws_nothing_and_training_draws_by_the_seed(router: str) -> None:
    model = _model(RoutingConfig(router, noise_std=2.0 if router == "noisy_topk" else None))
    batch = _microbatches()[0]
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(float(hfscale.train_step(model, batch)))
    assert losses[0] == losses[1]
    assert (losses[0] == losses[2]) == (router in ("switch", "model"))
    model.eval()
    state = torch.get_rng_state()
    assert float(hfscale.eval_step(model, batch)) == float(hfscale.eval_step(model, batch))
    assert torch.equal(state, torch.get_rng_state())


def test_force_balanced_is_even_and_still_trains_the_router() -> None:
    model = _model(RoutingConfig(force_balanced=True))
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight.zero_()[0] = 5.0
    hfscale.train_step(model, _together(_microbatches()))
    for layer in hfscale.expert_load(model).layers:
        assert max(layer.tokens) - min(layer.tokens) <= 1
    assert model.model.layers[1].mlp.gate.weight.grad.abs().sum() > 0


# --- fixed slots ------------------------------------------------------------------------------------------------------


class _NoLooks(TorchDispatchMode):
    """Refuses what makes the host wait for the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        looks = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero", "equal")
        assert func._schema.name.split("::")[1] not in looks, f"{func} asks the device"
        return func(*args, **(kwargs or {}))


def _step_of_experts(model: Any) -> None:
    block = model.model.layers[0].mlp
    passes = _layers(model)[0].passes
    batch = _together(_microbatches())
    passes._before(model, (), batch)
    hidden = torch.randn(*batch["input_ids"].shape, 32, dtype=torch.float64, requires_grad=True)
    with _NoLooks():
        block(hidden).sum().backward()


def test_nothing_asks_the_device_where_room_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked(*_: Any) -> None:
        raise AssertionError("asks the device")

    model = _model(RoutingConfig(capacity_factor=1.0, balance_loss=0.1))
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy"):
        monkeypatch.setattr(Tensor, name, looked)
    _step_of_experts(model)
    for layer in _layers(model):
        layer.fixed = False
    with pytest.raises(AssertionError, match="asks the device"):
        _step_of_experts(model)


def _both_ways(layout: ParallelConfig | None, options: dict[str, Any]) -> float:
    """Largest difference between slots and the exchange that counts; bad numbers in memory must not show."""
    found = []
    for fixed in (True, False):
        model = _model(RoutingConfig(**options), layout)
        for layer in _layers(model):
            layer.fixed = fixed
        mine = _microbatches()[hfscale.batch_rank(model) :: hfscale.batch_world(model)]
        torch.manual_seed(3)
        with _Poisoned():
            loss = hfscale.train_step(model, mine)
        runtime = runtime_of(model)
        gradients = [
            hfscale.train.runtime.local_tensor(tensor.grad) for _, tensor in runtime.parameters()
        ]
        found.append((loss, *gradients, hfscale.expert_load(model)))
    assert found[0][-1] == found[1][-1]
    assert dataclasses.asdict(found[0][-1])["layers"][0]["dropped"] > 0
    pairs = zip(found[0][:-1], found[1][:-1], strict=True)
    errors = [
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-9)) for a, b in pairs if a.numel()
    ]
    return max(error if math.isfinite(error) else math.inf for error in errors)


class _Poisoned:
    """Within: memory that nobody has written holds not-a-number."""

    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(False)


_OPTIONS = [
    {"router": "switch", "capacity_factor": 0.8},
    {"router": "gshard"},
    {"capacity_factor": 0.75, "z_loss": 0.1},
]


@pytest.mark.parametrize("options", _OPTIONS, ids=str)
def test_slots_give_what_counting_gives(options: dict[str, Any]) -> None:
    assert _both_ways(None, options) < 1e-12


@pytest.mark.parametrize("options", _OPTIONS, ids=str)
def test_slots_give_what_counting_gives_on_ranks(pools: Any, options: dict[str, Any]) -> None:
    layout = ParallelConfig(ep_size=2)
    assert max(pools(2).run(_both_ways, layout, options)) < 1e-12


def _collectives(options: dict[str, Any]) -> list[str]:
    """What is sent between ranks in a forward pass of the second microbatch, by kind."""
    model = _model(RoutingConfig(**options), ParallelConfig(ep_size=2))
    batch = _microbatches()[hfscale.batch_rank(model)]
    called: list[str] = []
    places = {"all_to_all_single": dist, "all_gather_single": collectives, "all_reduce": dist}
    kept = {name: getattr(place, name) for name, place in places.items()}
    for name, function in kept.items():

        def counted(*args: Any, _name: str = name, _function: Any = function, **kwargs: Any) -> Any:
            called.append(_name)
            return _function(*args, **kwargs)

        setattr(places[name], name, counted)
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        for name, function in kept.items():
            setattr(places[name], name, function)
    return called


def test_slots_exchange_no_counts(pools: Any) -> None:
    fixed = pools(2).run(_collectives, {"capacity_factor": 1.0})[0]
    counted = pools(2).run(_collectives, {})[0]
    # Shapes of batches once a pass; rows there and back.
    assert fixed == ["all_gather_single", *["all_to_all_single"] * 4]
    assert counted.count("all_to_all_single") == 6


def test_a_mask_that_does_not_say_what_is_padding_is_refused() -> None:
    model = _model(RoutingConfig(z_loss=0.1))
    ids = torch.ones(2, 5, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"for 2 x 5 tokens, got \(2, 3\)"):
        model(input_ids=ids, attention_mask=torch.ones(2, 3))
