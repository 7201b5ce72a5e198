"""What is computed again in the backward pass changes no gradient, in any layout; and what is kept is a formula."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hfscale
from hfscale import ConfigError, MemoryConfig, ParallelConfig, PlanError
from hfscale._compat.torch import tree_leaves
from hfscale.features.memory.recomputation import Recomputation, Wanted, recompute
from hfscale.features.memory.saved import count_saved
from hfscale.testing import Case, RankPool, assert_layout_equal
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.shards import local_tensor

from ...families import config_of
from ...layouts import named
from ...mixtures import EAGER, qwen3_moe
from ...sweeps import cases, pairs
from ...tiny_models import tiny
from ..quantization.models import four_bits, save, wide

Pools = Callable[[int], RankPool]
LAYOUTS: dict[str, dict[str, Any]] = {
    **named(
        "one",
        "tp2",
        "sequence",
        "regather",
        "1f1b",
        "zbv",
        "shard2",
        "replicate2",
        "ep2",
        "ep2, tp2",
        "cp2",
    ),
    **{f"lora, {name}": sizes for name, sizes in named("tp2", "sequence", "shard2").items()},
    **named("pp2, tp2"),
}
WAYS: dict[str, MemoryConfig] = {
    "full": MemoryConfig(recompute="full"),
    "selective": MemoryConfig(recompute="selective"),
    "elementwise": MemoryConfig(recompute="elementwise"),
    "tiles": MemoryConfig(recompute="full", tile_tokens=5),
    "second": MemoryConfig(recompute=2),
    "modules": MemoryConfig(recompute=["mlp", "self_attn", "input_layernorm"]),
    "within": MemoryConfig(recompute=["act_fn", "q_proj", "post_attention_layernorm"]),
    "kept": MemoryConfig(
        recompute="full", recompute_keep=["aten.mm", "aten.addmm.default", "aten.bmm"]
    ),
    "budget": MemoryConfig(recompute="150KB"),
}
REFUSED = {("modules", "regather"), ("within", "regather"), ("selective", "cp2")}
REFUSED |= {("tiles", "regather"), ("tiles", "ep2"), ("tiles", "ep2, tp2")}


def case_of(layout: str, way: str) -> Case:
    mixture = layout.startswith("ep2")
    config = qwen3_moe(num_hidden_layers=3) if mixture else tiny("llama", num_hidden_layers=4)
    kwargs = dict(EAGER) if mixture else {}
    if way == "selective":
        kwargs["attn_implementation"] = "eager"
    memory = WAYS[way]
    if mixture and way == "within":
        memory = MemoryConfig(recompute=["q_proj", "post_attention_layernorm"])
    if mixture and way == "budget":
        memory = MemoryConfig(recompute="400KB")
    lora = (
        LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM")
        if layout.startswith("lora")
        else None
    )
    return Case(config, accumulation=3, hf_kwargs=kwargs, memory=memory, peft=lora)


@pytest.mark.daily("ep2-kept", "sequence-full", "zbv-selective")
@pytest.mark.parametrize(
    ("layout", "way"),
    [
        case
        for case in pairs(
            LAYOUTS,
            WAYS,
            daily=[
                *((layout, "full") for layout in ("sequence", "zbv", "cp2")),
                *((layout, "selective") for layout in ("tp2", "zbv")),
                *(
                    (layout, "elementwise")
                    for layout in ("sequence", "zbv", "shard2", "ep2, tp2", "cp2")
                ),
                *((layout, "modules") for layout in ("zbv", "ep2, tp2", "lora, shard2")),
                *((layout, "tiles") for layout in ("sequence", "zbv", "shard2")),
                ("ep2", "kept"),
                *((layout, "budget") for layout in ("pp2, tp2", "shard2")),
            ],
        )
        if case.values[::-1] not in REFUSED
    ],
)
def test_equal_to_one_process(pools: Pools, layout: str, way: str) -> None:
    parallel = ParallelConfig(**LAYOUTS[layout])
    pool = pools(parallel.total_size) if parallel.total_size > 1 else None
    assert_layout_equal(case_of(layout, way), parallel, pool)


@pytest.mark.slow
def test_results_are_kept_though_a_recomputation_gathers_more(pools: Pools) -> None:
    """Replicas' experts are gathered inside of a layer, where the first pass has some of them gathered already."""
    config = DeepseekV3Config(
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=67,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
    )
    layout = ParallelConfig(ep_size=2, dp_shard_size=2, dp_replicate_size=2)
    assert_layout_equal(Case(config, hf_kwargs=EAGER, memory=WAYS["kept"]), layout, pools(4))


def kept(
    memory: MemoryConfig | None, layout: dict[str, Any], attention: str, layers: int = 4
) -> tuple[int, int, frozenset[str]]:
    """Bytes that layers kept in a step, what an estimate says of all activations, and the layers recomputed."""
    config = tiny("llama", num_hidden_layers=layers)
    model = hfscale.from_config(
        config,
        parallel=ParallelConfig(**layout),
        memory=memory,
        attn_implementation=attention,
        dtype=torch.float32,
    )
    model.train()
    runtime = runtime_of(model)
    ids = torch.randint(3, 60, (4, 32), generator=torch.Generator().manual_seed(0))
    with count_saved(runtime.model, runtime.plan.layers, runtime.plan.head) as saved:
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    part = runtime.part(Recomputation)
    return (
        saved.layers,
        hfscale.memory_estimate(model, tokens=4 * 32).activations,
        (part and part.chosen) or frozenset(),
    )


TOKENS = 4 * 32
HIDDEN = 32
HEADS = 4
FLOAT = 4
# Sines and cosines of a sequence, which all layers have in common.
ROTARY = 2 * 32 * HIDDEN // HEADS * FLOAT


@pytest.mark.daily("sequence")
@pytest.mark.parametrize("layout", ["one", "tp2", "sequence"])
def test_kept_bytes_are_the_formula(pools: Pools, layout: str) -> None:
    """Recomputed layers keep their input; recomputed attention neither its scores nor what sums them up."""
    sizes = LAYOUTS[layout]
    tp = sizes.get("tp_size", 1)
    run = pools(2).run if tp > 1 else lambda function, *given: [function(*given)]
    stream = TOKENS * HIDDEN * FLOAT // (tp if "sequence" in layout else 1)
    whole, full, second = (
        run(kept, memory, sizes, "sdpa") for memory in (None, WAYS["full"], WAYS["second"])
    )
    flash, scores = (
        [found[0] for found in run(kept, WAYS["selective"], sizes, attention)]
        for attention in ("sdpa", "eager")
    )
    for rank in range(tp):
        assert full[rank][0] == 4 * stream
        layer = (whole[rank][0] - ROTARY) // 4
        assert second[rank][0] == 2 * layer + 2 * stream + ROTARY
        # A logarithm for each row of scores.
        assert flash[rank] == whole[rank][0] - 4 * TOKENS * HEADS * FLOAT // tp
        assert scores[rank] == flash[rank]
        assert full[rank][1] < second[rank][1] < whole[rank][1]


def test_a_budget_takes_as_few_layers_as_it_needs() -> None:
    whole, _, none = kept(MemoryConfig(recompute="100MB"), {}, "sdpa")
    assert not none
    found = {}
    for budget in (800_000, 600_000):
        found[budget], estimate, chosen = kept(MemoryConfig(recompute=f"{budget}B"), {}, "sdpa")
        assert found[budget] < budget
        assert 0 < len(chosen) < 4
        assert estimate < budget + 60_000  # what is around the layers comes on top
    assert found[600_000] < found[800_000] < whole
    with pytest.raises(
        ConfigError,
        match=r"recomputing all 4 layers of this rank still keeps .*: use smaller micro",
    ):
        kept(MemoryConfig(recompute="100KB"), {}, "sdpa")
    # Before anything runs, where the tokens are known.
    with pytest.raises(ConfigError, match="still keeps"):
        hfscale.from_config(tiny("llama"), memory=MemoryConfig(recompute="1KB", tokens=4096))


def gradients(path: str, layout: dict[str, Any], memory: MemoryConfig | None) -> list[Tensor]:
    model = hfscale.from_pretrained(
        path,
        parallel=ParallelConfig(**layout),
        quantization_config=four_bits(),
        peft_config=LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1),
        memory=memory,
        dtype=torch.float32,
    )
    model.train()
    torch.manual_seed(3)
    ids = torch.randint(3, 60, (4, 16), generator=torch.Generator().manual_seed(0))
    hfscale.train_step(model, [{"input_ids": half, "labels": half} for half in ids.chunk(2)])
    return [local_tensor(p.grad) for p in model.parameters() if p.requires_grad]


@pytest.mark.daily("tp2")
@pytest.mark.parametrize("layout", ["tp2", "sequence", "shard2", "1f1b"])
def test_over_four_bits_with_dropout(pools: Pools, tmp_path: Path, layout: str) -> None:
    """The same bits, with the masks of the forward pass."""
    path = save(wide("llama"), tmp_path)
    ways = (
        None,
        WAYS["full"],
        WAYS["selective"],
        MemoryConfig(recompute=["gate_proj", "input_layernorm"]),
    )
    found = [pools(2).run(gradients, path, LAYOUTS[layout], way) for way in ways]
    for other in found[1:]:
        for rank, expected in zip(other, found[0], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(rank, expected, strict=True))


@pytest.mark.parametrize(
    ("config", "ways"),
    [
        (tiny("llama", num_hidden_layers=4), WAYS),
        (config_of("roformer", num_hidden_layers=4), ["full", "second"]),
    ],
    ids=["by name", "by position"],
)
def test_a_plain_loop_with_a_cache(config: Any, ways: list[str]) -> None:
    """Layers are given a cache unless somebody says no, and must not fill it twice."""
    config.use_cache = True
    ids = torch.arange(24).view(2, 12) % 60
    found = []
    for memory in (None, *(WAYS[way] for way in ways)):
        model = hfscale.from_config(config, memory=memory, dtype=torch.float64)
        torch.manual_seed(0)  # some drop activations out
        model(input_ids=ids, labels=ids).loss.backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("memory", "layout", "family", "message"),
    [
        (
            {"recompute": ["mpl"]},
            {},
            "llama",
            "names the module 'mpl', which no layer has: did you mean 'mlp'",
        ),
        (
            {"recompute": "full", "recompute_keep": ["aten.mmm"]},
            {},
            "llama",
            "torch has no operator 'aten.mmm'",
        ),
        (
            {"recompute": "full", "recompute_keep": ["aten.add_"]},
            {},
            "llama",
            "works in place and returns no new tensor",
        ),
        (
            {"recompute": "selective"},
            {"cp_size": 2},
            "llama",
            "keeps no scores: use recompute='none', 'full'",
        ),
        (
            {"recompute": ["mlp"]},
            LAYOUTS["regather"],
            "llama",
            "use recompute='full', or sequence_regather=False",
        ),
        (
            {"recompute": ["attn"]},
            {"tp_size": 2},
            "gpt2",
            "applies dropout to activations sharded over tp_size=2",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_plan(
    memory: dict[str, Any], layout: dict[str, Any], family: str, message: str
) -> None:
    config = tiny(family, resid_pdrop=0.1, attn_pdrop=0.1) if family == "gpt2" else tiny(family)
    with pytest.raises(PlanError, match=message):
        hfscale.plan(config, ParallelConfig(**layout), memory=MemoryConfig(**memory))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"recompute": "fulll"}, "did you mean 'full'"),
        ({"recompute": "8 bits"}, "use one of none, full, selective, elementwise, a number n"),
        ({"recompute": 0}, "use a whole number of at least 1"),
        ({"recompute": True}, "is unknown"),
        ({"recompute": []}, "must have at least one name"),
        ({"recompute": ["mlp", 3]}, "pass a list of names"),
        ({"recompute_keep": ["aten.mm"]}, "recompute='none' recomputes none"),
        (
            {"recompute": "full", "recompute_keep": True},
            "recompute_keep=True is invalid: pass a list of names",
        ),
        ({"tokens": 12}, "needs a memory budget"),
        ({"recompute": "1GB", "tokens": 0}, "at least 1"),
        ({"recomputes": "full"}, "did you mean 'recompute'"),
    ],
)
def test_values_that_mean_nothing(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MemoryConfig(**given)


def test_a_plan_says_what_is_computed_again() -> None:
    def lines(**memory: Any) -> str:
        return str(hfscale.plan(tiny("llama"), memory=MemoryConfig(**memory)))

    assert "computed again in the backward pass: 1 of 2 layers\n" in lines(recompute=2)
    assert "again in the backward pass: model.layers.*.mlp x2\n" in lines(recompute=["mlp"])
    assert "2 of 2 layers; results of aten.mm are kept" in lines(
        recompute="full", recompute_keep=["aten.mm"]
    )
    assert "keep below 1,500,000,000 bytes on a rank" in lines(recompute="1.5 GB")
    assert "attention between its projections" in lines(recompute="selective")
    assert MemoryConfig(recompute="8GiB").budget == 8 << 30
    assert "computed again" not in str(hfscale.plan(tiny("llama")))


# Families without a tiny clone that runs by token ids alone.
_NOT_RUN = {
    "blt",
    "cohere_compass_text",
    "emu3",
    "gemma4_assistant",
    "gemma4_unified_assistant",
    "longcat_flash",
    "mllama",
    "musicgen",
    "musicgen_melody",
    "qwen4_exp",
    "reformer",
    "xlm",
    "zamba",
    "zamba2",
}


@pytest.mark.parametrize(
    "family",
    cases(
        sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - _NOT_RUN),
        daily=["llama", "gpt2", "qwen3_moe", "bert", "nemotron_h"],
    ),
)
def test_random_state_of_the_device_is_kept_for_every_module(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Torch keeps it for the devices of positional tensors only, and hosts call modules of layers by keyword too."""
    model = AutoModelForCausalLM.from_config(
        config_of(family), experts_implementation="eager"
    ).train()
    called, without = list[str](), list[str]()
    for name, module in model.named_modules():
        if re.search(r"\.\d+\.", f"{name}."):  # a layer, or within one
            module.register_forward_pre_hook(lambda *_, name=name: called.append(name))  # type: ignore[misc]
            recompute(module, Wanted(True))

    def device_states(*args: Any) -> tuple[list[int], list[Tensor]]:
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(args)):
            without.append(called[-1])
        return [], []

    # As the module of a GPU is once something has run there.
    used = SimpleNamespace(_initialized=True)
    monkeypatch.setattr(torch.utils.checkpoint, "_get_device_module", lambda _: used)
    monkeypatch.setattr(torch.utils.checkpoint, "get_device_states", device_states)
    model(input_ids=torch.arange(3, 11)[None], use_cache=False)
    assert called
    assert not without
