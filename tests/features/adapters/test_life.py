"""Adapters from their first values to being merged: the same in every layout, and PEFT's own files and models."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AdaptionPromptConfig,
    LoHaConfig,
    LoraConfig,
    PeftModel,
    VBLoRAConfig,
    get_peft_model,
)
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
)

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale.features.adapters import Adapters
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of

from ...families import config_of
from ...mixtures import qwen3_moe
from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "tp2-shard2": {"tp_size": 2, "dp_shard_size": 2},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
}
KINDS = {
    "kaiming": {},
    "gaussian": {"init_lora_weights": "gaussian"},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
}


def _lora(**changes: Any) -> LoraConfig:
    return LoraConfig(
        **{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **changes}
    )


def _saved(start: str, out: str, config: Any, sizes: dict[str, Any], later: bool = False) -> float:
    given = None if later else config
    model = hfscale.from_pretrained(
        start, parallel=ParallelConfig(**sizes), peft_config=given, seed=3
    )
    if later:
        torch.manual_seed(3)  # from which adapters without a seed are drawn
        model = hfscale.get_peft_model(model, config)
    hfscale.save_pretrained(model, out)
    if config.init_lora_weights is True and not config.use_dora:
        batch = {
            "input_ids": torch.arange(24).reshape(4, 6),
            "labels": torch.arange(24).reshape(4, 6),
        }
        return float(hfscale.eval_step(model, batch))
    return 0.0


@pytest.fixture
def start(tmp_path: Path) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(tmp_path / "start")
    return str(tmp_path / "start")


@pytest.mark.daily("tp2-pissa", "one-dora")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
def test_first_values_are_pefts(
    pools: Pools, start: str, tmp_path: Path, layout: str, kind: str
) -> None:
    config = _lora(**KINDS[kind])
    stock = AutoModelForCausalLM.from_pretrained(start)
    torch.manual_seed(3)
    get_peft_model(stock, copy.deepcopy(config)).save_pretrained(tmp_path / "stock")
    expected = load_file(tmp_path / "stock" / "adapter_model.safetensors")
    sizes = LAYOUTS.get(layout, {})
    pools(ParallelConfig(**sizes).total_size).run(
        _saved, start, str(tmp_path / layout), config, sizes, layout == "tp2-shard2"
    )
    found = load_file(tmp_path / layout / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=2e-6 if kind == "dora" else 0, msg=name
        )


@pytest.mark.slow
def test_decompositions_leave_the_model_as_it_is(pools: Pools, start: str) -> None:
    """PiSSA and OLoRA take out of the weights what they put into the adapters."""
    ids = torch.arange(12).reshape(1, 12)
    expected = AutoModelForCausalLM.from_pretrained(start)(input_ids=ids).logits
    for kind in ("pissa", "olora"):
        for logits in pools(2).run(_logits, start, _lora(**KINDS[kind]), {"tp_size": 2}, ids):
            torch.testing.assert_close(logits, expected, atol=2e-5, rtol=0)


def _logits(start: str, config: Any, sizes: dict[str, Any], ids: Tensor) -> Tensor:
    model = hfscale.from_pretrained(start, parallel=ParallelConfig(**sizes), peft_config=config)
    return model(input_ids=ids).logits.detach()


MERGED = {
    "lora": _lora(),
    "dora": _lora(use_dora=True),
    "embedding": _lora(target_modules=["embed_tokens", "o_proj", "lm_head"]),
    "copies": _lora(modules_to_save=["lm_head", "norm"]),
    "loha": LoHaConfig(r=3, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"),
}


@pytest.mark.daily("dora-tp2", "embedding-pp2")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
@pytest.mark.parametrize("kind", MERGED)
def test_merged(pools: Pools, start: str, tmp_path: Path, kind: str, layout: str) -> None:
    """What is merged over shards is what stock PEFT merges, and what the adapter computed."""
    torch.manual_seed(1)
    stock = get_peft_model(AutoModelForCausalLM.from_pretrained(start), copy.deepcopy(MERGED[kind]))
    with torch.no_grad():
        for parameter in stock.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    stock.save_pretrained(tmp_path / "adapter")
    expected = stock.merge_and_unload().state_dict()
    sizes = LAYOUTS.get(layout, {})
    parallel = ParallelConfig(**sizes)
    paths = (start, str(tmp_path / "adapter"), str(tmp_path / "merged"))
    if parallel.total_size == 1:
        _merge(*paths, sizes)
    else:
        pools(parallel.total_size).run(_merge, *paths, sizes)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=2e-6, rtol=0, msg=name)


def _merge(start: str, adapter: str, out: str, sizes: dict[str, Any]) -> None:
    model = hfscale.from_pretrained(start, parallel=ParallelConfig(**sizes), peft_config=adapter)
    merged = hfscale.merge_and_unload(model)
    assert type(merged).__mro__.count(type(merged)) == 1
    assert not [
        name for name, _ in merged.named_modules() if "base_layer" in name or "lora" in name
    ]
    hfscale.save_pretrained(merged, out)


def test_merging_says_what_it_changed(start: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = hfscale.from_pretrained(start, peft_config=_lora())
    hfscale.merge_and_unload(model)
    assert (
        "merged the adapters of 14 weights: largest difference of the logits"
        in capsys.readouterr().err
    )


def test_merged_mixture(pools: Pools, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(qwen3_moe()).save_pretrained(tmp_path / "start")
    config = _lora(
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    stock = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "start"), config)
    with torch.no_grad():
        for parameter in stock.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    stock.save_pretrained(tmp_path / "adapter")
    expected = stock.merge_and_unload().state_dict()
    sizes = {"ep_size": 2, "tp_size": 2}
    pools(2).run(
        _merge, str(tmp_path / "start"), str(tmp_path / "adapter"), str(tmp_path / "merged"), sizes
    )
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=2e-6, rtol=0, msg=name)


def test_pefts_model_is_returned_and_works(start: str, tmp_path: Path) -> None:
    model = hfscale.get_peft_model(hfscale.from_pretrained(start), _lora())
    assert isinstance(model, PeftModel)
    ids = torch.arange(6).reshape(1, 6)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    adapted = model(input_ids=ids).logits
    with model.disable_adapter():
        plain = model(input_ids=ids).logits
    assert (adapted - plain).abs().max() > 1e-2
    torch.testing.assert_close(
        plain, AutoModelForCausalLM.from_pretrained(start)(input_ids=ids).logits
    )
    hfscale.save_pretrained(model, tmp_path / "adapter")
    again = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(start), str(tmp_path / "adapter")
    )
    torch.testing.assert_close(again(input_ids=ids).logits, adapted)


def test_a_copy_takes_adapters_of_its_own(start: str) -> None:
    model = hfscale.from_pretrained(start)
    twin = hfscale.get_peft_model(copy.deepcopy(model), _lora())
    ids = torch.arange(6).reshape(1, 6)
    loss = hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    assert hfscale.train_step(twin, {"input_ids": ids, "labels": ids}) == pytest.approx(
        float(loss), rel=1e-6
    )
    assert not [name for name, _ in model.named_parameters() if "lora" in name]
    assert all(parameter.grad is not None for parameter in model.parameters())


def _refusals(start: str) -> list[str]:
    model = hfscale.from_pretrained(start, parallel=ParallelConfig(tp_size=2))
    words = []
    for config in (
        VBLoRAConfig(target_modules=["q_proj"]),
        AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=1),
        _lora(layer_replication=[(0, 2), (1, 2)]),
        _lora(alora_invocation_tokens=[3]),
        _lora(init_lora_weights="eva"),
        _lora(init_lora_weights="pissa_niter_4"),
        _lora(trainable_token_indices=[1, 1]),
    ):
        with pytest.raises(ConfigError) as error:
            hfscale.get_peft_model(model, config)
        words.append(str(error.value))
    with pytest.raises(ConfigError) as error:
        hfscale.get_peft_model(hfscale.get_peft_model(model, _lora()), _lora())
    return [*words, str(error.value)]


@pytest.mark.filterwarnings("ignore:`init_lora_weights` is .eva.")
def test_what_cannot_be_sharded_is_refused_over_ranks(pools: Pools, start: str) -> None:
    expected = [
        "peft_type VBLORA",
        "it puts attention of its own beside",
        "it runs layers several times",
        "PEFT's model counts where it computes",
        "init_lora_weights='eva'",
        "'pissa_niter_4'",
        "trainable_token_indices",
        "has the adapter 'default' already",
    ]
    for found in pools(2).run(_refusals, start):
        assert [
            words for words, part in zip(found, expected, strict=True) if part not in words
        ] == []


@pytest.mark.parametrize("sizes", [{}, {"tp_size": 2}], ids=["one", "tp2"])
@pytest.mark.parametrize("init", ["pissa", "olora", "orthogonal"])
def test_decompositions_of_stacked_experts_are_refused_by_the_plan(
    init: str, sizes: dict[str, Any]
) -> None:
    config = _lora(
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.down_proj"],
        init_lora_weights=init,
    )
    with pytest.raises(
        ConfigError, match=rf"'{init}'\) needs matrices, but target_parameters names .*down_proj, a"
    ):
        hfscale.plan(qwen3_moe(), ParallelConfig(**sizes), peft_config=config)


def test_loftq_is_refused_on_a_cpu(start: str) -> None:
    config = _lora()
    config.init_lora_weights = "loftq"  # PEFT's own check asks for SciPy
    with pytest.raises(ConfigError, match=r"'loftq'.* needs an accelerator, because bitsandbytes"):
        hfscale.from_pretrained(start, peft_config=config)


def test_a_router_is_no_stack_of_experts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = _lora(target_modules=[], target_parameters=["gate.weight"])
    hfscale.save_pretrained(hfscale.from_config(qwen3_moe(), peft_config=config), tmp_path)
    assert "vLLM" not in caplog.text


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_patterns_that_match_nothing_are_said_once(field: str) -> None:
    config = _lora(target_modules=["q_proj"], **{field: {"nothing": 2, "q_proj": 2}})
    with pytest.warns(RuntimeWarning, match=rf"{field} keys did not match .*'nothing'") as said:
        hfscale.from_config(tiny("llama"), peft_config=config)
    assert len(said) == 1


def test_pefts_warning_of_a_base_without_a_config_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "peft.utils.save_and_load.check_file_exists_on_hf_hub", lambda *_, **__: None
    )
    config = tiny("llama")
    config.name_or_path = "me/tiny"
    model = hfscale.from_config(config, peft_config=_lora())
    with pytest.warns(UserWarning, match="Could not find a config file in me/tiny"):
        hfscale.save_pretrained(model, tmp_path / "out")


def test_what_is_right_nowhere_is_refused_by_name(start: str) -> None:
    refused = [
        (
            _lora(init_lora_weights="pissa_niter_4"),
            "'pissa_niter_4'.* is drawn anew when the saved adapter is loaded",
        ),
        (_lora(target_modules=["query"]), "the model has .*q_proj"),
        (
            _lora(target_modules=["q_proj", "query"]),
            "target_modules names 'query', which matches nothing",
        ),
        (
            _lora(modules_to_save=["classifier"]),
            "modules_to_save names 'classifier', which matches nothing",
        ),
        ("nowhere/at/all", "does not exist"),
        ({"r": 4}, "must be a PEFT config or the path of a saved adapter, got a dict"),
    ]
    model = hfscale.from_pretrained(start)
    for config, message in refused:
        with pytest.raises(ConfigError, match=message):
            hfscale.get_peft_model(model, config)
    assert runtime_of(model).part(Adapters) is None
    hfscale.train_step(model, {"input_ids": torch.arange(6)[None], "labels": torch.arange(6)[None]})


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")
def _copy_of_a_block(start: str) -> str:
    with pytest.raises(ConfigError) as caught:
        hfscale.from_pretrained(
            start, parallel=ParallelConfig(tp_size=2), peft_config=_lora(modules_to_save=["mlp"])
        )
    return str(caught.value)


def test_copies_of_blocks_are_refused(pools: Pools, start: str) -> None:
    assert all(
        "modules_to_save='mlp' is or contains" in message
        for message in pools(2).run(_copy_of_a_block, start)
    )


def test_what_has_adapters(tmp_path: Path) -> None:
    config = qwen3_moe()
    model = hfscale.from_config(config, peft_config=_lora(target_modules=["q_proj"]))
    assert "0.0% of expert parameters have adapters" in hfscale.coverage_report(model)
    assert "no expert has an adapter" in hfscale.coverage_report(model)
    model = hfscale.from_config(
        config,
        peft_config=_lora(target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"]),
    )
    assert "33.3% of expert parameters have adapters" in hfscale.coverage_report(model)
    assert "no expert" not in hfscale.coverage_report(model)


def test_around_a_model_that_looks_up_no_tokens(tmp_path: Path) -> None:
    """PEFT asks for embeddings when it names what is stored, and the host has none to give."""
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])
    stock = ResNetForImageClassification(config)
    stock.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(
        stock, LoraConfig(target_modules=["classifier.1"], r=2, init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapter")
    model = hfscale.from_pretrained(
        tmp_path / "base",
        auto_class=AutoModelForImageClassification,
        peft_config=str(tmp_path / "adapter"),
    )
    found = dict(model.named_parameters())
    for name, parameter in stock.named_parameters():
        assert torch.equal(found[name], parameter), name
    hfscale.save_pretrained(model, tmp_path / "again")
    assert (tmp_path / "again" / "adapter_model.safetensors").is_file()


def _adapted_later(layout: dict[str, int]) -> float:
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(config_of("falcon"), dtype=torch.float64)
    model = hfscale.parallelize(stock, ParallelConfig(**layout)).train()
    hfscale.get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    ids = torch.arange(3, 19).view(2, 8)
    return float(hfscale.train_step(model, {"input_ids": ids, "labels": ids}).detach())


def test_adapters_come_later_where_attention_bears_a_name_of_ours(pools: Pools) -> None:
    """Falcon looks the class of its attention up by the name of its implementation."""
    wanted = _adapted_later({})
    for found in pools(2).run(_adapted_later, {"cp_size": 2}):
        assert found == pytest.approx(wanted, rel=1e-12)
