"""What a plan can know it says: in words, in seconds, and before a byte of weights is read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    BambaConfig,
    CLIPConfig,
    CLIPModel,
    DeepseekV4Config,
)

import hfscale
from hfscale import ParallelConfig, PlanError, plan
from hfscale.api.build_plan import build_plan
from hfscale.extras.proofs.infer import search_blueprint as search
from hfscale.models.clone import tiny_clone

from ...families import config_of
from ...proved_anew import proved_anew
from ...tiny_models import needs, tiny

BART = {"decoder_start_token_id": 2, "pad_token_id": 1, "eos_token_id": 3}


@pytest.mark.parametrize(
    ("config", "layout", "auto_class", "words"),
    [
        pytest.param(
            lambda: config_of("deepseek_v4", num_key_value_heads=2),
            {"tp_size": 2, "sequence_parallel": True},
            {},
            r"a stream of the shape \(1, 2, 4, 32\) .* use sequence_parallel=False",
            marks=pytest.mark.skipif(
                not DeepseekV4Config.base_model_tp_plan,
                reason="this transformers has no plan of deepseek_v4",
            ),
        ),
        (
            lambda: config_of("glm_moe_dsa"),
            {"pp_size": 2},
            {},
            "its layers are given what another layer computed, besides the stream, and only .*: use pp_size=1",
        ),
        (
            lambda: tiny_clone(AutoConfig.for_model("mixtral"), output_router_logits=True),
            {"tp_size": 2},
            {},
            "config's output_router_logits=True adds a loss on the router .* set this option to False, or use",
        ),
    ],
    ids=["several streams", "what another layer computed", "router loss"],
)
def test_refused_before_any_weight_is_read(
    tmp_path: Path, config: Any, layout: dict[str, Any], auto_class: dict[str, Any], words: str
) -> None:
    made = config()
    layout_of = ParallelConfig(**layout)
    made.save_pretrained(tmp_path)  # and no weights: whoever looks for them fails in other words
    with pytest.raises(PlanError, match=words):
        hfscale.from_pretrained(str(tmp_path), parallel=layout_of, **auto_class)
    with pytest.raises(PlanError, match=words):
        hfscale.from_config(made, parallel=layout_of, **auto_class)


def test_the_plan_says_how_a_model_is_trained() -> None:
    own = plan(tiny_clone(AutoConfig.for_model("bart"), **BART), auto_class=AutoModelForSeq2SeqLM)
    assert "train_step: yes" in str(own)
    assert "a mean over labels" in str(own)
    with torch.device("meta"):
        contrast = CLIPModel(tiny_clone(CLIPConfig()))
    assert "train_step: no (the head of CLIPModel is not there" in str(
        build_plan(contrast, ParallelConfig())
    )
    helper = plan(tiny_clone(AutoConfig.for_model("prophetnet"), pad_token_id=0))
    assert "train_step: no (ProphetNetForCausalLM takes a cross entropy of its own" in str(helper)
    assert "train_step: yes" in str(plan(tiny("llama")))


@needs("dots3_note_text")
def test_heads_that_differ_between_layers() -> None:
    """The host has no one count for such a config; every layer's must be divided."""
    whole = AutoConfig.for_model("dots3_note_text", num_hidden_layers=5, swa_num_attention_heads=66,
                                 swa_num_key_value_heads=66)  # fmt: skip
    assert len(plan(whole, ParallelConfig(tp_size=2)).blocks) == 10
    with pytest.raises(PlanError, match="does not divide the 2 attention heads"):
        plan(whole, ParallelConfig(tp_size=4))


@needs("dots3_note_text")
def test_a_clone_of_layers_that_differ() -> None:
    """A layer that becomes the second one takes what is its own with it."""
    whole = AutoConfig.for_model("dots3_note_text")
    small = tiny_clone(whole, layers=5)
    assert small.layer_types[1] == "sliding_attention" != whole.layer_types[1]
    assert plan(small, ParallelConfig(tp_size=2)).blocks


def test_a_clone_that_cannot_be_built_is_a_refusal() -> None:
    """The host checks sizes against one another, and small ones may not fit."""
    config = BambaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=67, mamba_expand=3, mamba_n_heads=24, mamba_d_head=8, mamba_n_groups=1, attn_layer_indices=[1],
    )  # fmt: skip
    with pytest.raises(
        PlanError,
        match=r"config of the model cannot be made small: Strict.*mamba_n_heads|Mamba head",
    ):
        plan(config, ParallelConfig(tp_size=2))


def test_what_the_host_says_during_inference_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("not with these sizes")

    monkeypatch.setattr(search, "find_dropouts", fails)
    refused = pytest.raises(
        PlanError,
        match="a tiny copy of the model cannot be tested: RuntimeError: not with these sizes",
    )
    with proved_anew(), refused:
        plan(config_of("bamba", mamba_d_state=4), ParallelConfig(tp_size=2))
