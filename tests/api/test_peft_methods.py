"""PEFT's own methods of its model around one over ranks: files of stock PEFT, and a model without its adapters."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    IA3Config,
    LoHaConfig,
    LoraConfig,
    PeftMixedModel,
    PeftModel,
    get_peft_model,
)
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import CheckpointError, ConfigError, ParallelConfig
from hfscale._compat.replaced import attribute_replaced
from hfscale.models.precision import keep_float64
from hfscale.testing import RankPool

from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
IDS = torch.arange(24).reshape(4, 6)
CONFIGS = {
    "lora": LoraConfig(r=4, target_modules="all-linear", modules_to_save=["norm"]),
    "embedding": LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], task_type="CAUSAL_LM"),
    "ia3": IA3Config(
        target_modules=["k_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        task_type="CAUSAL_LM",
    ),
    "loha": LoHaConfig(r=3, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM"),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "shard2": {"dp_shard_size": 2},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
}


@pytest.fixture
def start(tmp_path: Path) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(tmp_path / "start")
    return str(tmp_path / "start")


def _wrapped(start: str, config: Any, sizes: dict[str, Any], name: str = "default") -> Any:
    model = hfscale.from_pretrained(start, parallel=ParallelConfig(**sizes), dtype=torch.float64)
    return hfscale.get_peft_model(model, copy.deepcopy(config), name, seed=3)


def _saved(start: str, config: Any, sizes: dict[str, Any], out: str, name: str) -> None:
    model = _wrapped(start, config, sizes, name)
    rank = torch.distributed.get_rank()
    model.save_pretrained(out, is_main_process=rank == 0, selected_adapters=[name])
    model.save_pretrained(f"{out}-old", safe_serialization=False)
    model.save_pretrained(f"{out}-none", is_main_process=False)


@pytest.mark.daily("tp2-lora", "shard2-embedding", "tp2-ia3", "pp2-loha")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_are_those_of_stock_peft(
    pools: Pools, start: str, tmp_path: Path, layout: str, kind: str
) -> None:
    name = "other" if kind == "ia3" else "default"
    folder = name if kind == "ia3" else "."
    out = tmp_path / "out"
    pools(2).run(_saved, start, CONFIGS[kind], LAYOUTS[layout], str(out), name)
    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64)
    stock = get_peft_model(base, copy.deepcopy(CONFIGS[kind]), name)
    stock.save_pretrained(tmp_path / "stock")
    expected = load_file(tmp_path / "stock" / folder / "adapter_model.safetensors")
    found = load_file(out / folder / "adapter_model.safetensors")
    old = torch.load(tmp_path / "out-old" / folder / "adapter_model.bin")
    assert found.keys() == expected.keys() == old.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=0, msg=key)
        torch.testing.assert_close(old[key], value, rtol=0, atol=0, msg=key)
    assert _config(out / folder) == _config(tmp_path / "stock" / folder)
    assert "library_name: peft" in (out / folder / "README.md").read_text()
    assert not (tmp_path / "out-none").exists()
    PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64), out / folder
    )


def _config(directory: Path) -> dict[str, Any]:
    """Return what a config says, with sets in one order."""
    read = json.loads((directory / "adapter_config.json").read_text())
    return {key: sorted(value) if isinstance(value, list) else value for key, value in read.items()}


def _late(*_: Any, **__: Any) -> None:
    raise RuntimeError("rank 1 did not come")


def _on_one_rank(start: str, out: str) -> str:
    model = _wrapped(start, CONFIGS["ia3"], {"tp_size": 2})
    with (
        attribute_replaced(torch.distributed, "monitored_barrier", _late),
        pytest.raises(CheckpointError) as caught,
    ):
        model.save_pretrained(out)
    return str(caught.value)


def test_a_save_on_one_rank_alone_is_told(pools: Pools, start: str, tmp_path: Path) -> None:
    for message in pools(2).run(_on_one_rank, start, str(tmp_path / "out")):
        assert "PEFT's save_pretrained(" in message
        assert "not every rank made it" in message
    assert not (tmp_path / "out").exists()


def _refused(start: str, asked: dict[str, Any], words: str) -> None:
    model = _wrapped(start, CONFIGS["ia3"], {"tp_size": 2})
    with pytest.raises(ConfigError, match=words):
        model.save_pretrained("nowhere", **asked)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"state_dict": {}}, "gathers the adapter itself"),
        ({"path_initial_model_for_weight_conversion": "."}, "cannot convert"),
        (
            {"selected_adapters": ["two"]},
            "selected_adapters must name adapters of the model .default., got .two.",
        ),
    ],
)
def test_what_a_save_cannot_do_is_told(
    pools: Pools, start: str, asked: dict[str, Any], words: str
) -> None:
    pools(2).run(_refused, start, asked, words)


def _unloaded(start: str, config: Any, sizes: dict[str, Any]) -> tuple[Tensor, int, float]:
    """Logits without the adapter, the number of parameters that train, and a loss of the model that goes on."""
    model = _wrapped(start, config, sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.5)
    stock = model.unload()
    trained = [parameter for parameter in stock.parameters() if parameter.requires_grad]
    logits = stock(input_ids=IDS).logits.detach()
    again = hfscale.get_peft_model(stock, copy.deepcopy(config), seed=3)
    loss = hfscale.train_step(again, {"input_ids": IDS, "labels": IDS})
    return logits, len(trained), float(loss)


@pytest.mark.parametrize("layout", ["tp2", "shard2"])
def test_unload_leaves_trained_copies(pools: Pools, start: str, layout: str) -> None:
    """As stock PEFT's does: factors go, trained copies of modules stay, and another adapter may come."""
    base = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64)
    torch.manual_seed(3)
    stock = get_peft_model(base, copy.deepcopy(CONFIGS["lora"]))
    with torch.no_grad():
        for parameter in stock.parameters():
            if parameter.requires_grad:
                parameter.add_(0.5)
    expected = stock.unload()(input_ids=IDS).logits.detach()
    for logits, trained, loss in pools(2).run(_unloaded, start, CONFIGS["lora"], LAYOUTS[layout]):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
        assert trained == 0
        assert loss > 0


def _in_bfloat16(start: str, out: str, autocast: bool) -> set[torch.dtype]:
    model = hfscale.from_pretrained(start, parallel=ParallelConfig(tp_size=2), dtype=torch.bfloat16)
    config = copy.deepcopy(CONFIGS["lora"])
    adapted = hfscale.get_peft_model(
        model,
        config,
        autocast_adapter_dtype=autocast,
        revision="first",
        low_cpu_mem_usage=True,
        seed=3,
    )
    assert config.revision == "first"
    adapted.save_pretrained(out)
    return {p.dtype for n, p in adapted.named_parameters() if "lora_" in n}


@pytest.mark.parametrize("autocast", [True, False])
def test_factors_have_the_type_that_was_asked_for(
    pools: Pools, start: str, tmp_path: Path, autocast: bool
) -> None:
    found = pools(2).run(_in_bfloat16, start, str(tmp_path / "out"), autocast)
    assert found == [{torch.float32 if autocast else torch.bfloat16}] * 2
    base = AutoModelForCausalLM.from_pretrained(start, dtype=torch.bfloat16)
    torch.manual_seed(3)
    stock = get_peft_model(base, copy.deepcopy(CONFIGS["lora"]), autocast_adapter_dtype=autocast)
    stock.save_pretrained(tmp_path / "stock")
    expected = load_file(tmp_path / "stock" / "adapter_model.safetensors")
    for key, value in load_file(tmp_path / "out" / "adapter_model.safetensors").items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=0, msg=key)


def _mixed(start: str) -> None:
    model = hfscale.from_pretrained(start, parallel=ParallelConfig(tp_size=2))
    with pytest.raises(ConfigError, match="mixed=True must be used in one process, got tp2"):
        hfscale.get_peft_model(model, CONFIGS["ia3"], mixed=True)


def test_methods_that_mix_are_of_one_process(pools: Pools, start: str) -> None:
    pools(2).run(_mixed, start)
    with keep_float64():  # stock rotary embeddings are in 32 bits
        ours = _losses_of_mixed(start, ours=True)
        expected = _losses_of_mixed(start, ours=False)
    assert ours == pytest.approx(expected, rel=1e-9)
    assert ours[0] != ours[2]


def _losses_of_mixed(start: str, ours: bool) -> list[float]:
    """Losses of three steps of LoHa and LoRA around one model."""
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64)
    torch.manual_seed(3)
    adapt = hfscale.get_peft_model if ours else get_peft_model
    given = hfscale.parallelize(model) if ours else model
    mixed = adapt(given, copy.deepcopy(CONFIGS["loha"]), mixed=True)
    assert isinstance(mixed, PeftMixedModel)
    mixed.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    mixed.set_adapter(["default", "second"])
    optimizer = torch.optim.SGD([p for p in mixed.parameters() if p.requires_grad], lr=1.0)
    losses: list[float] = []
    for _ in range(3):
        batch = {"input_ids": IDS, "labels": IDS}
        if ours:
            loss = hfscale.train_step(mixed, batch)
        else:
            loss = mixed(**batch).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_values_may_be_left_to_a_later_load(start: str) -> None:
    model = hfscale.from_pretrained(start)
    adapted = hfscale.get_peft_model(model, CONFIGS["loha"], low_cpu_mem_usage=True)
    assert {p.device.type for n, p in adapted.named_parameters() if "hada" in n} == {"meta"}
