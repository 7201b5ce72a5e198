"""Experts spread over ranks equal one process: loss, every gradient, norm, weights after two steps, checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

import hfscale
from hfscale import ParallelConfig
from hfscale._compat.transformers.computing import enable_checkpointing
from hfscale.models.precision import keep_float64
from hfscale.testing import Case, RankPool, Traffic, assert_layout_equal, count_traffic, plain
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.shards import local_tensor

from ..mixtures import EAGER, gpt_oss, qwen2_moe, qwen3_moe
from ..sweeps import cases, pairs

Pools = Callable[[int], RankPool]
EP2 = {"ep_size": 2}
# Tensor ranks share a batch, and each sends a share of its tokens.
WHOLE = {
    "ep_size": 2,
    "tp_size": 2,
}
SEQUENCE = {**WHOLE, "sequence_parallel": True}
CUT = {**WHOLE, "expert_tp_size": 2}  # experts over data ranks, each cut over tensor ranks
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": EP2,
    "ep2, tp2": WHOLE,
    "ep2, tp2, sequence": SEQUENCE,
    "ep2 of tp2": CUT,
    "ep4, tp2": {"ep_size": 4, "tp_size": 2},
    "ep2, shard4": {"ep_size": 2, "dp_shard_size": 4},
    "ep2, replicate2": {"ep_size": 2, "dp_replicate_size": 2},
    "ep2, shard2, replicate2": {"ep_size": 2, "dp_shard_size": 2, "dp_replicate_size": 2},
    "ep4, shard2, replicate2": {"ep_size": 4, "dp_shard_size": 2, "dp_replicate_size": 2},
    "ep2, tp2, shard2, sequence": {**SEQUENCE, "dp_shard_size": 2},
}
# Others hold the same, and more.
RARE = {
    "ep2, tp2",
    "ep2, shard4",
    "ep2, shard2, replicate2",
    "ep4, tp2",
}
WAYS: dict[str, dict[str, Any]] = {"data": EP2, "tensor": WHOLE, "sequence": SEQUENCE}
THREE = pytest.mark.parametrize("layout", WAYS.values(), ids=WAYS)


def equal(pools: Pools, case: Case, **sizes: Any) -> None:
    layout = ParallelConfig(**sizes)
    case.hf_kwargs = EAGER
    assert_layout_equal(case, layout, pools(layout.total_size))


@pytest.mark.daily("ep2, tp2, shard2, sequence")
@pytest.mark.parametrize("layout", cases(LAYOUTS, daily=LAYOUTS.keys() - RARE))
def test_layout(pools: Pools, layout: str) -> None:
    """With a shared expert and a gate on it."""
    equal(pools, Case(qwen2_moe()), **LAYOUTS[layout])


@pytest.mark.daily("ep2 of tp2")
@pytest.mark.parametrize("layout", ["ep2", "ep2, tp2", "ep2, tp2, sequence", "ep2 of tp2"])
def test_biases_and_interleaved_gates(pools: Pools, layout: str) -> None:
    equal(pools, Case(gpt_oss()), **LAYOUTS[layout])


@pytest.mark.slow
def test_shards_of_rows(pools: Pools) -> None:
    """Three experts of a rank are no multiple of two shards: every expert is cut, its biases as well."""
    planned = hfscale.plan(
        gpt_oss(num_local_experts=6), ParallelConfig(ep_size=2, dp_shard_size=4)
    ).by_name
    cuts = [
        (cut.axis, cut.dim) for cut in planned["model.layers.0.mlp.experts.down_proj_bias"].cuts
    ]
    assert cuts == [("ep", 0), ("edp_shard", 1)]
    equal(pools, Case(gpt_oss(num_local_experts=6)), ep_size=2, dp_shard_size=4)


FEWER: tuple[PreTrainedConfig, dict[str, Any]] = (
    gpt_oss(num_local_experts=2, intermediate_size=15),
    {"ep_size": 2, "dp_shard_size": 4},
)
"""One expert over two shards, and rows that these do not divide either: a shard is empty."""


def test_plans_of_shards_without_experts() -> None:
    config, layout = FEWER
    planned = hfscale.plan(config, ParallelConfig(**layout)).by_name[
        "model.layers.0.mlp.experts.down_proj"
    ]
    assert planned.local_shape({"ep": 1, "edp_shard": 1}) == (0, 15, 32)


@pytest.mark.slow
def test_shards_without_experts(pools: Pools) -> None:
    equal(pools, Case(FEWER[0]), **FEWER[1])


OVER = {"data": EP2, "sequence": SEQUENCE}


@pytest.mark.daily("sequence-interleaved_zero_bubble")
@pytest.mark.parametrize(
    ("over", "schedule"),
    pairs(
        OVER,
        ["1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"],
        daily=[
            ("data", "1f1b"),
            ("data", "zbv"),
            ("sequence", "interleaved_zero_bubble"),
            ("sequence", "dualpipev"),
        ],
    ),
)
def test_stages(pools: Pools, over: str, schedule: str) -> None:
    case = Case(qwen3_moe(num_hidden_layers=4), accumulation=3, lengths=(13, 7))
    equal(pools, case, **OVER[over], pp_size=2, pipeline_schedule=schedule)


@pytest.mark.daily("1-sequence")
@THREE
@pytest.mark.parametrize("top_k", [1, 4])
def test_one_expert_and_all_experts(pools: Pools, layout: dict[str, Any], top_k: int) -> None:
    equal(pools, Case(qwen3_moe(num_experts_per_tok=top_k, num_hidden_layers=1)), **layout)


@pytest.mark.daily("tensor")
@THREE
def test_fewer_tokens_than_ranks(pools: Pools, layout: dict[str, Any]) -> None:
    """One row of two tokens, then of one: under ``tp`` a rank has nothing to send."""
    equal(pools, Case(qwen2_moe(), lengths=(2, 1), rows=1, accumulation=3), **layout)


class Tied:
    """A model whose routers find all experts equally good."""

    from_pretrained = AutoModelForCausalLM.from_pretrained

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **kwargs: Any) -> Any:
        model = AutoModelForCausalLM.from_config(config, **kwargs)
        save = model.save_pretrained

        def save_changed(*args: Any, **kwargs: Any) -> None:
            with torch.no_grad():  # only now: weights were changed since
                for name, parameter in model.named_parameters():
                    if name.endswith("mlp.gate.weight"):
                        cls.change(parameter)
            save(*args, **kwargs)

        model.save_pretrained = save_changed
        return model

    @staticmethod
    def change(router: torch.Tensor) -> None:
        router.zero_()


class Crowded(Tied):
    """A model whose tokens all choose one of the first two of four experts; the second rank has none of these."""

    @staticmethod
    def change(router: torch.Tensor) -> None:
        direction = router[0].clone()
        router.zero_()
        # One of the two is above the zero of the others.
        router[0], router[1] = (
            direction,
            -direction,
        )


@pytest.mark.daily("sequence")
@THREE
def test_ties_of_scores(pools: Pools, layout: dict[str, Any]) -> None:
    equal(pools, Case(qwen3_moe(), auto_class=Tied), **layout)


@pytest.mark.slow
@THREE
def test_a_rank_whose_experts_get_no_token(pools: Pools, layout: dict[str, Any]) -> None:
    equal(
        pools,
        Case(qwen3_moe(num_experts_per_tok=1, norm_topk_prob=False), auto_class=Crowded),
        **layout,
    )


FROZEN = {
    "experts": ("experts",),
    "routers": ("mlp.gate.",),
    "all but experts": ("embed", "attn", "norm", "lm_head", "mlp.gate."),
    "all but routers": ("embed", "attn", "norm", "lm_head", "experts"),
    "all in front of the last experts": ("embed", "layers.0", "attn", "layernorm"),
}


@pytest.mark.daily("sequence-experts", "data-all in front of the last experts")
@pytest.mark.parametrize(
    ("layout", "frozen"),
    pairs(
        ("data", "tensor", "sequence"),
        FROZEN,
        daily=[
            *(("data", kind) for kind in FROZEN),
            ("tensor", "experts"),
            ("sequence", "experts"),
            ("sequence", "routers"),
        ],
    ),
)
def test_frozen(pools: Pools, layout: str, frozen: str) -> None:
    equal(pools, Case(qwen3_moe(), frozen=FROZEN[frozen]), **WAYS[layout])


@pytest.mark.daily("frozen1-data")
@pytest.mark.parametrize(
    "layout", [EP2, SEQUENCE, {"ep_size": 2, "dp_shard_size": 4}], ids=["data", "sequence", "four"]
)
@pytest.mark.parametrize("frozen", [(), ("layers.0.",)])
def test_recomputed(pools: Pools, layout: dict[str, Any], frozen: tuple[str, ...]) -> None:
    equal(
        pools,
        Case(qwen2_moe(), checkpointing=True, accumulation=3, lengths=(13,), frozen=frozen),
        **layout,
    )


@pytest.mark.daily("sequence")
@THREE
def test_a_plain_loop_over_a_model_in_memory(pools: Pools, layout: dict[str, Any]) -> None:
    case = plain.PlainCase(
        qwen3_moe(tie_word_embeddings=True), build="parallelize", hf_kwargs=EAGER
    )
    equal(pools, case, **layout)


@pytest.mark.slow
def test_a_plain_loop_over_biases_of_cut_experts(pools: Pools) -> None:
    """One of the tensor ranks adds such a bias, and data ranks share it out."""
    equal(pools, plain.PlainCase(gpt_oss(), hf_kwargs=EAGER), **CUT)


def saved(config: PreTrainedConfig, directory: Path) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return str(directory)


IDS = torch.randint(3, 67, (4, 12), generator=torch.Generator().manual_seed(1))


def own_rows(model: Any) -> dict[str, torch.Tensor]:
    rows = len(IDS) // hfscale.batch_world(model)
    ids = IDS[rows * hfscale.batch_rank(model) :][:rows]
    return {"input_ids": ids, "labels": ids}


def loaded(path: str, sizes: dict[str, Any], **kwargs: Any) -> Any:
    return hfscale.from_pretrained(
        path, parallel=ParallelConfig(**sizes), **{"dtype": torch.float64, **EAGER, **kwargs}
    )


def answers(path: str, sizes: dict[str, Any]) -> tuple[list[torch.Tensor], list[Any]]:
    """What a model says without gradients, of one token as well, and what it generates, token by token."""
    model = loaded(path, sizes)
    with torch.no_grad():
        logits = [model(input_ids=ids).logits for ids in (IDS, IDS[:1, :1])]
    torch.manual_seed(3)
    tokens = [
        model.generate(
            IDS[:1, :length], do_sample=sample, max_new_tokens=5, pad_token_id=0
        ).tolist()
        for length, sample in ((12, False), (1, True))
    ]
    return [*logits, hfscale.eval_step(model, own_rows(model))], tokens


@pytest.mark.daily("sequence")
@THREE
def test_evaluation_and_generation(pools: Pools, tmp_path: Path, layout: dict[str, Any]) -> None:
    path = saved(qwen3_moe(), tmp_path)
    expected, tokens = answers(path, {})
    for found, generated in pools(2).run(answers, path, layout):
        torch.testing.assert_close(found, expected)
        assert generated == tokens


def norms(path: str, sizes: dict[str, Any]) -> list[float]:
    model = loaded(path, sizes)
    with keep_float64():
        hfscale.train_step(model, own_rows(model))
    return [float(hfscale.clip_grad_norm_(model, 1e9, kind)) for kind in (1.0, 2.0, float("inf"))]


@pytest.mark.daily("layout1")
@pytest.mark.parametrize("layout", [EP2, SEQUENCE, CUT, {"ep_size": 2, "dp_shard_size": 4}])
def test_norms(pools: Pools, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Trap T5."""
    path = saved(qwen2_moe(), tmp_path)
    expected = norms(path, {})
    for found in pools(ParallelConfig(**layout).total_size).run(norms, path, layout):
        assert found == pytest.approx(expected, rel=1e-12)


def decayed(path: str, sizes: dict[str, Any], directory: str) -> None:
    """Steps of an optimizer with momentum and weight decay on the experts; all routes stay."""
    model = loaded(path, sizes)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" in name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3)
    with keep_float64():
        for _ in range(3):
            hfscale.train_step(model, own_rows(model))
            optimizer.step()
            optimizer.zero_grad()
    hfscale.save_pretrained(model, directory)


@pytest.mark.daily("sequence")
@THREE
def test_momentum_and_decay_reach_experts_without_tokens(
    pools: Pools, tmp_path: Path, layout: dict[str, Any]
) -> None:
    """Trap T11: their gradient is zero, and not missing."""
    start, one, many = (str(tmp_path / name) for name in ("start", "one", "many"))
    torch.manual_seed(0)
    model = Crowded.from_config(
        qwen3_moe(num_experts_per_tok=1, norm_topk_prob=False), dtype=torch.float64
    )
    model.save_pretrained(start)
    decayed(start, {}, one)
    pools(2).run(decayed, start, layout, many)
    before, expected, found = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).state_dict()
        for path in (start, one, many)
    )
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)
        if "experts" in name:  # nothing but decay reached the last one
            torch.testing.assert_close(value[3], before[name][3] * (1 - 0.3 * 1e-2) ** 3)
            assert not torch.allclose(value[:2], before[name][:2] * (1 - 0.3 * 1e-2) ** 3)


def finite(path: str, sizes: dict[str, Any], checkpointing: bool) -> list[float]:
    """Losses of steps in which uninitialized memory is NaN."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(2).isnan().all()
    try:
        model = loaded(path, sizes, dtype=torch.float32).train()
        if checkpointing:
            enable_checkpointing(model)
        batch = own_rows(model)
        short = {name: value[:1, :2] for name, value in batch.items()}
        losses = [
            float(hfscale.train_step(model, batches)) for batches in ([batch], [batch, short])
        ]
        for planned, parameter in runtime_of(model).parameters():
            assert parameter.grad is not None, planned.name
            assert local_tensor(parameter.grad).isfinite().all(), planned.name
        return losses
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.daily("layout1-True")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("layout", [EP2, SEQUENCE, CUT])
def test_uninitialized_memory_is_never_read(
    pools: Pools, tmp_path: Path, layout: dict[str, Any], checkpointing: bool
) -> None:
    """Trap T11."""
    path = saved(qwen2_moe(), tmp_path)
    losses = pools(ParallelConfig(**layout).total_size).run(finite, path, layout, checkpointing)
    assert all(found == losses[0] for found in losses)
    assert losses[0][0] == pytest.approx(finite(path, {}, checkpointing)[0], rel=1e-5)


def trained(
    path: str, sizes: dict[str, Any], dtype: str, mixed: str
) -> tuple[list[float], list[float], list[str]]:
    model = loaded(path, sizes, dtype=getattr(torch, dtype), mixed_precision=mixed).train()
    before = [local_tensor(parameter.detach()).clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    lengths = []
    for _ in range(3):
        losses.append(float(hfscale.train_step(model, own_rows(model))))
        lengths.append(float(hfscale.clip_grad_norm_(model, 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    still = [
        name
        for (name, parameter), old in zip(model.named_parameters(), before, strict=True)
        if old.numel() and torch.equal(local_tensor(parameter.detach()), old)
    ]
    return losses, lengths, still


@pytest.mark.daily("bfloat16-no-sequence")
@pytest.mark.parametrize(
    "layout", [EP2, SEQUENCE, {"ep_size": 2, "dp_shard_size": 4}], ids=["data", "sequence", "four"]
)
@pytest.mark.parametrize(("dtype", "mixed"), [("bfloat16", "no"), ("float32", "bf16")])
def test_precisions(
    pools: Pools, tmp_path: Path, layout: dict[str, Any], dtype: str, mixed: str
) -> None:
    path = saved(qwen2_moe(), tmp_path)
    losses, lengths, _ = trained(path, {}, "float32", "no")
    found = pools(ParallelConfig(**layout).total_size).run(trained, path, layout, dtype, mixed)
    for result in found:
        assert result[:2] == found[0][:2]  # one step of all ranks
        assert result[2] == []
        assert result[0] == pytest.approx(losses, rel=2e-2)
        assert result[1] == pytest.approx(lengths, rel=5e-2)


def from_config(config: PreTrainedConfig, sizes: dict[str, Any], directory: str) -> None:
    hfscale.save_pretrained(
        hfscale.from_config(config, parallel=ParallelConfig(**sizes), seed=7), directory
    )


@pytest.mark.daily("gpt_oss-layout2")
@pytest.mark.parametrize("layout", [EP2, SEQUENCE, CUT, {"ep_size": 2, "dp_shard_size": 4}])
@pytest.mark.parametrize("config", [gpt_oss()], ids=["gpt_oss"])
def test_random_weights_do_not_depend_on_the_layout(
    pools: Pools, tmp_path: Path, config: PreTrainedConfig, layout: dict[str, Any]
) -> None:
    """Traps T24 and T29: every expert is there, once, in its place."""
    from_config(config, {}, str(tmp_path / "one"))
    pools(ParallelConfig(**layout).total_size).run(
        from_config, config, layout, str(tmp_path / "many")
    )
    one, many = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("one", "many")
    )
    assert one.keys() == many.keys()
    for name, value in one.items():
        assert torch.equal(value, many[name]), name


def sent(path: str, sizes: dict[str, Any], checkpointing: bool) -> Traffic:
    model = loaded(path, sizes, dtype=torch.float32).train()
    if checkpointing:
        enable_checkpointing(model)
    hfscale.train_step(model, own_rows(model))
    with count_traffic() as traffic:
        hfscale.train_step(model, [own_rows(model)] * 2)
    return traffic


@pytest.mark.daily("sizes0-2-1-True")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("sizes", "senders", "copies"), [(EP2, 2, 1), ({"ep_size": 4, "tp_size": 2}, 4, 1), (CUT, 4, 2)]
)
def test_what_a_step_sends(
    pools: Pools,
    tmp_path: Path,
    sizes: dict[str, Any],
    senders: int,
    copies: int,
    checkpointing: bool,
) -> None:
    """Per layer and microbatch, every route's ``h`` numbers four times, and once how many go where.

    Recomputed layers exchange counts, and rows there and back, once more.
    """
    config = qwen3_moe()
    found = pools(ParallelConfig(**sizes).total_size).run(
        sent, saved(config, tmp_path), sizes, checkpointing
    )
    layers = config.num_hidden_layers
    microbatches = 2
    times = 6 if checkpointing else 4
    # Tensor ranks that cut every expert send each route all the same.
    routes = IDS.numel() * config.num_experts_per_tok * copies
    rows = times * routes * config.hidden_size * 4
    counts = (times // 2 - 1) * senders * config.num_experts * 8
    assert [traffic.calls["alltoall"] for traffic in found] == [
        layers * microbatches * (times + times // 2 - 1)
    ] * senders
    assert sum(traffic.payload["alltoall"] for traffic in found) == layers * microbatches * (
        rows + counts
    )


def test_tensor_ranks_that_share_a_batch_sum_instead(pools: Pools, tmp_path: Path) -> None:
    """No token travels: sums of experts' outputs and of two gradients, and two sums for attention, per layer."""
    payloads = []
    for layers in (2, 3):
        path = saved(qwen3_moe(num_hidden_layers=layers), tmp_path / str(layers))
        found = pools(2).run(sent, path, WHOLE, False)[0]
        assert found.calls["alltoall"] == 0
        payloads.append(found.payload["allreduce"])
    config = qwen3_moe()
    tokens = IDS.numel()
    of_layer = 2 * 4 * (4 * tokens * config.hidden_size + tokens * config.num_experts_per_tok)
    # And once per step, of the norms of heads.
    assert payloads[1] - payloads[0] == of_layer + 4 * 2 * config.head_dim


def _stepped(layout: dict[str, Any], options: dict[str, Any]) -> list[torch.Tensor]:
    model = hfscale.from_config(qwen3_moe(), parallel=ParallelConfig(**layout), seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    ids = torch.arange(26).view(2, 13) % 67
    for _ in range(2):
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
        optimizer.step()
        optimizer.zero_grad()
    return [local_tensor(parameter.detach()).clone() for parameter in model.parameters()]


@pytest.mark.daily("fused-alone")
@pytest.mark.parametrize(
    "layout", [EP2, {"ep_size": 2, "dp_shard_size": 4}], ids=["alone", "sharded"]
)
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
def test_optimizers_take_all_parameters_at_once(
    pools: Pools, layout: dict[str, Any], options: dict[str, Any]
) -> None:
    pool = pools(ParallelConfig(**layout).total_size)
    for one_by_one, together in zip(
        pool.run(_stepped, layout, {"foreach": False}),
        pool.run(_stepped, layout, options),
        strict=True,
    ):
        torch.testing.assert_close(together, one_by_one)
