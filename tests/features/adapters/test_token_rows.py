"""Adapters that train new tokens: rows of an embedding and a head, or one copy of both, over every layout."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, TrainableTokensConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale.api.adapter_files import adapter_for_engine
from hfscale.cli import main
from hfscale.features.adapters.token_rows import places_in, with_rows
from hfscale.plan import Cut, ParameterPlan
from hfscale.testing import Case, RankPool, assert_layout_equal

from ...families import config_of
from ...layouts import OF_ADAPTERS as LAYOUTS
from ...sweeps import pairs
from ...tiny_models import tiny

# What PEFT says of its own saving and of ties.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:You have requested `ensure_weight_tying`"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),
]

Pools = Callable[[int], RankPool]
# Of 67 tokens the first of 2 ranks has 34, and the last of 4 has 16.
TOKENS = [1, 5, 33, 34, 66]
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "rows": (lambda: tiny("llama"), {"trainable_token_indices": TOKENS}),
    "tied": (
        lambda: tiny("llama", tie_word_embeddings=True, pad_token_id=5),
        {"trainable_token_indices": TOKENS, "ensure_weight_tying": True},
    ),
    "both ends": (
        lambda: tiny("llama"),
        {"trainable_token_indices": {"embed_tokens": [1, 5], "lm_head": [0, 66, 34]}},
    ),
    "apart": (
        lambda: tiny("llama", tie_word_embeddings=True),
        {"trainable_token_indices": {"embed_tokens": [1, 5], "lm_head": [66, 34]}},
    ),
    "one copy": (
        lambda: tiny("llama", tie_word_embeddings=True),
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "scaled": (lambda: config_of("gemma3_text"), {"trainable_token_indices": [1, 5, 60]}),
    "conv1d": (
        lambda: tiny("gpt2"),
        {"fan_in_fan_out": True, "trainable_token_indices": TOKENS},
    ),
}
DAILY = [
    ("rows", "tp2-shard2"),
    ("tied", "sp2"),
    ("tied", "tp2-pp2"),
    ("both ends", "pp2"),
    ("one copy", "tp2"),
    ("one copy", "pp2"),
    ("scaled", "tp2"),
]


def _lora(**changes: Any) -> LoraConfig:
    return LoraConfig(
        **{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **changes}
    )


def _check(pools: Pools, case: Case, layout: str) -> None:
    parallel = ParallelConfig(**LAYOUTS[layout])
    assert_layout_equal(case, parallel, pools(parallel.total_size))


@pytest.mark.parametrize(("kind", "layout"), pairs(KINDS, LAYOUTS, daily=DAILY))
def test_layouts(pools: Pools, kind: str, layout: str) -> None:
    config, changes = KINDS[kind]
    _check(pools, Case(config(), peft=_lora(**changes)), layout)


@pytest.mark.daily("tp2")
@pytest.mark.parametrize("layout", ["tp2", "shard2", "pp2"])
def test_rows_without_other_adapters(pools: Pools, layout: str) -> None:
    config = TrainableTokensConfig(token_indices=TOKENS, task_type="CAUSAL_LM")
    _check(pools, Case(tiny("llama", tie_word_embeddings=True), peft=config), layout)


def test_rows_have_places_in_shards() -> None:
    cuts = (Cut("tp", 0, 2), Cut("dp_shard", 0, 2))
    planned = ParameterPlan("weight", (67, 8), torch.float64, cuts=cuts)
    assert places_in(TOKENS, planned, {"tp": 0}) == ([0, 1, 2], [1, 5, 33])
    assert places_in(TOKENS, planned, {"tp": 1, "dp_shard": 1}) == ([3, 4], [0, 32])
    rows = torch.ones(5, 8, requires_grad=True)
    found = with_rows(torch.zeros(33, 8), rows, [3, 4], [0, 32])
    assert found.sum(1).nonzero().flatten().tolist() == [0, 32]
    found.sum().backward()
    assert rows.grad is not None
    assert rows.grad.sum(1).tolist() == [0, 0, 0, 8, 8]


IDS = torch.randint(3, 70, (4, 12), generator=torch.Generator().manual_seed(1))
IDS[:, 3] = 69
BATCH = {"input_ids": IDS, "labels": IDS}
NEW = [3, 67, 69]


def _resized_life(start: str, out: str, sizes: dict[str, Any], config: Any) -> tuple[float, ...]:
    """Train, save, load, merge: the loss after each, and the difference between the two kinds of loops."""
    parallel = ParallelConfig(**sizes)
    options = {"parallel": parallel, "dtype": torch.float64, "resize_token_embeddings": 70}
    if sizes.get("pp_size"):
        model = hfscale.from_pretrained(start, **options)
        hfscale.get_peft_model(model, copy.deepcopy(config), seed=0)
    else:
        model = hfscale.from_pretrained(start, peft_config=copy.deepcopy(config), **options)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    for _ in range(2):
        hfscale.train_step(model, BATCH)
        optimizer.step()
        optimizer.zero_grad()
    apart = 0.0
    if sizes.get("tp_size"):
        hfscale.train_step(model, BATCH)
        expected = [parameter.grad.clone() for parameter in trained]
        optimizer.zero_grad()
        model(**BATCH).loss.backward()
        pieces = zip(expected, trained, strict=True)
        apart = max(float((wanted - found.grad).abs().max()) for wanted, found in pieces)
    live = float(hfscale.eval_step(model.eval(), BATCH))
    hfscale.save_pretrained(model, Path(out) / "adapter")
    again = hfscale.from_pretrained(start, peft_config=str(Path(out) / "adapter"), **options)
    loaded = float(hfscale.eval_step(again.eval(), BATCH))
    merged = hfscale.merge_and_unload(model, quiet=True)
    kept = float(hfscale.eval_step(merged.eval(), BATCH))
    hfscale.save_pretrained(merged, Path(out) / "merged")
    return live, loaded, kept, apart


WAYS = {
    "rows": {"trainable_token_indices": NEW},
    "one copy": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
}


@pytest.mark.daily("rows-tp2", "rows-pp2", "one copy-pp2")
@pytest.mark.parametrize("layout", ["tp2", "shard2", "pp2"])
@pytest.mark.parametrize("way", WAYS)
def test_new_tokens_of_a_resized_model(pools: Pools, tmp_path: Path, way: str, layout: str) -> None:
    """Stock PEFT loads the file, and both merges, in memory and on disk, are what was trained."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        tiny("llama", tie_word_embeddings=True), dtype=torch.float64
    ).save_pretrained(tmp_path / "start")
    config = _lora(**WAYS[way])
    run = (str(tmp_path / "start"), str(tmp_path), LAYOUTS[layout], config)
    live, loaded, kept, apart = pools(2).run(_resized_life, *run)[0]
    assert apart < 1e-12
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "start", dtype=torch.float64)
    base.resize_token_embeddings(70, mean_resizing=False)
    stock = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    merging = [str(tmp_path / name) for name in ("start", "adapter", "out")]
    assert main(["merge", *merging]) == 0
    by_stock = [float(stock(**BATCH).loss.detach())]
    for name in ("merged", "out"):
        found = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float64)
        assert len(found.get_input_embeddings().weight) == 70
        by_stock.append(float(found.eval()(**BATCH).loss.detach()))
    assert [loaded, kept, *by_stock] == pytest.approx([live] * 5, rel=2e-6)


def test_unmerging_in_one_process_puts_the_first_rows_back() -> None:
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(tiny("llama", tie_word_embeddings=True))
    before = stock.get_input_embeddings().weight.detach().clone()
    adapted = hfscale.get_peft_model(
        hfscale.parallelize(stock), _lora(trainable_token_indices=NEW[:1])
    )
    rows = adapted.get_input_embeddings().token_adapter
    assert torch.equal(rows.trainable_tokens_delta["default"], before[NEW[:1]])
    nn.init.ones_(rows.trainable_tokens_delta["default"])
    adapted.merge_adapter()
    assert rows.base_layer.weight[NEW[0]].eq(1).all()
    adapted.unmerge_adapter()
    assert torch.equal(rows.base_layer.weight, before)


WRONG = {
    "absent": ({"trainable_token_indices": [1, 67]}, "from 0 to 66, got 67"),
    "twice": ({"trainable_token_indices": [1, 1]}, "different tokens"),
    "tied factors": (
        {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
        "cannot be used with target_modules on tied weights",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_refused(kind: str) -> None:
    changes, words = WRONG[kind]
    with pytest.raises(ConfigError, match=words):
        hfscale.plan(
            tiny("llama", tie_word_embeddings=True),
            parallel=ParallelConfig(tp_size=2),
            peft_config=_lora(**changes),
        )


def test_rows_are_no_adapter_of_an_engine(tmp_path: Path) -> None:
    stock = AutoModelForCausalLM.from_config(tiny("llama"))
    stock.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(stock, _lora(trainable_token_indices=TOKENS))
    adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"rows of 5 tokens of model.embed_tokens.weight"):
        adapter_for_engine(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")


def test_coverage_counts_rows() -> None:
    adapted = hfscale.from_config(tiny("llama"), peft_config=_lora(trainable_token_indices=TOKENS))
    assert "7.5% of parameters of the embedding have adapters" in hfscale.coverage_report(adapted)


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_file_of_stock_merges_into_a_tied_base(way: str, copies: int, tmp_path: Path) -> None:
    """PEFT writes rows of a tied weight once; the base may hold the weight under both of its names."""
    torch.manual_seed(0)
    start = tmp_path / "start"
    AutoModelForCausalLM.from_config(
        tiny("llama", tie_word_embeddings=True, vocab_size=70), dtype=torch.float64
    ).save_pretrained(start)
    if copies == 2:
        tensors = load_file(start / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, start / "model.safetensors", {"format": "pt"})
    base = AutoModelForCausalLM.from_pretrained(start)
    stock = get_peft_model(base, _lora(init_lora_weights=False, **WAYS[way])).eval()
    for parameter in stock.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    stock.save_pretrained(tmp_path / "adapter")
    assert main(["merge", *(str(tmp_path / name) for name in ("start", "adapter", "out"))]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == len(
        load_file(start / "model.safetensors")
    )
    with torch.no_grad():
        assert abs(float(merged(**BATCH).loss - stock(**BATCH).loss)) < 1e-12
