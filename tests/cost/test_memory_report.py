"""What a rank holds is what the plan says, to the byte; what layers keep for the backward pass, within 5%."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig, MixtralConfig, PreTrainedConfig

import hfscale
from hfscale import ParallelConfig
from hfscale._compat.transformers.computing import enable_checkpointing
from hfscale.cost.model.optimizer_bytes import NAMES
from hfscale.cost.tools.memory_report import held_bytes
from hfscale.errors import ConfigError
from hfscale.features.memory.saved import count_saved
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of

from ..families import config_of
from ..features.quantization.models import four_bits, save, wide
from ..sweeps import cases, pairs
from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
ROWS = 4
LENGTH = 32
LORA: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
TP = {"tp_size": 2}
SHARD = {"dp_shard_size": 2}
PP = {"pp_size": 2, "num_microbatches": 2}
SEQUENCE = {**TP, "sequence_parallel": True}


def llama(**changes: Any) -> PreTrainedConfig:
    """67 tokens, 50 and 90 rows: cuts are ragged."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 90,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    return tiny("llama", **{**sizes, **changes})


def mixture(**changes: Any) -> PreTrainedConfig:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    experts = {
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 67,
    }
    return MixtralConfig(**{**sizes, **experts, **changes})


def measured(
    source: Any,
    layout: dict[str, Any],
    optimizer: str,
    lora: dict[str, Any] | None = None,
    quantization: BitsAndBytesConfig | None = None,
    dtype: torch.dtype = torch.float32,
    options: dict[str, Any] | None = None,
    **estimate: Any,
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Predicted bytes, those that are held after a step, and those that were saved in a step."""
    adapters = None if lora is None else LoraConfig(**lora)
    kwargs: dict[str, Any] = {
        "parallel": ParallelConfig(**layout),
        "dtype": dtype,
        "peft_config": adapters,
    }
    if isinstance(source, str):
        model = hfscale.from_pretrained(source, quantization_config=quantization, **kwargs).train()
    else:
        model = hfscale.from_config(source, attn_implementation="sdpa", **kwargs).train()
    made = hfscale.create_optimizer(model, optimizer, lr=1e-4, **(options or {}))
    runtime = runtime_of(model)
    rows = ROWS // hfscale.batch_world(model)
    microbatches = layout.get("num_microbatches", 1)
    ids = torch.randint(
        3, 60, (rows * microbatches, LENGTH), generator=torch.Generator().manual_seed(0)
    )
    with count_saved(runtime.model, runtime.plan.layers, runtime.plan.head) as saved:
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    made.step()
    estimated = hfscale.memory_estimate(
        model, optimizer, tokens=rows * LENGTH, optim_args=options, **estimate
    )
    found = {
        "layers": saved.layers,
        "around": saved.around,
        "head": saved.head,
        "total": saved.total,
    }
    return estimated.kinds, held_bytes(model, made), found


def check(
    ranks: list[tuple[dict[str, int], dict[str, int], dict[str, int]]], saved: float | None = 0.05
) -> None:
    for predicted, held, kept in ranks:
        assert {kind: predicted[kind] for kind in held} == held
        if saved is not None:
            assert kept["layers"] + kept["around"] == pytest.approx(
                predicted["activations"], rel=saved
            )


LAYOUTS = {"one": {}, "tp2": TP, "sequence": SEQUENCE, "shard2": SHARD, "pp2": PP}


FUSED = "adamw_torch_fused"
EIGHT = "adamw_8bit"
WAYS = [
    ("one", EIGHT, "full"),
    ("tp2", FUSED, "lora"),
    ("sequence", FUSED, "full"),
    ("shard2", EIGHT, "lora"),
]
WAYS += [("pp2", FUSED, "full")]


@pytest.mark.parametrize(
    ("layout", "optimizer", "trained"),
    cases(product(LAYOUTS, (FUSED, EIGHT), ("full", "lora")), daily=WAYS),
)
def test_llama(pools: Pools, layout: str, optimizer: str, trained: str) -> None:
    lora = LORA if trained == "lora" else None
    sizes = LAYOUTS[layout]
    check(pools(ParallelConfig(**sizes).total_size).run(measured, llama(), sizes, optimizer, lora))


ZBV = {"pp_size": 2, "num_microbatches": 2, "pipeline_schedule": "zbv"}


def test_what_a_stage_hands_to_one_of_its_rank_is_kept_once(pools: Pools) -> None:
    check(
        pools(2).run(measured, llama(num_hidden_layers=4, intermediate_size=176), ZBV, "sgd"),
        saved=0.012,
    )


def under_way(schedule: str) -> tuple[dict[str, int], dict[str, int], float, int, int]:
    """Predicted bytes, those that are held and were saved while there are microbatches under way, and versions."""
    microbatches = 2 if schedule == "pipedream_2bw" else 1
    layout = {"pp_size": 2, "pipeline_schedule": schedule} | (
        {"num_microbatches": 2} if microbatches > 1 else {}
    )
    model = hfscale.from_config(
        llama(num_hidden_layers=4), parallel=ParallelConfig(**layout), dtype=torch.float32
    )
    runtime = runtime_of(model.train())
    optimizer = hfscale.create_optimizer(model, "sgd", lr=1e-4)
    ids = torch.randint(
        3, 60, (ROWS * microbatches, LENGTH), generator=torch.Generator().manual_seed(0)
    )
    with count_saved(model, runtime.plan.layers, runtime.plan.head) as saved:
        for _ in range(3):
            optimizer.zero_grad()
            hfscale.train_step(model, {"input_ids": ids, "labels": ids})
            optimizer.step()
    estimated = hfscale.memory_estimate(model, "sgd", tokens=ROWS * LENGTH)
    held = held_bytes(model, optimizer)
    versions = held["weights"] // sum(parameter.nbytes for _, parameter in runtime.parameters())
    for _ in hfscale.drain(model):
        pass
    return estimated.kinds, held, estimated.activations, saved.layers + saved.around, versions


@pytest.mark.parametrize(
    "schedule", ["pipedream", pytest.param("pipedream_2bw", marks=pytest.mark.slow)]
)
def test_older_weights_and_gradients_that_wait(pools: Pools, schedule: str) -> None:
    """Without a flush: of all microbatches that are under way between two steps."""
    for rank, (predicted, held, activations, saved, versions) in enumerate(
        pools(2).run(under_way, schedule)
    ):
        assert versions == 2 - rank
        assert {kind: predicted[kind] for kind in held} == held
        assert saved == pytest.approx(activations, rel=0.03)


def put_away(way: str) -> tuple[float, float]:
    """Estimated activations of a stage, and what it keeps: its own, elsewhere, and what it was sent or has sent."""
    config = llama(num_hidden_layers=4, intermediate_size=176)
    model = hfscale.from_config(
        config,
        parallel=ParallelConfig(pp_size=2, num_microbatches=2),
        memory=hfscale.MemoryConfig(**{way: "64"}),
        attn_implementation="sdpa",
        dtype=torch.float32,
    ).train()
    runtime = runtime_of(model)
    alive = (2, 1)[runtime.mesh.ranks["pp"]]
    ids = torch.randint(3, 60, (2 * ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    with count_saved(model, (), runtime.plan.head) as saved:
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    found = hfscale.memory_estimate(model, tokens=ROWS * LENGTH)
    told = hfscale.metrics(model)
    elsewhere = told[
        "compressed_activation_bytes" if "compress" in way else "offloaded_activation_bytes"
    ]
    # One of them: the first stage was sent nothing, the last sends nothing.
    ends = alive * ROWS * LENGTH * 64 * 4
    read = 2 * ROWS * LENGTH * 176 * 4  # of the other: what the product in its MLP reads
    # One of two layers, of a microbatch.
    fetched = found.on_host / 2 / alive + read * bool(found.on_host)
    return found.activations - fetched + found.on_host, saved.around + ends + elsewhere / 2 * alive


@pytest.mark.parametrize("way", ["compress_activations", "offload_activations"])
def test_ends_of_stages_stay_as_they_are(pools: Pools, way: str) -> None:
    for estimated, counted in pools(2).run(put_away, way):
        assert estimated == pytest.approx(counted, rel=0.03)


def several(cases: list[tuple[Any, ...]]) -> list[Any]:
    return [measured(*case) for case in cases]


CONTEXT: dict[str, dict[str, Any]] = {
    "gather2": {"cp_size": 2, "cp_method": "gather"},
    "ring2": {"cp_size": 2, "cp_method": "ring"},
    "heads2": {"cp_size": 2, "cp_method": "heads"},
    "heads4": {"cp_size": 4, "cp_method": "heads"},
    "heads_ring4": {"cp_size": 4, "cp_method": "heads_ring"},
    "ring2-tp2": {"cp_size": 2, "cp_method": "ring", "tp_size": 2},
}


@pytest.mark.daily("ring2-tp2-full", "heads2-lora")
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("layout", CONTEXT)
def test_context_ranks(pools: Pools, layout: str, lora: dict[str, Any] | None) -> None:
    """Key heads are replicated where there are fewer than ranks; a head of 16 has a logarithm of one entry."""
    sizes = CONTEXT[layout]
    ranks = pools(ParallelConfig(**sizes).total_size).run(
        measured, llama(), sizes, "adamw_torch_fused", lora
    )
    check(ranks, saved=0.03)


@pytest.mark.parametrize("layout", ["tp2", pytest.param("shard2", marks=pytest.mark.slow)])
def test_every_optimizer(pools: Pools, layout: str) -> None:
    """In ragged shares; with 8 bits also for small tensors, some of which are stepped whole."""
    names = [(name, None) for name in NAMES]
    changed = [
        ("sgd", {"momentum": 0.9}),
        ("adamw_torch", {"amsgrad": True}),
        ("adamw_8bit", {"min_8bit_size": 64}),
    ]
    cases = [
        (llama(), LAYOUTS[layout], name, None, None, torch.float32, made)
        for name, made in [*names, *changed]
    ]
    for rank in pools(2).run(several, cases):
        check(rank)


def mixed(layout: dict[str, Any], lora: dict[str, Any] | None, precision: str) -> tuple[int, int]:
    """What is predicted of layers, autocast's copies of their weights included, and what was saved in a step."""
    adapters = None if lora is None else LoraConfig(**lora)
    asked: dict[str, Any] = {
        "mixed_precision": precision,
        "peft_config": adapters,
        "attn_implementation": "sdpa",
    }
    # A layer's input is there, though not kept, while it runs.
    layers = 8 if precision == "bf16_params" else 3
    config = llama(intermediate_size=96, num_hidden_layers=layers)
    model = hfscale.from_config(config, parallel=ParallelConfig(**layout), **asked).train()
    runtime = runtime_of(model)
    rows = ROWS * layout.get("num_microbatches", 1)
    ids = torch.randint(3, 60, (rows, 2 * LENGTH), generator=torch.Generator().manual_seed(0))
    with count_saved(runtime.model, runtime.plan.layers, runtime.plan.head) as saved:
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    estimated = hfscale.memory_estimate(model, tokens=ROWS * 2 * LENGTH)
    held = {planned.name: parameter for planned, parameter in runtime.parameters()}
    head = 2 * held["lm_head.weight"].numel() if "lm_head.weight" in held else 0
    if precision == "bf16_params":  # copies take the places of parameters, which are not counted
        assert estimated.gathered == 2 * sum(parameter.numel() for parameter in held.values())
        return estimated.activations, saved.layers + saved.around
    return estimated.activations + estimated.gathered - head, saved.layers + saved.around


@pytest.mark.daily("sequence-bf16_params")
@pytest.mark.parametrize(
    ("layout", "precision"),
    pairs(
        ["one", "tp2", "sequence", "pp2"],
        ["bf16", "bf16_params", "fp8"],
        daily=[("sequence", "bf16"), ("pp2", "bf16"), ("sequence", "bf16_params")],
    ),
)
def test_mixed_precision_without_data_ranks(pools: Pools, layout: str, precision: str) -> None:
    """Between blocks in 32 bits, within in 16; every projection has a copy of its own of what it reads."""
    sizes = LAYOUTS[layout]
    for lora in (None, LORA):
        for predicted, found in pools(ParallelConfig(**sizes).total_size).run(
            mixed, sizes, lora, precision
        ):
            # Where values between blocks are not wide, the input of the layer that runs weighs more: it is counted,
            # and estimated nowhere; likewise in a model of 16 bits.
            assert found == pytest.approx(
                predicted, rel=0.03 if precision == "bf16_params" else 0.02
            )


OTHERS: dict[str, tuple[PreTrainedConfig, dict[str, Any], dict[str, Any] | None, torch.dtype]] = {
    "tied, in stages": (llama(tie_word_embeddings=True), PP, None, torch.float32),
    "gathered again": (llama(), {**SEQUENCE, "sequence_regather": True}, None, torch.float32),
    "gathered again, lora": (llama(), {**SEQUENCE, "sequence_regather": True}, LORA, torch.float32),
    "qwen2": (tiny("qwen2"), TP, LORA, torch.float32),
    "qwen3": (tiny("qwen3"), TP, None, torch.float32),
    "16 bits, lora": (llama(), SHARD, LORA, torch.bfloat16),
}


@pytest.mark.daily("16 bits, lora", "qwen2", "tied, in stages")
@pytest.mark.parametrize("case", OTHERS)
def test_other_layers(pools: Pools, case: str) -> None:
    config, layout, lora, dtype = OTHERS[case]
    check(pools(2).run(measured, config, layout, "adamw_torch", lora, None, dtype))


EXPERTS: dict[str, Any] = {
    **LORA,
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


@pytest.mark.parametrize("lora", [None, EXPERTS], ids=["full", "lora"])
@pytest.mark.parametrize("axis", ["dp_shard_size", "tp_size"])
def test_mixture(pools: Pools, axis: str, lora: dict[str, Any] | None) -> None:
    ranks = pools(2).run(measured, mixture(), {"ep_size": 2, axis: 2}, "adamw_8bit", lora)
    check(ranks, saved=None)
    assert all(
        kept["layers"] + kept["around"] < predicted["activations"] for predicted, _, kept in ranks
    )


@pytest.mark.daily("pp2")
@pytest.mark.parametrize("layout", ["tp2", "shard2", "pp2"])
def test_quantized(pools: Pools, tmp_path: Path, layout: str) -> None:
    path = save(wide("llama"), tmp_path)
    for quantization in (
        four_bits(),
        four_bits(double=True),
        BitsAndBytesConfig(load_in_8bit=True),
    ):
        check(pools(2).run(measured, path, LAYOUTS[layout], "adamw_8bit", LORA, quantization))


def test_quantized_experts(pools: Pools, tmp_path: Path) -> None:
    path = save(mixture(hidden_size=128, intermediate_size=128), tmp_path)
    layout = {"ep_size": 2, "dp_shard_size": 2}
    check(
        pools(2).run(measured, path, layout, "adamw_8bit", EXPERTS, four_bits(double=True)),
        saved=None,
    )


@pytest.mark.parametrize("lora", [None, {**LORA, "fan_in_fan_out": True}], ids=["full", "lora"])
def test_an_estimate_from_above(lora: dict[str, Any] | None) -> None:
    predicted, _, kept = measured(tiny("gpt2"), {}, "sgd", lora)
    assert (
        0.4 * predicted["activations"] < kept["layers"] + kept["around"] < predicted["activations"]
    )


def test_what_runs_on_whole_sequences_is_kept_of_them(pools: Pools) -> None:
    for predicted, _, kept in pools(2).run(measured, config_of("lfm2"), {"cp_size": 2}, "sgd"):
        assert (
            0.3 * predicted["activations"]
            < kept["layers"] + kept["around"]
            < predicted["activations"]
        )


def test_recomputed_layers_keep_their_inputs() -> None:
    model = hfscale.from_config(llama())
    without = hfscale.memory_estimate(model, tokens=128)
    runtime = runtime_of(model)
    ids = torch.arange(128).view(4, 32) % 60
    with count_saved(model, runtime.plan.layers, runtime.plan.head) as whole:
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    enable_checkpointing(model)
    recomputed = hfscale.memory_estimate(model, tokens=128)
    with count_saved(model, runtime.plan.layers, runtime.plan.head) as saved:
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    one = 128 * 64 * 4
    # Transformers 5.17 keeps a layer's input before the layer is called, and so around the layers.
    assert saved.layers + saved.around - whole.around == pytest.approx(3 * one, rel=0.1)
    beside = whole.layers / 3 - one  # of a layer that is computed again, whose input is kept anyway
    assert recomputed.activations == pytest.approx(saved.layers + saved.around + beside, rel=0.02)
    assert recomputed.activations < without.activations
    assert recomputed.weights == without.weights


def test_what_cannot_be_estimated_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"memory_estimate needs a model .* got 'llama'"):
        hfscale.memory_estimate("llama")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="optimizer 'adamx' is unknown: use one of adafactor"):
        hfscale.memory_estimate(hfscale.plan(tiny("llama")), "adamx")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"tokens": -1}, "tokens=-1 is invalid: use a whole number"),
        ({"tokens": "4K"}, "tokens='4K' is invalid"),
        ({"num_microbatches": 0}, "num_microbatches=0 is invalid"),
        ({"gradient_checkpointing": "full"}, "gradient_checkpointing='full' is not a switch"),
        ({"mixed_precision": "bf17"}, "mixed_precision='bf17' is unknown"),
        ({"optim_args": 3}, "optim_args=3 cannot be read"),
    ],
)
def test_nonsense_is_not_estimated(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        hfscale.memory_estimate(hfscale.plan(tiny("llama")), **asked)
