"""Routers take the experts that they are given, with weights and gradients of their own."""

import base64
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError
from transformers import DeepseekV2Config, LlamaConfig, PreTrainedConfig

import hfscale
from hfscale import ConfigError, RoutingConfig
from hfscale._compat.transformers.computing import enable_checkpointing
from hfscale._compat.transformers.experts import use_eager_experts
from hfscale.models.precision import keep_float64
from hfscale.train.runtime import recomputing, runtime_of
from tests.families import MIXED, config_of
from tests.mixtures import gpt_oss, qwen2_moe, qwen3_moe

FAMILIES = [
    "afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "dots1", "dots3_note", "ernie4_5_moe", "exaone_moe", "flex_olmo", "gemma4_text", "glm4_moe",
    "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid",
    "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "hy_v4", "inkling2_text", "inkling_text", "jamba", "kimi_linear",
    "kolibri1", "laguna", "lfm2_moe", "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text",
    "mixtral", "nemotron_h", "olmoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen4_exp_text",
    "solar_open",
]  # fmt: skip
DAILY = ("gemma4_text", "gpt_oss", "lfm2_moe", "mixtral", "qwen2_moe")
Step = tuple[Tensor, dict[str, Tensor]]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def built(config: PreTrainedConfig, **options: Any) -> Any:
    model = hfscale.from_config(config, dtype=torch.float64, **options).train()
    use_eager_experts(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    return model


def batch_of(rows: int = 2, tokens: int = 7, seed: int = 1) -> dict[str, Tensor]:
    ids = torch.randint(3, 60, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def others(shape: tuple[int, ...], count: int, k: int, seed: int = 2) -> Tensor:
    """Random routes: ``k`` different experts of ``count``."""
    return torch.rand(*shape, count, generator=torch.Generator().manual_seed(seed)).argsort(-1)[
        ..., :k
    ]


def step(model: Any, batch: Any, **options: Any) -> Step:
    model.zero_grad()
    torch.manual_seed(7)
    with keep_float64():
        loss = hfscale.train_step(model, batch, **options)
    return loss, {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def same(one: Step, other: Step) -> None:
    assert torch.equal(one[0], other[0])
    assert one[1].keys() == other[1].keys() != set()
    for name, gradient in one[1].items():
        assert torch.equal(gradient, other[1][name]), name


def calls(model: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The inputs of every module of experts, as it is called."""
    seen: list[Any] = []
    for planned in runtime_of(model).plan.mixtures:
        experts = model.get_submodule(planned.name)
        experts.register_forward_pre_hook(lambda _, args: seen.append(args))
    return seen


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in DAILY else pytest.mark.slow) for name in FAMILIES],
)
def test_every_family(family: str) -> None:
    """Recording changes nothing, and replaying one's own routes neither; others arrive at the experts as given."""
    model = built(config_of(family, **MIXED.get(family, {})))
    batch = batch_of()
    plain = step(model, batch)
    with hfscale.record_routes(model) as routes:
        same(step(model, batch), plain)
    same(step(model, batch, routes=routes), plain)
    mixtures = runtime_of(model).plan.mixtures
    assert routes[0].shape[:3] == (2, 7, len(mixtures))
    given = others((2, 7, len(mixtures)), mixtures[0].count, routes[0].shape[-1])
    seen = calls(model)
    loss, gradients = step(model, batch, routes=given)
    assert [
        torch.equal(index, given[:, :, layer].flatten(0, 1))
        for layer, (_, index, _) in enumerate(seen)
    ]
    assert not torch.equal(loss, plain[0])
    assert all(weights.isfinite().all() for _, _, weights in seen)
    assert sum(
        bool(gradient.any())
        for name, gradient in gradients.items()
        if "gate" in name or "router" in name
    )


def grouped(method: str) -> PreTrainedConfig:
    latent = {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    }
    return DeepseekV2Config(
        hidden_size=32, intermediate_size=24, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=67, n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=1, topk_method=method,
        n_shared_experts=1, first_k_dense_replace=0, routed_scaling_factor=2.0, **latent,
    )  # fmt: skip


def softmax_scaled(logits: Tensor, index: Tensor) -> Tensor:
    return 2.0 * logits.softmax(-1).gather(-1, index)


def softmax_normalized(logits: Tensor, index: Tensor) -> Tensor:
    chosen = logits.softmax(-1).gather(-1, index)
    return chosen / chosen.sum(-1, keepdim=True)


FORMULAS: dict[str, tuple[PreTrainedConfig, Callable[[Tensor, Tensor], Tensor]]] = {
    "softmax of all": (qwen2_moe(), lambda logits, index: logits.softmax(-1).gather(-1, index)),
    "normalized": (qwen3_moe(), softmax_normalized),
    "softmax of the chosen": (
        gpt_oss(),
        lambda logits, index: logits.gather(-1, index).softmax(-1),
    ),
    "scaled, groups": (
        grouped("group_limited_greedy"),
        softmax_scaled,
    ),  # experts of groups that lost, too
    "scaled, greedy": (grouped("greedy"), softmax_scaled),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_weights_are_those_of_the_live_router_for_the_given_experts(name: str) -> None:
    config, formula = FORMULAS[name]
    model = built(config)
    count = 8 if "scaled" in name else 4
    given = others((2, 7, 2), count, 2)
    given[0, 2] = -1  # the router chooses
    seen = calls(model)
    logits: list[Tensor] = []
    for layer in range(2):
        router = next(
            m
            for n, m in model.model.layers[layer].named_modules()
            if n in ("mlp.gate", "mlp.router")
        )
        router.register_forward_hook(lambda _, args, output: logits.append(output[0]))
    step(model, batch_of(), routes=given)
    for layer, (own, (_, index, weights)) in enumerate(zip(logits, seen, strict=True)):
        wanted = given[:, :, layer].flatten(0, 1)
        live = wanted[:, :1] < 0
        assert torch.equal(index.where(live, wanted), index)
        if "groups" not in name:
            best = own.topk(2).indices.sort(-1).values
            assert torch.equal(index.sort(-1).values[live[:, 0]], best[live[:, 0]])
        torch.testing.assert_close(
            weights, formula(own, index).to(weights.dtype), rtol=1e-12, atol=0
        )


@pytest.mark.parametrize("config", [qwen3_moe(), gpt_oss()], ids=["qwen3_moe", "gpt_oss"])
def test_finite_differences_of_the_routers_weight(config: PreTrainedConfig) -> None:
    model = built(config)
    batch = batch_of()
    given = others((2, 7, 2), 4, 2)
    _, gradients = step(model, batch, routes=given)
    name = next(name for name in gradients if name.endswith(("gate.weight", "router.weight")))
    weight = model.get_parameter(name)
    direction = torch.randn(
        weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    values = []
    for sign in (1.0, -1.0):
        with torch.no_grad(), keep_float64():
            weight += sign * 1e-5 * direction
            scores = hfscale.token_scores(model, batch, routes=given)
            weight -= sign * 1e-5 * direction
        values.append(-scores.log_probs.sum() / (2 * 6))
    found = float((gradients[name] * direction).sum())
    assert float(values[0] - values[1]) / 2e-5 == pytest.approx(found, rel=1e-6)
    assert abs(found) > 1e-6


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("how", ["layers", "blocks", "stock"])
def test_recomputed_layers_take_the_experts_that_they_took_first(how: str, recorded: bool) -> None:
    memory = {
        "layers": hfscale.MemoryConfig(recompute="full"),
        "blocks": hfscale.MemoryConfig(recompute=["mlp"]),
    }
    model = built(qwen3_moe(), memory=memory.get(how))
    batch = batch_of()
    if how == "stock":
        enable_checkpointing(model, use_reentrant=True)
    seen = calls(model)

    def flip(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor] | None:
        return (-args[0],) if recomputing() else None  # as rounding would, but always

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_pre_hook(flip)
    if recorded:
        with hfscale.record_routes(model) as routes:
            step(model, batch)
        assert torch.equal(routes[0][:, :, 0].flatten(0, 1), seen[0][1])
    elif how == "stock":
        step(model, batch)
    else:
        with pytest.raises(CheckpointError):  # other experts get other numbers of tokens
            step(model, batch)
        return
    # from the last layer to the first
    first = seen[:2]
    again = seen[:1:-1]
    assert [torch.equal(a[1], b[1]) for a, b in zip(first, again, strict=True)] == [recorded] * 2


def test_a_step_of_several_batches_and_empty_ones() -> None:
    model = built(qwen3_moe())
    batches = [batch_of(2, 7), batch_of(3, 5), {name: x[:0] for name, x in batch_of(2, 4).items()}]
    plain = step(model, batches)
    with hfscale.record_routes(model) as routes:
        step(model, batches)
    assert [tuple(each.shape[:2]) for each in routes] == [(2, 7), (3, 5), (1, 4)]
    same(step(model, batches, routes=routes), plain)
    same(step(model, batches, routes=[torch.full_like(each, -1) for each in routes]), plain)


def test_losses_of_ones_own_take_routes() -> None:
    model, batch, given = built(qwen3_moe()), batch_of(), others((2, 7, 2), 4, 2)
    wanted = step(model, batch, routes=given)

    def loss_fn(outputs: Any, batch: Any) -> tuple[Tensor, int]:
        logits = outputs.logits[:, :-1]
        labels = batch["labels"][:, 1:]
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum"
        ), labels.numel()

    found = step(model, batch, loss_fn=loss_fn, routes=given)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-12, atol=0)
    scored = step(
        model, batch, score_loss=lambda scores, _: -scores.log_probs.sum() / 12, routes=given
    )
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-9, atol=1e-14)
        torch.testing.assert_close(scored[1][name], gradient, rtol=1e-9, atol=1e-14)
    with keep_float64():
        scores = hfscale.token_scores(model, batch, routes=given)  # with gradients
        model.zero_grad()
        (-scores.log_probs.sum() / 12).backward()
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=1e-9, atol=1e-14)


def test_routes_are_recorded_where_scores_have_gradients_and_in_evaluation() -> None:
    model = built(qwen3_moe())
    batch = batch_of()
    with hfscale.record_routes(model) as routes, keep_float64():
        hfscale.token_scores(model, batch)
        with torch.no_grad():
            hfscale.token_scores(model, batch)
        hfscale.eval_step(model, batch)
    assert len(routes) == 3
    assert torch.equal(routes[0], routes[1])
    assert torch.equal(routes[0], routes[2])


def test_routes_of_one_step_are_no_routes_of_the_next() -> None:
    model = built(qwen3_moe())
    batch = batch_of()
    plain = step(model, batch)
    step(model, batch, routes=others((2, 7, 2), 4, 2))
    same(step(model, batch), plain)
    with torch.no_grad(), keep_float64():
        model.model(input_ids=batch["input_ids"])  # a module by itself, in no pass of the model


def test_capacity_drops_routes_that_were_given() -> None:
    model = built(qwen3_moe(), routing=RoutingConfig(capacity_factor=0.5))
    batch = batch_of()
    given = torch.tensor([0, 1]).expand(2, 7, 2, 2).contiguous()
    step(model, batch, routes=given)
    load = hfscale.expert_load(model)
    assert [layer.tokens for layer in load.layers] == [
        (4, 4, 0, 0)
    ] * 2  # 2 of 7 tokens in each row
    assert [layer.dropped for layer in load.layers] == [20] * 2


def test_refusals() -> None:
    model = built(qwen3_moe())
    batch = batch_of()
    given = others((2, 7, 2), 4, 2)
    refused = {
        r"\[2, 6, 2, 2\] for 2 rows of 7 tokens and 2 layers": given[:, 1:],
        r"routes\[1, 3, 0\] = \[2, 2\] .* give 2 different numbers below 4": given.index_put(
            tuple(map(torch.tensor, (1, 3, 0))), torch.tensor([2, 2])
        ),
        r"= \[4, 4\]": torch.full_like(given, 4),
        r"= \[1, -1\]": torch.tensor([1, -1]).expand(2, 7, 2, 2),
        "whole numbers": given.double(),
        "got 2 tensors for 1 batches": [given, given],
        "is a list": [[given]],
    }
    for words, routes in refused.items():
        with pytest.raises(ConfigError, match=words):
            step(model, batch, routes=routes)
    with hfscale.record_routes(model), pytest.raises(ConfigError, match="recorded already"):
        hfscale.record_routes(model).__enter__()
    with pytest.raises(ConfigError, match="otherwise than by top-k"):
        hfscale.record_routes(built(config_of("phimoe"))).__enter__()
    # Layers that choose by token id.
    with pytest.raises(ConfigError, match="otherwise than by top-k"):
        step(built(config_of("deepseek_v4")), batch, routes=others((2, 7, 2), 4, 2))
    for routing in (RoutingConfig(router="switch"), RoutingConfig(force_balanced=True)):
        with pytest.raises(ConfigError, match="own router"):
            step(built(qwen3_moe(), routing=routing), batch, routes=given)
    dense = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=67,
    )
    with pytest.raises(ConfigError, match="has no mixture of experts, so routes="):
        step(built(dense), batch, routes=given)


def test_a_router_that_does_not_hand_on_its_top_k_is_refused() -> None:
    model = built(qwen3_moe())
    gate = model.model.layers[1].mlp.gate
    forward = gate.forward
    gate.forward = lambda hidden: (*forward(hidden)[:2], forward(hidden)[2].flip(-1))
    with pytest.raises(ConfigError, match="not the result of one top-k"):
        step(model, batch_of(), routes=others((2, 7, 2), 4, 2))


MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0]])
"""Prompts of three tokens and one, with completions of one and two."""


@pytest.mark.parametrize("engine", ["vllm", "vllm server", "sglang", "sglang small", "sglang flat"])
def test_routes_of_engines(engine: str) -> None:
    """A dense layer, then a mixture; the last token of each row has no routes."""
    model = built(qwen2_moe(decoder_sparse_step=2))
    arrays = [np.zeros((tokens, 2, 2), dtype=np.int32) for tokens in (3, 2)]
    expected = torch.full((2, 7, 1, 2), -1)
    for row, (array, start) in enumerate(zip(arrays, (2, 0), strict=True)):
        array[:, 1] = others((len(array),), 4, 2, seed=row).numpy()
        expected[row, start : start + len(array), 0] = torch.from_numpy(array[:, 1])
    if engine == "vllm":
        found = hfscale.routes_from_vllm(model, arrays, MASK)
        # Layers with mixtures alone.
        only = hfscale.routes_from_vllm(model, [array[:, 1:] for array in arrays], MASK)
        assert torch.equal(only, found)
        # A rank without rows.
        assert hfscale.routes_from_vllm(model, [], MASK[:0]).shape == (
            0,
            7,
            1,
            2,
        )
    elif engine == "vllm server":
        files = [io.BytesIO() for _ in arrays]
        for file, array in zip(files, arrays, strict=True):
            np.save(file, array.astype(np.uint8))
        sent = [base64.b64encode(file.getvalue()).decode() for file in files]
        found = hfscale.routes_from_vllm(model, sent, MASK)
    else:
        dtype = "uint8" if "small" in engine else "int32"
        flat = [array.astype(dtype).flatten() for array in arrays]
        texts = [base64.b64encode(each.tobytes()).decode() for each in flat]
        told = [{"routed_experts": text, "routed_experts_dtype": dtype} for text in texts]
        outputs = {"sglang": texts, "sglang small": told, "sglang flat": flat}[engine]
        found = hfscale.routes_from_sglang(model, outputs, MASK)
    assert torch.equal(found.long(), expected)
    batch = {**batch_of(), "attention_mask": MASK}
    seen = calls(model)
    step(model, batch, routes=found)
    index = seen[0][1].view(2, 7, 2)
    assert torch.equal(index[expected[:, :, 0] >= 0], expected[:, :, 0][expected[:, :, 0] >= 0])


def test_routes_that_do_not_fit_the_rows() -> None:
    model = built(qwen2_moe(decoder_sparse_step=2))
    array = np.zeros((3, 2, 2), dtype=np.int32)
    with pytest.raises(
        ConfigError,
        match="row 1 of attention_mask has 3 tokens, but the engine recorded the experts of 1",
    ):
        hfscale.routes_from_vllm(model, [array, array[:1]], MASK)
    with pytest.raises(ConfigError, match="1 entries for 2 rows"):
        hfscale.routes_from_vllm(model, [array], MASK)
    deep = built(qwen2_moe(decoder_sparse_step=2, num_hidden_layers=4))
    with pytest.raises(ConfigError, match="the experts of 3 layers, but the model has 4"):
        hfscale.routes_from_vllm(deep, [array[:, [0, 1, 0]], array[:, [0, 1, 0]]], MASK)
