"""Blueprints that nobody wrote."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MambaConfig,
    ResNetConfig,
    ResNetForImageClassification,
)

from hfscale import ParallelConfig, PlanError, plan
from hfscale.api import find_blueprint as resolve
from hfscale.api.blueprint_entry import as_python
from hfscale.api.find_blueprint import find_blueprint
from hfscale.cli import main
from hfscale.extras.proofs.infer import subject
from hfscale.extras.proofs.infer.lockstep import prove
from hfscale.extras.proofs.infer.search_blueprint import infer
from hfscale.extras.proofs.infer.subject import Unproved, make_subject
from hfscale.models import FAMILIES
from hfscale.models.blueprint import TOLERANCE, Block, Blueprint
from hfscale.models.clone import tiny_clone
from hfscale.models.fields import query_key_value
from hfscale.testing import Case, RankPool, assert_layout_equal
from tests.remote_code import write_checkpoint
from tests.tiny_models import tiny

# Found exactly as written by hand, or as the host says it, edges included
SAME = ("llama", "qwen3", "mpt", "gpt2", "gptj", "gpt_neo", "opt", "stablelm")
TRUSTED = {"trust_remote_code": True}


def _on_meta(config: Any, **kwargs: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, **kwargs)


def _inferred(model: Any) -> Blueprint:
    return infer(model).blueprint


def _roles(blueprint: Blueprint) -> dict[str, Any]:
    return {
        path: (
            b.column,
            b.row,
            b.enter,
            b.leave,
            b.parts,
            set(b.shared),
            set(b.across),
            b.heads,
            b.local_attributes,
        )
        for path, b in blueprint.blocks.items()
    }


@pytest.mark.daily("mpt")
@pytest.mark.parametrize("family", SAME)
def test_what_is_inferred_is_what_was_written(family: str) -> None:
    model = _on_meta(AutoConfig.for_model(family))
    inference = infer(model)
    assert inference.proof.worst < TOLERANCE
    assert inference.whole == ()
    assert inference.blueprint.layers == find_blueprint(model).layers
    assert _roles(inference.blueprint) == _roles(find_blueprint(model))


def test_dropout_of_cut_activations_is_found() -> None:
    assert _inferred(_on_meta(tiny("gpt2"))).blocks["attn"].dropout == ("attn_pdrop",)
    assert _inferred(_on_meta(tiny("gpt2"))).blocks["mlp"].dropout == ()


@pytest.mark.slow
def test_matrices_of_unequal_length_in_one() -> None:
    config = AutoConfig.for_model("phi3", num_key_value_heads=8, pad_token_id=0)
    blueprint = _inferred(_on_meta(config))
    assert blueprint.blocks["self_attn"].parts == {"qkv_proj": query_key_value}
    assert blueprint.blocks["self_attn"].local_config == ("num_attention_heads",)
    assert blueprint.blocks["mlp"].parts == {"gate_up_proj": 2}


def test_low_rank_attention_is_used_whole_in_front_of_its_columns() -> None:
    config = tiny_clone(
        AutoConfig.for_model("deepseek_v2"), num_experts_per_tok=2, topk_method="greedy"
    )
    attention = _inferred(_on_meta(config)).blocks["self_attn"]
    assert "kv_b_proj" in attention.column
    assert "kv_a_proj_with_mqa" in attention.shared
    assert attention.rest_shared


@pytest.mark.parametrize(
    ("family", "path", "wrong"),
    [
        ("gpt2", "attn", {"parts": {}}),
        ("gpt2", "attn", {"parts": {"c_attn": 2}}),
        ("gpt2", "attn", {"local_attributes": ()}),
        ("gpt2", "mlp", {"leave": ("act",)}),
        ("gpt2", "mlp", {"enter": ()}),
        ("qwen3", "self_attn", {"shared": (), "enter": ("q_proj", "k_proj", "v_proj")}),
        ("qwen3", "self_attn", {"shared": ("q_norm",), "enter": ("q_proj", "k_proj", "v_proj")}),
        ("llama", "mlp", {"column": ("up_proj",), "enter": ("up_proj",)}),
        ("olmo2", "self_attn", {"across": (), "shared": ("q_norm", "k_norm")}),
        ("bloom", "mlp", {"leave": ("",)}),
    ],
)
def test_a_wrong_blueprint_is_not_proved(family: str, path: str, wrong: dict[str, Any]) -> None:
    model = _on_meta(AutoConfig.for_model(family))
    clone = make_subject(model)
    good = find_blueprint(model)
    assert prove(clone, good).worst < TOLERANCE
    with pytest.raises(Unproved):
        prove(
            clone, replace(good, blocks={**good.blocks, path: replace(good.blocks[path], **wrong)})
        )


@pytest.mark.slow
def test_no_random_stream_moves_and_the_answer_is_the_same_again() -> None:
    model = _on_meta(tiny("llama", attention_bias=True))
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first = infer(model)
    with torch.device("meta"):
        assert infer(model) == first
    assert torch.equal(torch.random.get_rng_state(), before)


def test_it_comes_last_and_the_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ParallelConfig(tp_size=2)
    config = tiny("gpt2")
    assert "blueprint: hfscale's own table" in str(plan(config, layout))
    assert "blueprint: transformers' base_model_tp_plan, translated" in str(
        plan(tiny("llama"), layout)
    )
    monkeypatch.delitem(FAMILIES, "gpt2")
    planned = plan(config, layout)
    assert planned.source.startswith("inferred, and proved on a tiny clone")
    assert f"blueprint: {planned.source}" in str(planned)
    assert planned.by_name["transformer.h.0.attn.c_attn.weight"].local_shape({}) == (32, 48)
    monkeypatch.setattr(resolve, "infer", lambda model: pytest.fail("not asked for"))
    assert plan(config, ParallelConfig()).source == ""  # nor for one process


def test_nothing_to_cut_is_refused_with_what_was_tried() -> None:
    with pytest.raises(PlanError, match="could not be inferred from MambaForCausalLM") as caught:
        _inferred(_on_meta(MambaConfig(num_hidden_layers=2)))
    assert "hypotheses tried" in str(caught.value)


def test_what_reads_no_tokens_is_refused_by_what_it_reads() -> None:
    with torch.device("meta"):
        model = ResNetForImageClassification(ResNetConfig())
    with pytest.raises(
        PlanError,
        match="ResNetForImageClassification: the model reads pixel_values, but the inference",
    ):
        _inferred(model)


def test_a_config_whose_sizes_are_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_LARGEST", 1000)
    model = _on_meta(tiny("mistral"))
    with pytest.raises(PlanError, match=r"a tiny copy of the model still has .* parameters"):
        _inferred(model)


def test_layers_that_the_clone_does_not_show_are_refused() -> None:
    config = AutoConfig.for_model("recurrent_gemma")
    with pytest.raises(
        PlanError, match="layer 2 is of a kind that the tiny copy of the model does not contain"
    ):
        _inferred(_on_meta(config))


def test_an_entry_can_be_pasted() -> None:
    for family in ("gpt2", "bloom", "mpt", "opt", "phi3"):
        text = as_python(family, FAMILIES[family])
        names = {"Block": Block, "Blueprint": Blueprint, "query_key_value": query_key_value}
        read = eval("{" + text.replace("        unfit=...,", "") + "}", names)
        assert read[family].blocks == FAMILIES[family].blocks


@pytest.mark.daily("own_gpt")
@pytest.mark.parametrize("module", ["own_llama", "own_gpt"])
def test_remote_code_trains_as_in_one_process(
    pools: Callable[[int], RankPool], tmp_path: Path, module: str
) -> None:
    config = write_checkpoint(tmp_path / module, module)
    blueprint = _inferred(_on_meta(config, **TRUSTED))
    assert blueprint.layers == "stack"
    assert blueprint.blocks.keys() == {"mixer", "gated"}
    if module == "own_llama":
        assert blueprint.blocks["mixer"].dropout == ("drop_rate",)
        assert set(blueprint.blocks["mixer"].shared) == {"scale_q", "scale_k"}
        assert blueprint.blocks["mixer"].local_attributes == ("n_heads", "n_kv_heads")
    else:
        assert blueprint.blocks["mixer"].parts == {"qkv": 3}
        # an edge around the block would count the gradient of the residual on every rank
        assert (blueprint.blocks["gated"].enter, blueprint.blocks["gated"].leave) == (
            ("into",),
            ("out",),
        )
    layout = ParallelConfig(tp_size=2)
    cut = [p.name for p in plan(config, layout, **TRUSTED).parameters if p.cuts]
    assert any("mixer" in name for name in cut)
    assert any("gated" in name for name in cut)
    assert_layout_equal(Case(config, hf_kwargs=TRUSTED), layout, pools(2))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "own", "own_llama")
    assert main(["blueprint", str(tmp_path / "own"), "--trust-remote-code"]) == 0
    printed = capsys.readouterr().out
    assert "inferred, and proved on a tiny clone" in printed
    assert "gradients" in printed
    assert '"mixer": Block(' in printed
    tiny("gpt2").save_pretrained(tmp_path / "gpt2")
    assert main(["blueprint", str(tmp_path / "gpt2")]) == 0
    assert "hfscale's own table" in capsys.readouterr().out
    assert main(["blueprint", str(tmp_path / "gpt2"), "--infer"]) == 0
    assert 'parts={"c_attn": 3}' in capsys.readouterr().out
    MambaConfig(num_hidden_layers=2).save_pretrained(tmp_path / "mamba")
    assert main(["blueprint", str(tmp_path / "mamba")]) == 2
    assert "could not be inferred" in capsys.readouterr().err
