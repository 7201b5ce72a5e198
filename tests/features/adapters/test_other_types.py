"""PEFT's other types equal stock PEFT in every layout: those whose slices are computed alone (HiRA, RoAd, BEFT, LN
tuning), and those for which every rank computes a whole projection (OFT, HRA, LoKr, ...).
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    BeftConfig,
    BOFTConfig,
    C3AConfig,
    DeftConfig,
    FourierFTConfig,
    GraloraConfig,
    HiraConfig,
    HRAConfig,
    LNTuningConfig,
    LoKrConfig,
    MissConfig,
    OFTConfig,
    PeanutConfig,
    PveraConfig,
    RandLoraConfig,
    RoadConfig,
    UniLoraConfig,
    VBLoRAConfig,
    VeraConfig,
    WaveFTConfig,
    get_peft_model,
)
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ConfigError, MemoryConfig, ParallelConfig
from hfscale.cli import main
from hfscale.testing import Case, RankPool, assert_layout_equal

from ...families import config_of
from ...layouts import OF_ADAPTERS
from ...sweeps import pairs
from ...tiny_models import tiny

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected that the base layer has no bias term"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type"),
    # Of BOFT.
    pytest.mark.filterwarnings("ignore:Failed to load the CUDA extension"),
    pytest.mark.filterwarnings("ignore:Setting boft_n_butterfly_factor"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),
]

Pools = Callable[[int], RankPool]
LAYOUTS = {name: OF_ADAPTERS[name] for name in ("tp2", "sp2", "tp4", "shard2", "pp2", "tp2-shard2")}
CAUSAL = {"task_type": "CAUSAL_LM"}
TARGETS: dict[str, Any] = {
    **CAUSAL,
    "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"],
}


def _biased() -> Any:
    return tiny("llama", attention_bias=True, mlp_bias=True)


def _road(variant: str) -> RoadConfig:
    return RoadConfig(group_size=4, variant=variant, **TARGETS)


def _blocks() -> Any:
    return tiny("llama", intermediate_size=48, attention_bias=True)


KINDS: dict[str, tuple[Callable[[], Any], Any]] = {
    "hira": (lambda: tiny("llama"), HiraConfig(r=4, **TARGETS)),
    "hira on a head": (_biased, HiraConfig(r=4, target_modules=["k_proj", "lm_head"], **CAUSAL)),
    "hira transposed": (
        lambda: tiny("gpt2"),
        HiraConfig(r=4, fan_in_fan_out=True, target_modules=["c_attn", "c_proj"], **CAUSAL),
    ),
    "road 1": (_biased, _road("road_1")),
    "road 2": (lambda: tiny("llama"), _road("road_2")),
    "road 4": (_biased, _road("road_4")),
    "beft": (_biased, BeftConfig(**TARGETS)),
    "beft without biases": (lambda: tiny("llama"), BeftConfig(**TARGETS)),
    "norms": (
        lambda: tiny("llama"),
        LNTuningConfig(target_modules=["input_layernorm", "norm"], **CAUSAL),
    ),
    "norms per head": (
        lambda: tiny("qwen3"),
        LNTuningConfig(target_modules=["q_norm", "k_norm"], **CAUSAL),
    ),
    "boft": (_blocks, BOFTConfig(boft_block_size=4, **TARGETS)),
    "c3a": (_blocks, C3AConfig(block_size=8, **TARGETS)),
    "deft": (_blocks, DeftConfig(r=4, **TARGETS)),
    "gralora": (_blocks, GraloraConfig(r=8, gralora_k=2, **TARGETS)),
    "hra": (_blocks, HRAConfig(r=4, **TARGETS)),
    "hra on heads of groups": (
        lambda: tiny("qwen3"),
        HRAConfig(r=4, target_modules=["k_proj", "v_proj", "gate_proj"], **CAUSAL),
    ),
    "lokr": (_blocks, LoKrConfig(r=4, **TARGETS)),
    "miss": (_blocks, MissConfig(r=4, **TARGETS)),
    "oft": (_blocks, OFTConfig(oft_block_size=4, r=0, **TARGETS)),
    "oft beside fused": (
        lambda: config_of("phi3", 2),
        OFTConfig(oft_block_size=4, r=0, target_modules="all-linear", **CAUSAL),
    ),
    "oft of rows with edges": (
        lambda: config_of("bloom", 2),
        OFTConfig(oft_block_size=4, r=0, target_modules="all-linear", **CAUSAL),
    ),
    "peanut": (_blocks, PeanutConfig(r=4, **TARGETS)),
    "randlora": (_blocks, RandLoraConfig(r=8, randlora_alpha=8, **TARGETS)),
    "randlora transposed": (
        lambda: tiny("gpt2"),
        RandLoraConfig(
            r=8,
            randlora_alpha=8,
            fan_in_fan_out=True,
            target_modules=["c_attn", "c_proj"],
            **CAUSAL,
        ),
    ),
    "unilora": (_blocks, UniLoraConfig(r=4, theta_d_length=37, **TARGETS)),
    "unilora transposed": (
        lambda: tiny("gpt2"),
        UniLoraConfig(r=4, fan_in_fan_out=True, target_modules=["c_attn", "c_proj"], **CAUSAL),
    ),
    "unilora with its tables": (
        lambda: config_of("opt", 2),
        UniLoraConfig(r=4, save_indices=True, target_modules="all-linear", **CAUSAL),
    ),
    "unilora beside whole projections": (
        lambda: config_of("deepseek_v3", 2),
        UniLoraConfig(r=4, theta_d_length=37, target_modules="all-linear", **CAUSAL),
    ),
    "vera": (_blocks, VeraConfig(r=4, **TARGETS)),
    "vera transposed": (
        lambda: tiny("gpt2"),
        VeraConfig(r=4, fan_in_fan_out=True, target_modules=["c_attn", "c_proj"], **CAUSAL),
    ),
    "vera beside biases": (
        lambda: config_of("opt", 2),
        VeraConfig(r=4, target_modules="all-linear", **CAUSAL),
    ),
    "waveft": (_blocks, WaveFTConfig(n_frequency=20, **TARGETS)),
    "waveft transposed": (
        lambda: tiny("gpt2"),
        WaveFTConfig(
            n_frequency=20,
            fan_in_fan_out=True,
            target_modules=["c_attn", "mlp.c_proj"],
            **CAUSAL,
        ),
    ),
}
DAILY = [
    ("hira", "tp2-shard2"),
    ("hira", "pp2"),
    ("hira on a head", "sp2"),
    ("hira transposed", "tp2"),
    ("road 1", "tp2-shard2"),
    ("road 4", "sp2"),
    ("beft", "sp2"),
    ("beft", "shard2"),
    ("beft without biases", "tp2"),
    ("norms", "sp2"),
    ("norms", "pp2"),
    ("norms per head", "tp2-shard2"),
    ("boft", "tp2"),
    ("c3a", "sp2"),
    ("deft", "tp2"),
    ("gralora", "tp2"),
    ("hra", "pp2"),
    ("hra on heads of groups", "tp4"),
    ("lokr", "tp2-shard2"),
    ("miss", "sp2"),
    ("oft", "tp2-shard2"),
    ("oft beside fused", "tp2"),
    ("oft of rows with edges", "sp2"),
    ("peanut", "shard2"),
    ("randlora transposed", "sp2"),
    ("unilora", "tp2-shard2"),
    ("unilora transposed", "pp2"),
    ("unilora beside whole projections", "sp2"),
    ("vera", "pp2"),
    ("vera transposed", "tp2"),
    ("vera beside biases", "tp2-shard2"),
    ("waveft transposed", "tp2"),
]


@pytest.mark.parametrize(("kind", "layout"), pairs(KINDS, LAYOUTS, daily=DAILY))
def test_layouts(pools: Pools, kind: str, layout: str) -> None:
    config, adapter = KINDS[kind]
    parallel = ParallelConfig(**LAYOUTS[layout])
    assert_layout_equal(Case(config(), peft=adapter, steps=3), parallel, pools(parallel.total_size))


class Sampled(Case):
    """One in which every step begins with the same random numbers, of which PVeRA's modules sample."""

    def reference_step(self, model: Any, step: list[list[dict[str, Tensor]]]) -> list[Tensor]:
        torch.manual_seed(7)
        return super().reference_step(model, step)

    def layout_step(self, model: Any, microbatches: list[dict[str, Tensor]]) -> Tensor:
        torch.manual_seed(7)
        return super().layout_step(model, microbatches)


@pytest.mark.parametrize(("family", "layout"), [("llama", "tp2"), ("gpt2", "tp4"), ("opt", "tp2")])
def test_pvera_samples_alike_on_tensor_ranks(pools: Pools, family: str, layout: str) -> None:
    config = config_of("opt", 2) if family == "opt" else tiny(family)
    turned = family == "gpt2"
    adapter = PveraConfig(r=4, fan_in_fan_out=turned, target_modules="all-linear", **CAUSAL)
    parallel = ParallelConfig(**LAYOUTS[layout])
    case = Sampled(config, peft=adapter, steps=3)
    assert_layout_equal(case, parallel, pools(parallel.total_size))


def _new_and_merged(start: str, adapter: str, out: str, sizes: dict[str, Any], config: Any) -> None:
    """Write new adapters of the seed 3, and the weights with a saved one in them."""
    parallel = ParallelConfig(**sizes)
    new = hfscale.from_pretrained(start, parallel=parallel, peft_config=config, seed=3)
    hfscale.save_pretrained(new, f"{out}/new")
    model = hfscale.from_pretrained(start, parallel=parallel, peft_config=adapter)
    hfscale.save_pretrained(hfscale.merge_and_unload(model, quiet=True), f"{out}/merged")


@pytest.mark.daily(
    "hira-tp2",
    "road 1-tp2",
    "beft-pp2",
    "norms-tp2",
    "oft-tp2",
    "lokr-tp2",
    "unilora-pp2",
    "vera-tp2",
)
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
@pytest.mark.parametrize(
    "kind",
    ["hira", "road 1", "beft", "norms", "boft", "c3a", "deft", "gralora", "hra", "lokr", "miss"]
    + ["oft", "peanut", "randlora", "unilora", "unilora with its tables", "vera", "waveft"],
)
def test_first_values_and_merges_are_pefts(
    pools: Pools, tmp_path: Path, kind: str, layout: str
) -> None:
    make, config = KINDS[kind]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(make()).save_pretrained(tmp_path / "start")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    torch.manual_seed(3)
    stock = get_peft_model(stock, copy.deepcopy(config))
    stock.save_pretrained(tmp_path / "first")
    with torch.no_grad():
        for parameter in stock.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    stock.save_pretrained(tmp_path / "adapter")
    expected = stock.merge_and_unload().state_dict()
    paths = (str(tmp_path / "start"), str(tmp_path / "adapter"), str(tmp_path))
    pools(2).run(_new_and_merged, *paths, LAYOUTS[layout], config)
    assert main(["merge", *paths[:2], str(tmp_path / "out")]) == 0
    first = load_file(tmp_path / "first" / "adapter_model.safetensors")
    found = load_file(tmp_path / "new" / "adapter_model.safetensors")
    torch.testing.assert_close(found, first, rtol=0, atol=0)
    for name in ("merged", "out"):
        weights = AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        torch.testing.assert_close(weights, expected, rtol=0, atol=2e-6)


def _steps_of(start: str, sizes: dict[str, Any] | None, config: Any) -> list[tuple[float, float]]:
    """Return loss and norm of three steps, by stock PEFT without ``sizes``; in float32, since FourierFT's own code
    knows no other type.
    """
    batch = dict.fromkeys(("input_ids", "labels"), torch.arange(36).view(2, 18) % 61)
    if sizes is None:
        torch.manual_seed(3)
        model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(start), config)
    else:
        parallel = ParallelConfig(**sizes)
        model = hfscale.from_pretrained(start, parallel=parallel, peft_config=config, seed=3)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    found = []
    for step in range(3):
        torch.manual_seed(step)  # PVeRA samples
        if sizes is None:
            loss = model(**batch).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(trained, 1e9)
        else:
            loss = hfscale.train_step(model, batch)
            norm = hfscale.clip_grad_norm_(model, 1e9)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), float(norm)))
    return found


@pytest.mark.parametrize("layout", ["tp2", "sp2"])
def test_fourierft(pools: Pools, tmp_path: Path, layout: str) -> None:
    config = FourierFTConfig(n_frequency=50, scaling=20.0, init_weights=False, **TARGETS)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(_blocks()).save_pretrained(tmp_path)
    expected = _steps_of(str(tmp_path), None, config)
    assert expected[0][1] > 0.01
    for found in pools(2).run(_steps_of, str(tmp_path), LAYOUTS[layout], config):
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6
        )


def test_pvera_samples_alike_where_the_sequence_is_cut(pools: Pools, tmp_path: Path) -> None:
    """Streams of random numbers are others there than in one process, and the same for any number of ranks."""
    config = PveraConfig(r=4, init_weights=False, **TARGETS)
    torch.manual_seed(0)
    # Which drops nothing, and lets every rank draw numbers of its own inside of attention.
    config_of_model = tiny("llama", attention_dropout=1e-9)
    AutoModelForCausalLM.from_config(config_of_model).save_pretrained(tmp_path)
    sizes = [{"tp_size": ranks, "sequence_parallel": True} for ranks in (2, 4)]
    two, four = (
        pools(each["tp_size"]).run(_steps_of, str(tmp_path), each, config) for each in sizes
    )
    for found in (*two, *four):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(two[0]), rtol=1e-5, atol=1e-6)


def _goes_on(start: str, state: str, sizes: dict[str, Any], kind: str, options: Any) -> list[float]:
    """Return losses of three steps, which begin at the state if there is one, and otherwise end with it."""
    parallel = ParallelConfig(**sizes)
    new = {"peft_config": KINDS[kind][1], "seed": 3, **options}
    model = hfscale.from_pretrained(start, parallel=parallel, **new).train()
    optimizer = hfscale.create_optimizer(model, "adamw_torch", lr=0.1)
    begins = Path(state).exists()
    if begins:
        hfscale.load_state(model, state, optimizer=optimizer)
    found = []
    for _ in range(3):
        batch = dict.fromkeys(("input_ids", "labels"), torch.arange(36).view(2, 18) % 61)
        found.append(float(hfscale.train_step(model, batch)))
        hfscale.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if not begins and not options:
        hfscale.save_state(model, state, optimizer=optimizer)
    return found


@pytest.mark.daily("oft", "vera", "unilora")
@pytest.mark.parametrize(
    "kind",
    ["boft", "c3a", "deft", "gralora", "hra", "lokr", "miss", "oft", "peanut", "randlora"]
    + ["unilora", "vera", "waveft"],
)
def test_whole_projections_beside_other_features(pools: Pools, tmp_path: Path, kind: str) -> None:
    """Recomputed layers compute the same; a state goes on in stages, and over data ranks, as it would."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(KINDS[kind][0]()).save_pretrained(tmp_path / "start")
    paths = (str(tmp_path / "start"), str(tmp_path / "state"))
    beside = {"memory": MemoryConfig(recompute="full")}
    levers = pools(2).run(_goes_on, *paths, LAYOUTS["tp2"], kind, beside)
    plain = pools(2).run(_goes_on, *paths, LAYOUTS["tp2"], kind, {})
    assert plain[0][2] < plain[0][0]
    assert levers[0] == pytest.approx(plain[0], rel=1e-5)
    expected = pools(2).run(_goes_on, *paths, LAYOUTS["tp2"], kind, {})
    for layout in ("pp2", "shard2"):
        found = pools(2).run(_goes_on, *paths, LAYOUTS[layout], kind, {})
        assert found[0] == pytest.approx(expected[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hra", "lokr", "oft", "unilora", "vera"])
def test_whole_projections_in_compiled_layers(pools: Pools, tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(KINDS[kind][0]()).save_pretrained(tmp_path / "start")
    paths = (str(tmp_path / "start"), str(tmp_path / "state"))
    found = pools(2).run(_goes_on, *paths, LAYOUTS["tp2"], kind, {"compile": "aot_eager"})
    plain = pools(2).run(_goes_on, *paths, LAYOUTS["tp2"], kind, {})
    assert found[0] == pytest.approx(plain[0], rel=1e-5)


REFUSED = {
    "groups across ranks": (
        RoadConfig(group_size=32, target_modules=["q_proj"], **CAUSAL),
        "group_size=32.* must divide",
    ),
    "dropout": (HiraConfig(hira_dropout=0.1, **TARGETS), "hira_dropout"),
    "lookups": (HiraConfig(target_modules=["embed_tokens"], **CAUSAL), "hira_embedding_A"),
    "dropout of blocks": (OFTConfig(module_dropout=0.1, **TARGETS), "module_dropout"),
    "dropout of inputs": (MissConfig(miss_dropout=0.1, **TARGETS), "miss_dropout"),
    "biases beside": (OFTConfig(bias="all", **TARGETS), "bias='all'.* use tp_size=1"),
    "a head as a whole": (
        HRAConfig(target_modules=["q_proj", "lm_head"], **CAUSAL),
        "attention and MLP blocks, got lm_head",
    ),
    "samples of their own": (PveraConfig(generator_seed=1, **TARGETS), "generator_seed"),
    "shared": (VBLoRAConfig(**TARGETS), "VBLORA .* share matrices"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind: str) -> None:
    config, words = REFUSED[kind]
    with pytest.raises(ConfigError, match=words):
        hfscale.plan(tiny("llama"), ParallelConfig(tp_size=2), peft_config=config)


def test_dropout_is_data_ranks_own() -> None:
    config = MissConfig(r=4, miss_dropout=0.1, **TARGETS)
    assert hfscale.plan(tiny("llama"), ParallelConfig(dp_shard_size=2), peft_config=config).adapters


def test_a_bias_is_merged_into_none() -> None:
    model = hfscale.from_config(tiny("llama"), peft_config=BeftConfig(**TARGETS))
    with pytest.raises(ConfigError, match="can be merged only into a bias"):
        hfscale.merge_and_unload(model)
