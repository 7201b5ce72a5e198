"""Stages: shared out by cost or as asked, placed on ranks, and what each of them holds."""

import json
import time
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BloomConfig,
    Gemma3nTextConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
    T5Config,
)

from hfscale import ConfigError, ParallelConfig, PlanError
from hfscale.config import SCHEDULES
from hfscale.pipeline import default_virtual_stages, order, stage_ranks
from hfscale.plan import (
    Cost,
    Costs,
    Plan,
    StagePlan,
    Tie,
    assign_stages,
    balance,
    build,
    build_plan,
    layer_costs,
    place_stages,
    to_json,
)
from tests.models import tiny


def on_meta(config: PreTrainedConfig, auto_class: Any = AutoModelForCausalLM) -> Any:
    with torch.device("meta"):
        return auto_class.from_config(config)


def cut(family: str, auto_class: Any = AutoModelForCausalLM, *, changes: Any = None, **layout: Any) -> StagePlan:
    return assign_stages(on_meta(_config(family, **(changes or {})), auto_class), ParallelConfig(**layout))


def _config(family: str, **changes: Any) -> PreTrainedConfig:
    kinds: dict[str, Callable[..., PreTrainedConfig]] = {"mixtral": MixtralConfig, "opt": OPTConfig}
    if family not in kinds:
        return tiny(family, **{("n_layer" if family == "gpt2" else "num_hidden_layers"): 5, **changes})
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "vocab_size": 67}
    own: dict[str, Any] = {
        "mixtral": {"intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 4},
        "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16, "max_position_embeddings": 64},
    }
    return kinds[family](**{**sizes, **own[family], **changes})


# --- sharing out ------------------------------------------------------------------------------------------------------


def _by_force(work: list[int], stages: int, first: int, last: int) -> tuple[int, ...]:
    def key(counts: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        sizes, start = [], 0
        for index, count in enumerate(counts):
            sizes.append(sum(work[start : start + count]) + first * (index == 0) + last * (index == stages - 1))
            start += count
        return max(sizes), sum(count**2 for count in counts), counts

    borders = combinations(range(1, len(work)), stages - 1)
    return min((tuple(b - a for a, b in zip((0, *c), (*c, len(work)), strict=True)) for c in borders), key=key)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_balance_is_the_best_there_is(data: st.DataObject) -> None:
    work = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
    stages = data.draw(st.integers(1, len(work)))
    first, last = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 20))
    assert balance(work, stages, first, last) == _by_force(work, stages, first, last)


def test_balance() -> None:
    assert balance([1] * 8, 4) == (2, 2, 2, 2)
    assert balance([1] * 7, 4) == (1, 2, 2, 2)  # the front keeps most microbatches
    assert balance([1] * 8, 4, last=2) == (2, 2, 3, 1)  # (2, 3, 2, 1) and (3, 2, 2, 1) are as good
    assert balance([1] * 8, 2, last=100) == (7, 1)
    assert balance([5, 1, 1, 1, 1, 1], 2) == (1, 5)
    start = time.perf_counter()
    assert sum(balance([3, 4] * 64, 64, 5, 9)) == 128
    assert time.perf_counter() - start < 5
    with pytest.raises(ValueError, match="3 layers cannot be shared out to 4 stages"):
        balance([1, 1, 1], 4)


def test_a_heavy_head_takes_layers_from_the_last_stage() -> None:
    wide = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, vocab_size=128256
    )
    plan = assign_stages(on_meta(wide), ParallelConfig(pp_size=4))
    counts = [len(stage.layers) for stage in plan.stages]
    assert sum(counts) == 16
    assert counts[-1] < min(counts[:3])
    assert plan.imbalance < 1.1
    assert "of the mean" in str(plan)


# --- what things cost -------------------------------------------------------------------------------------------------


def test_cost_of_llama() -> None:
    model = on_meta(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=100,
        )
    )
    layers = [f"model.layers.{index}" for index in range(3)]
    costs = layer_costs(model, layers, ["model.embed_tokens"], ["model.norm", "lm_head"], sequence=10)
    projections = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96
    assert costs.layers == (Cost(2 * projections + 2 * 2 * 10 * 64, projections + 2 * 64),) * 3
    assert costs.before == Cost(0, 6400)  # a lookup
    assert costs.after == Cost(2 * 6400, 6400 + 64)
    one, two = costs.of_stages((1, 2))
    assert one == costs.before + costs.layers[0]
    assert two.flops == 2 * costs.layers[0].flops + 2 * 6400


def test_experts_cost_what_is_active_of_them() -> None:
    model = on_meta(_config("mixtral", num_experts_per_tok=1))
    (cost,) = layer_costs(model, ["model.layers.0"], sequence=0).layers
    attention, experts, router = 32 * 32 * 2 + 32 * 16 * 2, 4 * 3 * 32 * 48, 4 * 32
    assert cost.flops == 2 * (attention + experts // 4 + router)
    assert cost.parameters == attention + experts + router + 2 * 32


def test_conv1d_and_learned_positions() -> None:
    model = on_meta(tiny("gpt2"))
    costs = layer_costs(model, ["transformer.h.0"], ["transformer.wte", "transformer.wpe"], sequence=0)
    assert costs.layers[0].flops == 2 * (32 * 96 + 32 * 32 + 2 * 32 * 128)
    assert costs.before == Cost(0, 67 * 32 + 64 * 32)


def test_work_weighs_parameters_where_batches_are_small() -> None:
    light, heavy = Cost(flops=100, parameters=10), Cost(flops=0, parameters=50)
    assert light.work(1 << 20) > heavy.work(1 << 20)
    assert light.work(1) < heavy.work(1)
    few, many = (Costs(Cost(), (light,) * 4, Cost(0, 10), tokens).balanced(2) for tokens in (1, 1 << 30))
    assert (few, many) == ((2, 2), (2, 2))
    assert Costs(Cost(), (light,) * 4, Cost(0, 20), 1).balanced(2) == (3, 1)


# --- where stages are -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_are_those_of_the_schedule(schedule: str) -> None:
    for pp_size in (1, 2, 3):
        virtual = default_virtual_stages(schedule)
        planned = place_stages(schedule, pp_size, virtual)
        assert dict(enumerate(planned)) == stage_ranks(order(schedule, pp_size, 6, virtual))


def test_a_v_has_two_stages_per_rank() -> None:
    assert place_stages("zbv", 3, 2) == (0, 1, 2, 2, 1, 0)
    assert place_stages("interleaved1f1b", 2, 3) == (0, 1, 0, 1, 0, 1)
    with pytest.raises(ConfigError, match="virtual_stages=1 does not fit dualpipev: use 2"):
        place_stages("dualpipev", 2)
    with pytest.raises(ConfigError, match="pass that as ranks="):
        place_stages("mine.csv", 2)
    plan = assign_stages(on_meta(_config("llama")), ParallelConfig(pp_size=2, pipeline_schedule="a.csv"), {0: 1, 1: 0})
    assert plan.ranks == (1, 0)
    with pytest.raises(PlanError, match="the schedule has 3 stages, and the layout 2"):
        assign_stages(on_meta(_config("llama")), ParallelConfig(pp_size=2), [0, 1, 2])


# --- what they hold ---------------------------------------------------------------------------------------------------


def _all_held_once(model: Any, plan: StagePlan) -> None:
    """Every parameter is on one stage, but for those that are reported as tied."""
    tied = {name: tie for tie in plan.ties for name in tie.names}
    for name, _ in model.named_parameters(remove_duplicate=False):
        stages = {stage.index for stage in plan.stages if stage.holds(name)}
        assert plan.stage_of(name) == min(stages)
        assert len(stages) == 1 or name in tied
    for tie in plan.ties:
        assert set(tie.stages) == {s.index for s in plan.stages if any(s.holds(name) for name in tie.names)}
    copies = sum((len(t.stages) - 1) * model.get_parameter(t.names[0]).numel() for t in plan.ties)
    assert sum(stage.parameters for stage in plan.stages) == sum(p.numel() for p in model.parameters()) + copies


@pytest.mark.parametrize(
    ("family", "first", "last", "everywhere"),
    [
        ("llama", ["model.embed_tokens"], ["model.norm", "lm_head"], ["model.rotary_emb"]),
        ("mixtral", ["model.embed_tokens"], ["model.norm", "lm_head"], ["model.rotary_emb"]),
        ("gpt2", ["transformer.wte", "transformer.wpe"], ["transformer.ln_f", "lm_head"], ["transformer.drop"]),
        (
            "opt",
            ["model.decoder.embed_tokens", "model.decoder.embed_positions", "model.decoder.project_in"],
            ["model.decoder.final_layer_norm", "model.decoder.project_out", "lm_head"],
            [],
        ),
    ],
)
def test_what_is_around_the_layers(family: str, first: list[str], last: list[str], everywhere: list[str]) -> None:
    model = on_meta(_config(family))
    plan = assign_stages(model, ParallelConfig(pp_size=2, virtual_stages=2, pipeline_schedule="interleaved1f1b"))
    assert [list(stage.modules) for stage in plan.stages] == [first, [], [], last]
    assert list(plan.everywhere) == everywhere
    assert plan.returns is None
    assert dict(plan.module_returns) == dict.fromkeys([*first, *last])
    assert [stage.rank for stage in plan.stages] == [0, 1, 0, 1]
    assert [stage.index for stage in plan.of_rank(1)] == [1, 3]
    listed = model.get_submodule(plan.layer_list)
    assert plan.owner == plan.layer_list.rpartition(".")[0]
    names = [f"{plan.layer_list}.{index}" for index in range(len(listed))]
    assert [layer for stage in plan.stages for layer in stage.layers] == names
    _all_held_once(model, plan)


def test_layers_that_return_a_tuple() -> None:
    model = on_meta(BloomConfig(hidden_size=32, n_layer=3, n_head=4, vocab_size=67))
    plan = assign_stages(model, ParallelConfig(pp_size=2))
    assert plan.returns == 2
    assert plan.stages[0].modules == ("transformer.word_embeddings", "transformer.word_embeddings_layernorm")


def test_an_embedding_beside_the_module_that_calls_the_layers() -> None:
    config = BertConfig(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48, vocab_size=67)
    model = on_meta(config, AutoModelForMaskedLM)
    plan = assign_stages(model, ParallelConfig(pp_size=2))
    assert (plan.owner, plan.stages[0].modules, plan.stages[1].modules) == (
        "bert.encoder",
        ("bert.embeddings",),
        ("cls",),
    )
    (tie,) = plan.ties
    assert set(tie.names) == {"bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"}
    _all_held_once(model, plan)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_tied_across_stages(family: str) -> None:
    model = on_meta(_config(family, tie_word_embeddings=True))
    plan = assign_stages(model, ParallelConfig(pp_size=3))
    embedding = "model.embed_tokens.weight" if family == "llama" else "transformer.wte.weight"
    assert plan.ties == (Tie((embedding, "lm_head.weight"), (0, 2)),)
    assert plan.ties[0].owner == 0
    assert (plan.stage_of(embedding), plan.stage_of("lm_head.weight")) == (0, 2)
    assert f"tied: {embedding} = lm_head.weight on stages 0, 2, counted and saved by stage 0" in str(plan)
    _all_held_once(model, plan)
    assert cut(family, changes={"tie_word_embeddings": False}, pp_size=3).ties == ()
    assert assign_stages(model, ParallelConfig()).ties == ()  # one stage holds one


def test_asked_for_by_hand() -> None:
    plan = cut("llama", pp_size=2, stage_layers=[1, 4])
    assert [stage.layers[0] for stage in plan.stages] == ["model.layers.0", "model.layers.1"]
    assert [len(stage.layers) for stage in plan.stages] == [1, 4]
    assert plan.imbalance > 1.2
    plan = cut("gpt2", pp_size=2, virtual_stages=2, pipeline_schedule="zbv", stage_layers="1,2,1,1")
    assert [(stage.rank, len(stage.layers)) for stage in plan.stages] == [(0, 1), (1, 2), (1, 1), (0, 1)]
    with pytest.raises(PlanError, match=r"stage_layers=\[2, 2\] shares out 4 layers, .* has 5: use numbers that sum"):
        cut("llama", pp_size=2, stage_layers=[2, 2])
    with pytest.raises(PlanError, match=r"stage_layers=\[2\] shares out 2 layers"):
        build_plan(on_meta(_config("llama")), ParallelConfig(stage_layers=[2]))


def test_too_many_stages() -> None:
    with pytest.raises(PlanError, match="pp_size=6 exceeds the 5 layers of 'llama': use pp_size 1 to 5"):
        cut("llama", pp_size=6)
    layout = {"pp_size": 3, "virtual_stages": 2, "pipeline_schedule": "interleaved1f1b"}
    with pytest.raises(
        PlanError, match="virtual_stages=2 exceeds the 5 layers of 'gpt2': use pp_size 1 to 2 with virtual_stages=2"
    ):
        cut("gpt2", **layout)


# --- what cannot be cut -----------------------------------------------------------------------------------------------


def test_encoder_decoders_are_refused_by_name() -> None:
    config = T5Config(d_model=32, d_ff=48, num_layers=3, num_heads=4, d_kv=8, vocab_size=67)
    with pytest.raises(PlanError, match="T5ForConditionalGeneration: an encoder-decoder has two streams"):
        assign_stages(on_meta(config, AutoModelForSeq2SeqLM), ParallelConfig(pp_size=2))


def test_what_travels_besides_the_stream_is_refused() -> None:
    config = Gemma3nTextConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=10,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=67,
        vocab_size_per_layer_input=67,
        num_kv_shared_layers=2,
        layer_types=None,
        activation_sparsity_pattern=None,
    )
    with pytest.raises(PlanError, match=r"given what depends on the parameters of model\.per_layer_.* besides the str"):
        assign_stages(on_meta(config), ParallelConfig(pp_size=2))


def test_layers_run_twice_or_used_between_are_refused() -> None:
    model = on_meta(_config("llama"))
    model.model.layers[1].register_forward_hook(lambda *_: model.model.norm(_[2]))
    with pytest.raises(PlanError, match=r"model\.norm is used between layers, so every stage would need it"):
        assign_stages(model, ParallelConfig(pp_size=2))
    model = on_meta(_config("llama"))
    model.model.layers.__class__ = _Twice
    with pytest.raises(PlanError, match="does not call its layers one after the other"):
        assign_stages(model, ParallelConfig(pp_size=2))


class _Twice(torch.nn.ModuleList):
    """A list whose slices repeat."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return [*found, *found] if isinstance(index, slice) else found


def test_what_tokens_do_not_reach_is_refused() -> None:
    model = on_meta(_config("llama"))
    model.model.vision = torch.nn.Linear(4, 4, device="meta")
    with pytest.raises(PlanError, match=r"model\.vision has no part in a pass over tokens"):
        assign_stages(model, ParallelConfig(pp_size=2))


def test_a_router_loss_is_refused() -> None:
    with pytest.raises(PlanError, match="output_router_logits=True makes a loss of what the layers of all stages"):
        cut("mixtral", changes={"output_router_logits": True}, pp_size=2)


# --- in the plan ------------------------------------------------------------------------------------------------------


@pytest.fixture
def _switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(build._LATER, "pp")


def _plan(family: str, *, changes: Any = None, **layout: Any) -> Plan:
    return build_plan(on_meta(_config(family, **(changes or {}))), ParallelConfig(**layout))


def test_it_cannot_be_run_yet() -> None:
    with pytest.raises(PlanError, match="pipeline stages cannot be run by this version"):
        _plan("llama", pp_size=2)
    assert _plan("llama").stages is None


@pytest.mark.usefixtures("_switched_on")
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "opt"])
def test_every_parameter_has_its_stage(family: str) -> None:
    plan = _plan(family, pp_size=2, dp_shard_size=2, stage_layers=[2, 3])
    assert plan.stages is not None
    for parameter in plan.parameters:
        assert plan.stages.stages[parameter.stage].holds(parameter.name)
        inside = parameter.name.startswith(f"{plan.stages.layer_list}.")
        assert not inside or parameter.stage == (int(parameter.name.split(".")[2 if family != "opt" else 3]) > 1)
    document = json.loads(to_json(plan))
    assert [len(stage["layers"]) for stage in document["stages"]["stages"]] == [2, 3]


@pytest.mark.usefixtures("_switched_on")
def test_it_is_printed() -> None:
    plan = _plan("llama", changes={"tie_word_embeddings": True}, pp_size=2, tp_size=2)
    text = str(plan)
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.startswith(("model.", "lm_head"))}
    assert rows["model.embed_tokens.weight"][2] == "0"
    assert rows["model.layers.*.mlp.up_proj.weight"][2] == "0-1"
    assert rows["model.norm.weight"][2] == "1"
    assert "sum over stages 0, 1" in text
    assert "tied to model.embed_tokens.weight, a copy on stage 1" in text
    assert "largest stage / mean: 1." in text
    layer = 2 * (32 * 32 + 32 * 16 + 75 * 32) // 2 + 2 * 32
    assert f"largest rank: {3 * layer + 34 * 32:,} parameters" in text


def test_a_large_model_takes_seconds() -> None:
    config = LlamaConfig(
        num_hidden_layers=80, hidden_size=8192, num_attention_heads=64, num_key_value_heads=8, intermediate_size=28672
    )
    model = on_meta(config)
    start = time.perf_counter()
    plan = assign_stages(model, ParallelConfig(pp_size=8, virtual_stages=2, pipeline_schedule="interleaved1f1b"))
    assert time.perf_counter() - start < 5
    assert {len(stage.layers) for stage in plan.stages} <= {4, 5, 6}
    assert plan.imbalance < 1.25
