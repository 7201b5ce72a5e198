"""Config in, plan out."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    LlamaForSequenceClassification,
)

import hfscale
from hfscale import ParallelConfig, PlanError
from hfscale.api.build_plan import build_plan
from hfscale.models import FAMILIES
from hfscale.models.blueprint import Block, Blueprint
from hfscale.plan import Cut, Plan
from tests.tiny_models import tiny

_LAYER = "model.layers.1"


def _model(family: str, auto_class: Any = AutoModelForCausalLM, **changes: Any) -> Any:
    with torch.device("meta"):
        return auto_class.from_config(tiny(family, **changes))


def _plan(
    family: str, auto_class: Any = AutoModelForCausalLM, *, changes: Any = None, **sizes: Any
) -> Plan:
    return build_plan(_model(family, auto_class, **(changes or {})), ParallelConfig(**sizes))


def _shape(plan: Plan, name: str, **ranks: int) -> tuple[int, ...]:
    return plan.by_name[name].local_shape(ranks)


def test_one_process_cuts_nothing() -> None:
    plan = _plan("llama")
    assert plan.family == "llama"
    assert plan.blocks == ()
    assert plan.embedding is None
    assert (plan.head, plan.loss) == ("lm_head", "ForCausalLM")
    assert plan.layers == ("model.layers.0", "model.layers.1")
    for planned in plan.parameters:
        assert planned.cuts == ()
        assert planned.partial == ()
        assert planned.local_shape({}) == planned.shape


def test_every_parameter_of_the_model_is_planned_in_order() -> None:
    model = _model("llama", attention_bias=True, tie_word_embeddings=True)
    plan = build_plan(model, ParallelConfig(tp_size=2, dp_shard_size=2))
    named = list(model.named_parameters(remove_duplicate=False))
    assert [planned.name for planned in plan.parameters] == [name for name, _ in named]
    assert [planned.shape for planned in plan.parameters] == [
        tuple(parameter.shape) for _, parameter in named
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_llama_over_two_tensor_ranks(rank: int) -> None:
    plan = _plan("llama", tp_size=2)
    assert _shape(plan, f"{_LAYER}.self_attn.q_proj.weight", tp=rank) == (16, 32)
    assert _shape(plan, f"{_LAYER}.self_attn.k_proj.weight", tp=rank) == (8, 32)
    assert _shape(plan, f"{_LAYER}.self_attn.v_proj.weight", tp=rank) == (8, 32)
    assert _shape(plan, f"{_LAYER}.self_attn.o_proj.weight", tp=rank) == (32, 16)
    assert _shape(plan, f"{_LAYER}.mlp.gate_proj.weight", tp=rank) == (25, 32)
    assert _shape(plan, f"{_LAYER}.mlp.up_proj.weight", tp=rank) == (25, 32)
    assert _shape(plan, f"{_LAYER}.mlp.down_proj.weight", tp=rank) == (32, 25)
    assert _shape(plan, f"{_LAYER}.input_layernorm.weight", tp=rank) == (32,)
    assert _shape(plan, "model.norm.weight", tp=rank) == (32,)
    assert [block.name for block in plan.blocks] == [
        f"model.layers.{i}.{block}" for i in (0, 1) for block in ("self_attn", "mlp")
    ]
    assert plan.blocks[3].column == (f"{_LAYER}.mlp.gate_proj", f"{_LAYER}.mlp.up_proj")
    assert plan.blocks[3].row == (f"{_LAYER}.mlp.down_proj",)


@pytest.mark.parametrize(("rank", "rows"), [(0, 65), (1, 64)])
def test_an_odd_vocabulary(rank: int, rows: int) -> None:
    plan = _plan("llama", changes={"vocab_size": 129}, tp_size=2)
    assert plan.embedding == "model.embed_tokens"
    assert _shape(plan, "model.embed_tokens.weight", tp=rank) == (rows, 32)
    assert _shape(plan, "lm_head.weight", tp=rank) == (rows, 32)


def test_an_odd_intermediate_size_is_cut_alike_on_both_sides() -> None:
    plan = _plan("llama", changes={"intermediate_size": 51}, tp_size=2)
    for rank, size in enumerate((26, 25)):
        assert _shape(plan, f"{_LAYER}.mlp.gate_proj.weight", tp=rank) == (size, 32)
        assert _shape(plan, f"{_LAYER}.mlp.up_proj.weight", tp=rank) == (size, 32)
        assert _shape(plan, f"{_LAYER}.mlp.down_proj.weight", tp=rank) == (32, size)


def test_biases_of_row_projections_are_whole_with_partial_gradients() -> None:
    plan = _plan("llama", changes={"attention_bias": True, "mlp_bias": True}, tp_size=2)
    partial = {planned.name for planned in plan.parameters if planned.partial}
    expected = {
        f"model.layers.{i}.{row}.bias"
        for i in (0, 1)
        for row in ("self_attn.o_proj", "mlp.down_proj")
    }
    assert partial == expected
    for name in expected:
        assert plan.by_name[name].partial == ("tp",)
        assert plan.by_name[name].cuts == ()
    assert plan.by_name[f"{_LAYER}.self_attn.q_proj.bias"].cuts == (Cut("tp", 0, 2),)
    assert plan.by_name[f"{_LAYER}.mlp.up_proj.bias"].cuts == (Cut("tp", 0, 2),)


def test_per_head_norms_are_whole_with_partial_gradients() -> None:
    plan = _plan("qwen3", tp_size=2)
    partial = {planned.name for planned in plan.parameters if planned.partial}
    assert partial == {
        f"model.layers.{i}.self_attn.{norm}.weight" for i in (0, 1) for norm in ("q_norm", "k_norm")
    }
    assert plan.blocks[0].shared == (
        "model.layers.0.self_attn.q_norm",
        "model.layers.0.self_attn.k_norm",
    )


def test_gpt2_fused_projections_are_cut_per_part() -> None:
    plan = _plan("gpt2", tp_size=2)
    attention = "transformer.h.1.attn"
    assert plan.by_name[f"{attention}.c_attn.weight"].cuts == (Cut("tp", 1, 2, (32, 32, 32)),)
    assert plan.by_name[f"{attention}.c_attn.bias"].cuts == (Cut("tp", 0, 2, (32, 32, 32)),)
    assert _shape(plan, f"{attention}.c_attn.weight", tp=1) == (32, 48)
    whole = torch.arange(96)
    share = plan.by_name[f"{attention}.c_attn.bias"].take(whole, {"tp": 1})
    assert share.tolist() == [*range(16, 32), *range(48, 64), *range(80, 96)]
    assert plan.by_name[f"{attention}.c_proj.weight"].cuts == (Cut("tp", 0, 2),)
    assert plan.by_name[f"{attention}.c_proj.bias"].partial == ("tp",)
    assert plan.by_name["transformer.h.1.mlp.c_fc.weight"].cuts == (Cut("tp", 1, 2),)
    assert plan.by_name["transformer.h.1.mlp.c_proj.bias"].partial == ("tp",)
    assert plan.by_name["transformer.wpe.weight"].cuts == ()
    assert plan.blocks[0].local_attributes == (("split_size", 2),)


def test_dropout_of_cut_activations_is_known() -> None:
    assert _plan("llama", changes={"attention_dropout": 0.25}, tp_size=2).blocks[0].dropout == 0.25
    assert _plan("gpt2", changes={"attn_pdrop": 0.5}, tp_size=2).blocks[0].dropout == 0.5
    assert _plan("llama", tp_size=2).blocks[0].dropout == 0.0


@pytest.mark.parametrize("tied", [True, False])
def test_ties(tied: bool) -> None:
    plan = _plan("llama", changes={"tie_word_embeddings": tied}, tp_size=2, dp_shard_size=2)
    head = plan.by_name["lm_head.weight"]
    embedding = plan.by_name["model.embed_tokens.weight"]
    assert head.tied_to == ("model.embed_tokens.weight" if tied else None)
    assert embedding.tied_to is None
    assert head.cuts == embedding.cuts
    assert (head in plan.owned()) is not tied


def test_sharded_data_cuts_dim_0_after_tensor() -> None:
    plan = _plan("llama", tp_size=2, dp_shard_size=3)
    assert plan.by_name[f"{_LAYER}.self_attn.q_proj.weight"].cuts == (
        Cut("tp", 0, 2),
        Cut("dp_shard", 0, 3),
    )
    assert [
        _shape(plan, f"{_LAYER}.self_attn.q_proj.weight", tp=1, dp_shard=r)[0] for r in range(3)
    ] == [6, 6, 4]
    assert plan.by_name[f"{_LAYER}.self_attn.o_proj.weight"].cuts == (
        Cut("tp", 1, 2),
        Cut("dp_shard", 0, 3),
    )
    assert plan.by_name["model.norm.weight"].cuts == (Cut("dp_shard", 0, 3),)


def test_replicated_data_cuts_nothing() -> None:
    assert not any(planned.cuts for planned in _plan("llama", dp_replicate_size=4).parameters)


def test_a_base_model_has_no_head() -> None:
    plan = _plan("llama", AutoModel, tp_size=2)
    assert (plan.head, plan.loss, plan.embedding) == (None, None, "embed_tokens")
    assert plan.layers == ("layers.0", "layers.1")
    assert _shape(plan, "embed_tokens.weight", tp=1) == (33, 32)


def test_a_classification_head_stays_whole() -> None:
    with torch.device("meta"):
        model = LlamaForSequenceClassification(tiny("llama", pad_token_id=0))
    plan = build_plan(model, ParallelConfig(tp_size=2))
    assert (plan.head, plan.loss) == (None, None)
    assert plan.by_name["score.weight"].cuts == ()


def test_a_family_without_a_blueprint_still_has_data_axes() -> None:
    with torch.device("meta"):
        size = {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 8,
        }
        model = BertLMHeadModel(BertConfig(**size, is_decoder=True))
    plan = build_plan(model, ParallelConfig(dp_shard_size=2))
    # The host lists the embeddings among the layers too; tied to the head, they would be untied by sharding alone.
    assert plan.layers == ("bert.encoder.layer.0", "bert.encoder.layer.1")
    assert all(planned.cut_over("dp_shard") for planned in plan.parameters)


def test_layers_that_share_a_tensor_are_not_sharded_apart() -> None:
    model = _model("llama")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    assert build_plan(model, ParallelConfig(tp_size=2))
    (problem,) = _problems(model, dp_shard_size=2)
    assert (
        "model.layers.* shares the tensor model.layers.*.mlp.up_proj.weight with a module outside"
        in problem
    )


def test_layers_inside_layers_are_not_listed() -> None:
    model = _model("llama")
    model._no_split_modules = ["LlamaDecoderLayer", "LlamaMLP"]
    model.config.model_type, model.config.base_model_tp_plan = "newcomer", None
    assert build_plan(model, ParallelConfig(dp_shard_size=2)).layers == (
        "model.layers.0",
        "model.layers.1",
    )


def _problems(model: Any, **sizes: Any) -> list[str]:
    with pytest.raises(PlanError) as caught:
        build_plan(model, ParallelConfig(**sizes))
    first, *rest = str(caught.value).splitlines()
    assert first == f"{ParallelConfig(**sizes).describe()} does not fit {type(model).__name__}:"
    assert all(line.startswith("  - ") for line in rest)
    return [line[4:] for line in rest]


def test_all_problems_come_at_once_each_with_what_to_use() -> None:
    problems = _problems(_model("llama"), tp_size=3, ep_size=6, cp_size=7, cp_method="heads")
    assert [problem.partition(" ")[0].rstrip(":") for problem in problems] == [
        "ep_size=6",
        "tp_size=3",
        "cp_method='heads'",
    ]
    ways_out = ["ep_size=1", "tp_size 1, 2, 4", "cp_method='gather' or 'ring'"]
    for problem, way_out in zip(problems, ways_out, strict=True):
        assert problem.endswith(f"use {way_out}")
    assert "4 attention heads and 2 key/value heads of 'llama'" in problems[1]


def test_a_rank_without_entries_is_refused() -> None:
    model = _model(
        "llama", vocab_size=3, num_attention_heads=4, num_key_value_heads=4, intermediate_size=50
    )
    assert _problems(model, tp_size=4) == [
        "tp_size=4 leaves a rank without any of the 3 entries of lm_head.weight: use tp_size 1 to 3",
        "tp_size=4 leaves a rank without any of the 3 entries of model.embed_tokens.weight: use tp_size 1 to 3",
    ]


def _with_blueprint(
    monkeypatch: pytest.MonkeyPatch, layers: str = "layers", **blocks: Block
) -> None:
    monkeypatch.setitem(FAMILIES, "llama", Blueprint(layers, blocks))


def test_a_layer_list_that_matches_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_blueprint(monkeypatch, "blocks", mlp=Block(("gate_proj", "up_proj"), ("down_proj",)))
    assert any(
        "names the layer list 'model.blocks'" in problem
        for problem in _problems(_model("llama"), tp_size=2)
    )


def test_a_block_that_matches_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    roles = Block(("gate_proj", "up_proj"), ("down_proj",))
    _with_blueprint(monkeypatch, mlp=roles, feed_forward=roles)
    (problem,) = _problems(_model("llama"), tp_size=2)
    assert "names a block 'feed_forward' that no layer has" in problem


def test_a_projection_that_is_none_is_refused_once_for_all_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _with_blueprint(
        monkeypatch, mlp=Block(("gate_proj", "up_proj", "act_fn", "side_proj"), ("down_proj",))
    )
    problems = _problems(_model("llama"), tp_size=2)
    assert len(problems) == 2
    assert (
        "model.layers.*.mlp.act_fn is a projection (nn.Linear or Conv1D), but it is SiLU"
        in problems[0]
    )
    assert (
        "model.layers.*.mlp.side_proj is a projection (nn.Linear or Conv1D), but it is nothing"
        in problems[1]
    )


def test_parts_that_do_not_divide_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block(("gate_proj", "up_proj"), ("down_proj",), parts={"up_proj": 3})  # of 50 entries
    _with_blueprint(monkeypatch, mlp=block)
    (problem,) = _problems(_model("llama"), tp_size=2)
    assert (
        "3 equal matrices are fused in model.layers.*.mlp.up_proj.weight, but its 50 entries"
        in problem
    )


def test_a_parameter_inside_a_block_without_a_role_is_refused() -> None:
    # its gradient would be a part on every rank, and nobody would sum the parts
    model = _model("llama")
    for layer in model.model.layers:
        layer.mlp.scale = nn.Parameter(torch.ones(1, device="meta"))
    (problem,) = _problems(model, tp_size=2)
    assert "model.layers.*.mlp.scale is inside a sharded block, but the blueprint" in problem
    assert build_plan(model, ParallelConfig(dp_shard_size=2))


def test_one_tensor_with_two_roles_is_refused() -> None:
    model = _model("llama", intermediate_size=32)
    model.model.norm.weight = model.model.layers[0].mlp.down_proj.weight
    (problem,) = _problems(model, tp_size=2)
    assert "model.layers.*.mlp.down_proj.weight and model.norm.weight are one tensor" in problem


def test_one_module_under_two_names_has_one_rule() -> None:
    model = _model("llama")
    model.model.layers[1] = model.model.layers[0]
    plan = build_plan(model, ParallelConfig(tp_size=2))
    second = plan.by_name["model.layers.1.mlp.up_proj.weight"]
    assert second.tied_to == "model.layers.0.mlp.up_proj.weight"
    assert second.cuts == plan.by_name[second.tied_to].cuts == (Cut("tp", 0, 2),)


class _OwnLookup(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(ids, self.weight * 2)


class _ScaledEmbedding(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 2


def test_an_embedding_that_computes_stays_whole_unless_tied() -> None:
    model = _model("llama")
    model.model.embed_tokens.__class__ = _OwnLookup
    plan = build_plan(model, ParallelConfig(tp_size=2))
    assert plan.embedding is None
    assert plan.by_name["model.embed_tokens.weight"].cuts == ()
    assert plan.by_name["lm_head.weight"].cuts == (Cut("tp", 0, 2),)
    tied = _model("llama", tie_word_embeddings=True)
    tied.model.embed_tokens.__class__ = _OwnLookup
    (problem,) = _problems(tied, tp_size=2)
    assert "model.embed_tokens is a _OwnLookup tied to the head" in problem


def test_an_embedding_that_scales_a_stock_lookup_is_cut() -> None:
    tied = _model("llama", tie_word_embeddings=True)
    tied.model.embed_tokens.__class__ = _ScaledEmbedding
    plan = build_plan(tied, ParallelConfig(tp_size=2))
    assert plan.embedding == "model.embed_tokens"
    assert (
        plan.by_name["lm_head.weight"].cuts == plan.by_name["model.embed_tokens.weight"].cuts != ()
    )


def test_an_embedding_with_sparse_gradients_is_refused() -> None:
    model = _model("llama")
    model.model.embed_tokens.sparse = True
    assert "sparse gradients" in _problems(model, tp_size=2)[0]


def test_a_scalar_does_not_fit_data_axes() -> None:
    model = _model("llama")
    model.scale = nn.Parameter(torch.ones((), device="meta"))
    assert build_plan(model, ParallelConfig(tp_size=2)).by_name["scale"].local_shape({}) == ()
    (problem,) = _problems(model, dp_replicate_size=2)
    assert "scale is a scalar, which FSDP2 cannot hold" in problem


def test_a_quantized_checkpoint_is_refused() -> None:
    model = _model("llama")
    model.config.quantization_config = {"quant_method": "fp8"}
    (problem,) = _problems(model)
    assert "quantized (fp8)" in problem


def test_plan_takes_a_config_a_directory_and_a_type(tmp_path: Any) -> None:
    config = tiny("llama")
    config.save_pretrained(tmp_path)
    layout = ParallelConfig(tp_size=2)
    from_directory = hfscale.plan(str(tmp_path), layout, dtype=torch.bfloat16)
    assert {planned.dtype for planned in from_directory.parameters} == {torch.bfloat16}
    from_config = hfscale.plan(config, layout)
    assert [planned.cuts for planned in from_config.parameters] == [
        p.cuts for p in from_directory.parameters
    ]


def test_a_plan_needs_no_process_group() -> None:
    hfscale.plan(tiny("llama"), ParallelConfig(tp_size=2, dp_shard_size=8, dp_replicate_size=16))
    assert not torch.distributed.is_initialized()
