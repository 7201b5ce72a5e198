"""Losses of balance, other routers and the update of biases do not depend on how a step is divided.

The definition itself is compared with a formula of a few lines on the stock model; layouts with one process of hfscale
that gets everything in one batch.
"""

import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    DeepseekV3Config,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
)

import hfscale
from hfscale import ParallelConfig, RoutingConfig
from hfscale._compat.transformers.computing import enable_checkpointing
from hfscale._compat.transformers.experts import router_logits, use_eager_experts
from hfscale.models.precision import keep_float64, make_float64
from hfscale.testing import RankPool
from hfscale.testing.parity import ragged_batch
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.shards import local_tensor

Pools = Callable[[int], RankPool]

_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 67,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Families whose routers have their bias elsewhere than DeepSeek's: a frozen parameter, one within a module, a buffer of
# the block.
_OTHER_BIASES: dict[str, dict[str, Any]] = {
    "afmoe": {
        "num_experts": 4,
        "num_dense_layers": 1,
        "head_dim": 8,
        "layer_types": ["full_attention"] * 2,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_layer_start_index": 0,
        "moe_num_shared_experts": 1,
    },
    "lfm2_moe": {"num_experts": 4, "num_dense_layers": 0, "layer_types": ["full_attention"] * 2},
}
_LOSSES = RoutingConfig(balance_loss=0.3, z_loss=0.05)


def _config(family: str) -> PreTrainedConfig:
    if family == "deepseek_v3":
        latent = {
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
        }
        groups = {"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 0}
        small = {**_SMALL, "num_key_value_heads": 4}
        return DeepseekV3Config(**small, **latent, **groups, n_routed_experts=4)
    if family in _OTHER_BIASES:
        return CONFIG_MAPPING[family](**_SMALL, **_OTHER_BIASES[family])
    if family == "qwen2_moe":
        return Qwen2MoeConfig(
            **_SMALL, num_experts=4, shared_expert_intermediate_size=24, decoder_sparse_step=1
        )
    return OlmoeConfig(**{**_SMALL, "num_experts": 4, "rms_norm_eps": 1e-5})


def _names_logits(family: str) -> bool:
    """Whether this version of the host says where a family's router has its logits."""
    with torch.device("meta"):
        return bool(router_logits(AutoModelForCausalLM.from_config(_config(family))))


def _microbatches(third: int = 1) -> list[dict[str, Tensor]]:
    """Four of two sequences, of different lengths, some padded; the third, of one token, without any label."""
    generator = torch.Generator().manual_seed(7)
    return [
        ragged_batch(generator, 67, 2, length, masked=i == 2)
        for i, length in enumerate((13, 8, third, 13))
    ]


def _together(microbatches: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One batch with all sequences, padded at their ends."""
    length = max(batch["input_ids"].shape[1] for batch in microbatches)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: torch.cat(
            [
                torch.nn.functional.pad(
                    batch[name], (0, length - batch[name].shape[1]), value=value
                )
                for batch in microbatches
            ]
        )
        for name, value in fill.items()
    }


def _stored(config: PreTrainedConfig, directory: Path) -> Path:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.6 if "gate.weight" in name else 0.05  # routers that prefer some experts
            parameter.add_(torch.randn_like(parameter) * scale)
    model.save_pretrained(directory / "start")
    return directory / "start"


def _loaded(start: Path, layout: ParallelConfig | None, routing: RoutingConfig | None) -> Any:
    with make_float64():
        model = hfscale.from_pretrained(
            str(start), parallel=layout, dtype=torch.float64, routing=routing
        )
    return _double(model)


def _double(model: Any) -> Any:
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    use_eager_experts(model)
    return model.train()


def _run(
    start: str,
    layout: ParallelConfig | None,
    routing: RoutingConfig | None,
    division: str,
    checkpointing: bool | None,
    compare: str | None,
) -> dict[str, Any]:
    """Two steps; what they gave, or the largest differences to what is stored at ``compare``."""
    model = _loaded(Path(start), layout, routing)
    if checkpointing is not None:
        contexts = {} if checkpointing else {"context_fn": lambda: (nullcontext(), keep_float64())}
        enable_checkpointing(model, use_reentrant=checkpointing, **contexts)
    runtime = runtime_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    every = _microbatches()
    found = []
    mine = every[hfscale.batch_rank(model) :: hfscale.batch_world(model)]
    with keep_float64():
        for _ in range(2):
            evaluated = hfscale.eval_step(model, _together(every) if division == "one" else mine)
            loss = hfscale.train_step(model, _together(every) if division == "one" else mine)
            gradients = {
                p.name: local_tensor(t.grad) for p, t in runtime.parameters() if t.grad is not None
            }
            load = hfscale.expert_load(model) if routing is not None else None
            norm = hfscale.clip_grad_norm_(model, 0.5)
            optimizer.step()
            weights = {p.name: local_tensor(t.detach()) for p, t in runtime.parameters()}
            biases = {name: b for name, b in model.named_buffers() if name.endswith("_bias")}
            saved = {name: {n: t.clone() for n, t in tensors.items()} for name, tensors in
                     (("gradients", gradients), ("weights", weights), ("biases", biases))}  # fmt: skip
            found.append(
                {"loss": loss, "evaluated": evaluated, "norm": norm, "load": load, **saved}
            )
            optimizer.zero_grad()
    if compare is None:
        return {"steps": found}
    worst: dict[str, float] = {}

    def worse(name: str, error: float) -> None:
        worst[name] = max(worst.get(name, 0.0), error if math.isfinite(error) else math.inf)

    for step, expected in zip(found, torch.load(compare, weights_only=False)["steps"], strict=True):
        for name in ("loss", "evaluated", "norm"):
            worse(name, float((step[name] - expected[name]).abs() / expected[name].abs()))
        for kind in ("gradients", "weights"):
            largest = max(float(tensor.abs().max()) for tensor in expected[kind].values())
            for name, tensor in step[kind].items():
                whole = expected[kind][name]
                part = runtime.plan.by_name[name].take(whole, runtime.mesh.ranks)
                error = (tensor - part).abs().max() if tensor.numel() else torch.zeros(())
                worse(f"{kind} {name}", float(error / whole.abs().max().clamp(min=1e-6 * largest)))
        for name, tensor in step["biases"].items():
            worse(name, float((tensor - expected["biases"][name]).abs().max()))
        if step["load"] is not None:
            for layer, wanted in zip(step["load"].layers, expected["load"].layers, strict=True):
                worse("dropped", abs(layer.dropped - wanted.dropped))
                for part in ("balance_loss", "z_loss"):
                    worse(part, abs(getattr(layer, part) - getattr(wanted, part)))
    return worst


def _compare(
    pools: Pools,
    layout: ParallelConfig | None,
    routing: RoutingConfig,
    family: str = "olmoe",
    checkpointing: bool | None = None,
) -> None:
    with tempfile.TemporaryDirectory() as name:
        start = _stored(_config(family), Path(name))
        reference = _run(str(start), None, routing, "one", None, None)
        torch.save(reference, f"{name}/reference.pt")
        arguments = (str(start), layout, routing, "many", checkpointing, f"{name}/reference.pt")
        if layout is None or layout.total_size == 1:
            found = [_run(*arguments)]
        else:
            found = pools(layout.total_size).run(_run, *arguments)
    for rank, worst in enumerate(found):
        # Reentrant recomputation is beyond the reach of what keeps stock code in 64 bits.
        tolerance = 1e-5 if checkpointing else 1e-10
        wrong = {key: value for key, value in worst.items() if not value <= tolerance}
        assert not wrong, f"rank {rank} of {layout and layout.describe()}: {wrong}"


# --- the definition ---------------------------------------------------------------------------------------------------


def _formula(model: Any, batch: dict[str, Tensor], balance: float, z: float, scores: str) -> Tensor:
    """Token mean, balance and z-loss on a stock model, sequence by sequence, as the papers write them."""
    captured: list[tuple[Tensor, Tensor]] = []
    hooks = [
        block.gate.register_forward_hook(
            lambda module, args, output: captured.append((output[0], output[2]))
        )
        for block in model.modules()
        if hasattr(block, "experts") and hasattr(block, "gate")
    ]
    loss: Tensor = model(**batch).loss
    for hook in hooks:
        hook.remove()
    mask = batch["attention_mask"].bool()
    samples, length = mask.shape
    assert len(captured) == 2
    for logits, index in captured:
        logits = logits.view(samples, length, -1)
        index = index.view(samples, length, -1)
        count = logits.shape[-1]
        k = index.shape[-1]
        for row in range(samples):
            own = logits[row][mask[row]]
            chosen = index[row][mask[row]]
            p = (
                own.softmax(-1)
                if scores == "softmax"
                else own.sigmoid() / own.sigmoid().sum(-1, keepdim=True)
            )
            f = (
                torch.stack([(chosen == expert).sum() for expert in range(count)]).double()
                * count
                / (k * len(own))
            )
            loss = loss + balance * (f * p.mean(0)).sum() * len(own) / mask.sum()
            loss = loss + z * own.exp().sum(-1).log().square().sum() / mask.sum()
    return loss


@pytest.mark.daily("deepseek_v3-sigmoid")
@pytest.mark.parametrize(
    ("family", "scores"),
    [("olmoe", "softmax"), ("qwen2_moe", "softmax"), ("deepseek_v3", "sigmoid")],
)
def test_losses_are_the_papers(family: str, scores: str, tmp_path: Path) -> None:
    if not _names_logits(family):
        pytest.skip("this version of transformers does not record the logits of its router")
    start = _stored(_config(family), tmp_path)
    batch = _together(_microbatches(third=11))
    stock = _double(AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64))
    model = _loaded(start, None, _LOSSES)
    with keep_float64():
        expected = _formula(stock, batch, _LOSSES.balance_loss, _LOSSES.z_loss, scores)
        expected.backward()
        loss = hfscale.train_step(model, batch)
        torch.testing.assert_close(hfscale.eval_step(model, batch), loss, rtol=1e-12, atol=0)
        gradients = dict(model.named_parameters())
        for name, parameter in stock.named_parameters():
            torch.testing.assert_close(
                gradients[name].grad, parameter.grad, rtol=1e-9, atol=1e-12, msg=name
            )
        plain = hfscale.train_step(_loaded(start, None, None), batch)
    torch.testing.assert_close(loss, plain, rtol=1e-12, atol=0)  # the token mean alone
    load = hfscale.expert_load(model)
    parts = sum(
        _LOSSES.balance_loss * layer.balance_loss + _LOSSES.z_loss * layer.z_loss
        for layer in load.layers
    )
    assert float(expected.detach() - plain) == pytest.approx(parts)
    assert all(layer.balance_loss > 1.01 for layer in load.layers), (
        "a router without preferences would hide errors"
    )


def test_a_plain_loop_adds_them_too_and_scales_their_gradient(tmp_path: Path) -> None:
    start = _stored(_config("olmoe"), tmp_path)
    batch = _together(_microbatches(third=11))
    model = _loaded(start, None, _LOSSES)
    other = _loaded(start, None, _LOSSES)
    with keep_float64():
        load = _LOSSES
        tokens = hfscale.train_step(other, batch)
        loss = model(**batch).loss
        (3 * loss).backward()
    layers = hfscale.expert_load(other).layers
    parts = sum(
        load.balance_loss * layer.balance_loss + load.z_loss * layer.z_loss for layer in layers
    )
    expected = float(tokens) + parts
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-12)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, 3 * theirs.grad, rtol=1e-9, atol=1e-12)
    values = model(**batch, return_dict=False)
    assert float(values[0].detach()) == pytest.approx(expected, rel=1e-6)
    with torch.no_grad():
        assert model(input_ids=batch["input_ids"]).loss is None


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_padding_in_a_mask_of_four_dims_is_left_out(kind: str, tmp_path: Path) -> None:
    start = _stored(_config("olmoe"), tmp_path)
    batch = _together(_microbatches(third=11))
    model = _loaded(start, None, _LOSSES)
    length = batch["input_ids"].shape[1]
    allowed = (
        torch.ones(length, length, dtype=torch.bool).tril()
        & batch["attention_mask"].bool()[:, None, None, :]
    )
    mask = (
        allowed
        if kind == "bool"
        else torch.zeros(allowed.shape).double().masked_fill(~allowed, -1e30)
    )
    with keep_float64(), torch.no_grad():
        expected = model(**batch).loss
        found = model(**{**batch, "attention_mask": mask}).loss
        without = model(**{name: x for name, x in batch.items() if name != "attention_mask"}).loss
    assert float(found) == pytest.approx(float(expected), rel=1e-9)
    assert float(without) != pytest.approx(float(expected), rel=1e-4)


def test_the_gradient_reaches_a_router_that_nothing_else_trains(tmp_path: Path) -> None:
    start = _stored(_config("olmoe"), tmp_path)
    batch = _together(_microbatches(third=11))
    for routing in (_LOSSES, None):
        model = _loaded(start, None, routing)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("gate.weight" in name)
        with keep_float64():
            hfscale.train_step(model, {**batch, "labels": batch["labels"].fill_(-100)})
        size = model.model.layers[0].mlp.gate.weight.grad.abs().max()
        assert (size > 1e-3) == (routing is not None)


# --- the layouts ------------------------------------------------------------------------------------------------------

_LAYOUTS = [
    ParallelConfig(ep_size=2),
    ParallelConfig(dp_shard_size=2),
    ParallelConfig(tp_size=2),
    ParallelConfig(tp_size=2, sequence_parallel=True),
    ParallelConfig(tp_size=2, ep_size=2),
    ParallelConfig(tp_size=2, ep_size=2, sequence_parallel=True),
]
_WIDE = [
    ParallelConfig(tp_size=2, ep_size=4, sequence_parallel=True),
    ParallelConfig(tp_size=2, ep_size=2, expert_tp_size=2),
    ParallelConfig(pp_size=2, ep_size=2),
    ParallelConfig(pp_size=2, tp_size=2, sequence_parallel=True),
]


def _name(layout: Any) -> str:
    return (
        str(layout.describe()).replace(" ", "")
        if isinstance(layout, ParallelConfig)
        else str(layout)
    )


def test_losses_do_not_depend_on_accumulation(pools: Pools) -> None:
    _compare(pools, None, _LOSSES)


@pytest.mark.daily("tp2xdp_shard2,sequenceparallel,ep4")
@pytest.mark.parametrize("layout", [*_LAYOUTS, *_WIDE], ids=_name)
def test_losses_do_not_depend_on_the_layout(pools: Pools, layout: ParallelConfig) -> None:
    _compare(pools, layout, _LOSSES)


@pytest.mark.daily("dp_shard2xpp2,ep2-True", "None-False")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("layout", [None, _LAYOUTS[0], _LAYOUTS[-1], _WIDE[2]], ids=_name)
def test_recomputation_counts_once(
    pools: Pools, layout: ParallelConfig | None, reentrant: bool
) -> None:
    _compare(pools, layout, _LOSSES, checkpointing=reentrant)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [_LAYOUTS[0], _LAYOUTS[-1], _WIDE[2]], ids=_name)
def test_losses_of_a_sigmoid_router_and_updates_of_its_bias(
    pools: Pools, layout: ParallelConfig
) -> None:
    balance = 0.3 if _names_logits("deepseek_v3") else 0.0
    _compare(
        pools, layout, RoutingConfig(balance_loss=balance, bias_update_rate=0.01), "deepseek_v3"
    )


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("afmoe", {"dp_shard_size": 2}),
        ("afmoe", {"pp_size": 2}),
        ("afmoe", {"tp_size": 2, "ep_size": 2}),
        ("lfm2_moe", {"tp_size": 2}),
    ],
)
def test_biases_are_found_by_their_role(pools: Pools, family: str, layout: dict[str, int]) -> None:
    """Frozen parameters, which data ranks shard, move with the weights that are compared."""
    _compare(pools, ParallelConfig(**layout), RoutingConfig(bias_update_rate=0.01), family)


@pytest.mark.daily("tp2xdp_shard2,ep2ofexpertscutovertp2")
@pytest.mark.parametrize("layout", [None, *_LAYOUTS, _WIDE[1], _WIDE[2]], ids=_name)
def test_who_is_dropped_does_not_depend_on_the_layout(
    pools: Pools, layout: ParallelConfig | None
) -> None:
    _compare(pools, layout, RoutingConfig(router="switch", capacity_factor=1.0, balance_loss=0.1))


@pytest.mark.daily("tp2,sequenceparallel,ep2")
@pytest.mark.parametrize("layout", [_LAYOUTS[0], _LAYOUTS[-1], _WIDE[2]], ids=_name)
def test_two_routes_with_room_for_some_and_recomputation(
    pools: Pools, layout: ParallelConfig
) -> None:
    _compare(pools, layout, RoutingConfig(capacity_factor=0.75), checkpointing=False)
