"""Stages: placed on ranks, what each of them holds, and what cannot be cut."""

import copy
import json
import time
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BloomConfig,
    Gemma3nTextConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
)

from hfscale import ConfigError, ParallelConfig, PlanError
from hfscale.api.build_plan import build_plan
from hfscale.config.schedules import schedule_names, schedule_of
from hfscale.extras.proofs import layer_probes as passage, probe as probes
from hfscale.models.clone import tiny_clone
from hfscale.parallel.pipeline.orders import order
from hfscale.parallel.pipeline.timeline import stage_ranks
from hfscale.plan import Plan, Stage, StagePlan
from hfscale.plan.stages import Tie, place_stages
from hfscale.plan.table import to_json
from tests.proved_anew import proved_anew
from tests.tiny_models import assign_stages, tiny


def on_meta(config: PreTrainedConfig, auto_class: Any = AutoModelForCausalLM) -> Any:
    with torch.device("meta"):
        return auto_class.from_config(config)


def cut(
    family: str, auto_class: Any = AutoModelForCausalLM, *, changes: Any = None, **layout: Any
) -> StagePlan:
    return assign_stages(
        on_meta(_config(family, **(changes or {})), auto_class), ParallelConfig(**layout)
    )


def _config(family: str, **changes: Any) -> PreTrainedConfig:
    kinds: dict[str, Callable[..., PreTrainedConfig]] = {
        "bert": BertConfig,
        "bloom": BloomConfig,
        "mixtral": MixtralConfig,
        "opt": OPTConfig,
    }
    if family not in kinds:
        return tiny(
            family, **{("n_layer" if family == "gpt2" else "num_hidden_layers"): 5, **changes}
        )
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "vocab_size": 67,
    }
    own: dict[str, Any] = {
        "mixtral": {"intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 4},
        "bert": {"intermediate_size": 48},
        "bloom": {},
        "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16, "max_position_embeddings": 64},
    }
    return kinds[family](**{**sizes, **own[family], **changes})


# --- where stages are -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", schedule_names())
def test_ranks_are_those_of_the_schedule(schedule: str) -> None:
    for pp_size in (1, 2, 3):
        virtual = schedule_of(schedule).default_stages
        planned = place_stages(schedule, pp_size, virtual)
        assert dict(enumerate(planned)) == stage_ranks(order(schedule, pp_size, 6, virtual))


def test_a_v_has_two_stages_per_rank() -> None:
    assert place_stages("zbv", 3, 2) == (0, 1, 2, 2, 1, 0)
    assert place_stages("interleaved1f1b", 2, 3) == (0, 1, 0, 1, 0, 1)
    with pytest.raises(ConfigError, match="virtual_stages=1 does not fit dualpipev: use 2"):
        place_stages("dualpipev", 2)
    with pytest.raises(ConfigError, match="pass ranks="):
        place_stages("mine.csv", 2)
    plan = assign_stages(
        on_meta(_config("llama")),
        ParallelConfig(pp_size=2, pipeline_schedule="a.csv"),
        {0: 1, 1: 0},
    )
    assert plan.ranks == (1, 0)
    with pytest.raises(PlanError, match="the schedule has 3 stages, and the layout 2"):
        assign_stages(on_meta(_config("llama")), ParallelConfig(pp_size=2), [0, 1, 2])


# --- what they hold ---------------------------------------------------------------------------------------------------


def _all_held_once(model: Any, plan: StagePlan) -> None:
    """Every parameter is on one stage, but for those that are reported as tied."""
    tied = {name: tie for tie in plan.ties for name in tie.names}
    for name, _ in model.named_parameters(remove_duplicate=False):
        stages = {stage.index for stage in plan.stages if stage.is_local(name)}
        assert plan.stage_of(name) == min(stages)
        assert len(stages) == 1 or name in tied
    for tie in plan.ties:
        assert set(tie.stages) == {
            s.index for s in plan.stages if any(s.is_local(name) for name in tie.names)
        }
    copies = sum((len(t.stages) - 1) * model.get_parameter(t.names[0]).numel() for t in plan.ties)
    assert (
        sum(stage.parameters for stage in plan.stages)
        == sum(p.numel() for p in model.parameters()) + copies
    )


@pytest.mark.parametrize(
    ("family", "first", "last", "everywhere"),
    [
        ("llama", ["model.embed_tokens"], ["model.norm", "lm_head"], ["model.rotary_emb"]),
        ("mixtral", ["model.embed_tokens"], ["model.norm", "lm_head"], ["model.rotary_emb"]),
        (
            "gpt2",
            ["transformer.wte", "transformer.wpe"],
            ["transformer.ln_f", "lm_head"],
            ["transformer.drop"],
        ),
        (
            "opt",
            [
                "model.decoder.embed_tokens",
                "model.decoder.embed_positions",
                "model.decoder.project_in",
            ],
            ["model.decoder.final_layer_norm", "model.decoder.project_out", "lm_head"],
            [],
        ),
    ],
)
def test_what_is_around_the_layers(
    family: str, first: list[str], last: list[str], everywhere: list[str]
) -> None:
    model = on_meta(_config(family))
    plan = assign_stages(
        model, ParallelConfig(pp_size=2, virtual_stages=2, pipeline_schedule="interleaved1f1b")
    )
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


def test_experts_need_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "tiny_model", lambda model: None)
    model = on_meta(_config("mixtral"))
    with proved_anew():
        assert len(assign_stages(model, ParallelConfig(pp_size=5)).stages) == 5
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_experts_in_memory_are_not_run_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel multiplies theirs in float64."""
    monkeypatch.setattr(probes, "tiny_model", lambda model: None)
    model = AutoModelForCausalLM.from_config(_config("mixtral"), dtype=torch.float64)
    with proved_anew():
        assert len(assign_stages(model, ParallelConfig(pp_size=5)).stages) == 5


def test_layers_that_return_a_tuple() -> None:
    model = on_meta(_config("bloom"))
    plan = assign_stages(model, ParallelConfig(pp_size=2))
    assert plan.returns == 2
    assert plan.stages[0].modules == (
        "transformer.word_embeddings",
        "transformer.word_embeddings_layernorm",
    )


def test_an_embedding_beside_the_module_that_calls_the_layers() -> None:
    model = on_meta(_config("bert"), AutoModelForMaskedLM)
    plan = assign_stages(model, ParallelConfig(pp_size=2))
    assert (plan.owner, plan.stages[0].modules, plan.stages[1].modules) == (
        "bert.encoder",
        ("bert.embeddings",),
        ("cls",),
    )
    (tie,) = plan.ties
    assert set(tie.names) == {
        "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.weight",
    }
    _all_held_once(model, plan)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_tied_across_stages(family: str) -> None:
    model = on_meta(_config(family, tie_word_embeddings=True))
    plan = assign_stages(model, ParallelConfig(pp_size=3))
    embedding = "model.embed_tokens.weight" if family == "llama" else "transformer.wte.weight"
    assert plan.ties == (Tie((embedding, "lm_head.weight"), (0, 2)),)
    assert plan.ties[0].owner == 0
    assert (plan.stage_of(embedding), plan.stage_of("lm_head.weight")) == (0, 2)
    assert (
        f"tied: {embedding} = lm_head.weight on stages 0, 2, counted and saved by stage 0"
        in str(plan)
    )
    _all_held_once(model, plan)
    assert cut(family, changes={"tie_word_embeddings": False}, pp_size=3).ties == ()


def _run_stage(
    model: Any, plan: StagePlan, stage: Stage, ids: Tensor, stream: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The stream behind one stage, and the model's logits, when only that stage's parameters have their values."""
    model = copy.deepcopy(model)
    passed = []
    named = list(model.named_parameters(remove_duplicate=False))
    held = {id(parameter) for name, parameter in named if stage.is_local(name)}
    for _, parameter in named:
        if id(parameter) not in held:
            parameter.data.fill_(0.5)

    def put_in(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if stream is None:
            return None
        return (
            ((stream, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": stream})
        )

    def take_out(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        passed.append(output if plan.returns is None else output[0])

    model.get_submodule(stage.layers[0]).register_forward_pre_hook(put_in, with_kwargs=True)
    model.get_submodule(stage.layers[-1]).register_forward_hook(take_out)
    logits = model(input_ids=ids).logits
    return passed[0], logits


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "opt", "bloom", "bert"])
def test_a_stage_needs_nothing_but_its_own_parameters_and_the_stream(family: str) -> None:
    torch.manual_seed(0)
    auto_class = AutoModelForMaskedLM if family == "bert" else AutoModelForCausalLM
    # The other kernels have no 64 bits.
    options = {"experts_implementation": "eager"} if family == "mixtral" else {}
    config = _config(family, tie_word_embeddings=True)
    model = auto_class.from_config(config, dtype=torch.float64, **options).eval()
    for parameter in model.parameters():
        parameter.normal_(std=0.2)  # biases and norms as well
    plan = assign_stages(model, ParallelConfig(pp_size=3))
    ids = torch.tensor([[5, 9, 3, 60, 11]])
    expected = model(input_ids=ids).logits
    stream = None
    logits = None
    for stage in plan.stages:
        assert logits is None or not torch.allclose(logits, expected)
        stream, logits = _run_stage(model, plan, stage, ids, stream)
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)


def test_asked_for_by_hand() -> None:
    plan = cut("llama", pp_size=2, stage_layers=[1, 4])
    assert [stage.layers[0] for stage in plan.stages] == ["model.layers.0", "model.layers.1"]
    assert [len(stage.layers) for stage in plan.stages] == [1, 4]
    assert plan.imbalance > 1.2
    plan = cut("gpt2", pp_size=2, virtual_stages=2, pipeline_schedule="zbv", stage_layers="1,2,1,1")
    assert [(stage.rank, len(stage.layers)) for stage in plan.stages] == [
        (0, 1),
        (1, 2),
        (1, 1),
        (0, 1),
    ]
    with pytest.raises(
        PlanError,
        match=r"stage_layers=\[2, 2\] adds up to 4 layers, .* has 5: use numbers that sum",
    ):
        cut("llama", pp_size=2, stage_layers=[2, 2])
    with pytest.raises(PlanError, match=r"stage_layers=\[2\] adds up to 2 layers"):
        build_plan(on_meta(_config("llama")), ParallelConfig(stage_layers=[2]))


def test_too_many_stages() -> None:
    with pytest.raises(
        PlanError,
        match="pp_size=6 asks for more stages than the 5 layers of 'llama': use pp_size 1 to 5",
    ):
        cut("llama", pp_size=6)
    layout = {"pp_size": 3, "virtual_stages": 2, "pipeline_schedule": "interleaved1f1b"}
    with pytest.raises(
        PlanError,
        match="virtual_stages=2 asks for more stages than the 5 layers of 'gpt2': use pp_size 1 to 2 with",
    ):
        cut("gpt2", **layout)


def test_a_heavy_head_takes_layers_from_the_last_stage() -> None:
    wide = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        vocab_size=128256,
    )
    plan = assign_stages(on_meta(wide), ParallelConfig(pp_size=4))
    counts = [len(stage.layers) for stage in plan.stages]
    assert sum(counts) == 16
    assert counts[-1] < min(counts[:3])
    assert plan.imbalance < 1.1
    assert "of the mean" in str(plan)


# --- what cannot be cut -----------------------------------------------------------------------------------------------


def test_an_encoder_decoder_is_cut_as_one_list() -> None:
    config = tiny_clone(AutoConfig.for_model("mbart"), layers=3)
    model = on_meta(config, AutoModelForSeq2SeqLM)
    plan = assign_stages(model, ParallelConfig(pp_size=3, stage_layers=[2, 2, 2]))
    encoding, both, decoding = plan.stages
    assert both.layers == ("model.encoder.layers.2", "model.decoder.layers.0")
    assert "model.encoder.embed_tokens" in encoding.modules
    assert {
        "model.encoder.layer_norm",
        "model.decoder.embed_tokens",
        "model.decoder.layernorm_embedding",
    } <= {*both.modules}
    assert set(decoding.modules) == {"model.decoder.layer_norm", "lm_head"}
    # One table for both stacks and the head.
    assert [tie.stages for tie in plan.ties] == [(0, 1, 2)]
    assert [plan.arrives(stage) for stage in range(3)] == [
        (True, False),
        (True, False),
        (False, True),
    ]
    at_the_border = assign_stages(model, ParallelConfig(pp_size=2, stage_layers=[3, 3]))
    assert at_the_border.arrives(1) == (False, False)
    with pytest.raises(PlanError, match="sequence_parallel shards the hidden states of one stack"):
        assign_stages(model, ParallelConfig(pp_size=2, tp_size=2, sequence_parallel=True))


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
    with pytest.raises(
        PlanError, match=r"it has the shape \(4, 1, 2, 32\) for 1 sample of 2 tokens"
    ) as caught:
        assign_stages(on_meta(config), ParallelConfig(pp_size=2))
    # Keys and values that layers share travel in a mapping of the host's own.
    assert (
        "its layers are given what another layer computed, besides the stream, and only the"
        in str(caught.value)
    )


def test_what_all_layers_read_is_on_every_stage() -> None:
    model = on_meta(tiny_clone(AutoConfig.for_model("gemma4_text"), layers=4))
    plan = assign_stages(model, ParallelConfig(pp_size=2))
    read = [
        "model.embed_tokens",
        "model.embed_tokens_per_layer",
        "model.per_layer_model_projection",
        "model.per_layer_projection_norm",
    ]
    assert [list(stage.modules) for stage in plan.stages] == [
        read,
        [*read, "model.norm", "lm_head"],
    ]
    assert {tie.names[0] for tie in plan.ties} == {f"{name}.weight" for name in read}
    assert all(tie.stages == (0, 1) for tie in plan.ties)
    assert dict(plan.module_returns) == dict.fromkeys([*read, "model.norm", "lm_head"])
    _all_held_once(model, plan)
    held = sum(model.get_submodule(name).weight.numel() for name in read)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    # The head is tied to the embedding, which is there already.
    assert [stage.parameters - held for stage in plan.stages] == [
        sum(layers[:2]),
        sum(layers[2:]) + 32,
    ]


@pytest.mark.parametrize("read", [False, True])
def test_what_layers_write_to_a_mapping_matters_where_it_is_read(read: bool) -> None:
    """Gemma 4 of transformers 5.17 notes keys and values also where no layers share them."""
    model = on_meta(_config("llama"))
    notes = UserDict[str, torch.Tensor]()
    first = model.model.layers[0]
    second = model.model.layers[1]
    first.register_forward_hook(lambda *_: notes.update(first=_[2].clone()))
    second.register_forward_pre_hook(
        lambda _, args, named: (args, {**named, "notes": notes}), with_kwargs=True
    )
    if not read:
        assert assign_stages(model, ParallelConfig(pp_size=2)).stages
        return
    second.mlp.register_forward_pre_hook(lambda _, args: (args[0] + notes["first"],))
    with pytest.raises(PlanError, match="its layers are given what another layer computed"):
        assign_stages(model, ParallelConfig(pp_size=2))


def test_layers_run_twice_or_used_between_are_refused() -> None:
    model = on_meta(_config("llama"))
    model.model.layers[1].register_forward_hook(lambda *_: model.model.norm(_[2]))
    with pytest.raises(
        PlanError, match=r"model\.norm is used between layers, so every stage would need it"
    ):
        assign_stages(model, ParallelConfig(pp_size=2))
    model = on_meta(_config("llama"))
    model.model.layers.__class__ = _Twice
    with pytest.raises(PlanError, match="does not call its layers one after the other"):
        assign_stages(model, ParallelConfig(pp_size=2))


class _Twice(nn.ModuleList):
    """A list whose slices repeat."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return [*found, *found] if isinstance(index, slice) else found


def test_what_tokens_do_not_reach_is_refused() -> None:
    model = on_meta(_config("llama"))
    model.model.vision = nn.Linear(4, 4, device="meta")
    with pytest.raises(PlanError, match=r"model\.vision has no part in a pass over tokens"):
        assign_stages(model, ParallelConfig(pp_size=2))


def test_a_router_loss_is_refused() -> None:
    with pytest.raises(
        PlanError, match="output_router_logits=True makes a loss of the router logits of all stages"
    ):
        cut("mixtral", changes={"output_router_logits": True}, pp_size=2)


# --- in the plan ------------------------------------------------------------------------------------------------------


def _plan(family: str, *, changes: Any = None, **layout: Any) -> Plan:
    return build_plan(on_meta(_config(family, **(changes or {}))), ParallelConfig(**layout))


def test_one_stage_is_none() -> None:
    assert _plan("llama").stages is None


@pytest.mark.parametrize(
    ("config", "auto_class", "why"),
    [
        (
            lambda: tiny_clone(AutoConfig.for_model("prophetnet"), pad_token_id=0),
            AutoModelForCausalLM,
            r"train_step does not run its loss \(only that of causal .*: use pp_size=1",
        ),
    ],
)
def test_a_loss_that_does_not_go_through_stages_is_refused(
    config: Any, auto_class: Any, why: str
) -> None:
    model = on_meta(config(), auto_class)
    with pytest.raises(PlanError, match=rf"pp_size=2 does not fit \w+: {why}"):
        build_plan(model, ParallelConfig(pp_size=2))
    assert build_plan(model, ParallelConfig()).loss is None


@pytest.mark.parametrize(
    ("family", "auto_class"),
    [("bert", AutoModelForMaskedLM), ("llama", AutoModelForSequenceClassification)],
)
def test_a_loss_that_is_a_mean_goes_through_stages(family: str, auto_class: Any) -> None:
    plan = build_plan(on_meta(_config(family), auto_class), ParallelConfig(pp_size=2))
    assert plan.loss is None
    assert plan.stages is not None
    assert len(plan.stages.stages) == 2


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "opt"])
def test_every_parameter_has_its_stage(family: str) -> None:
    plan = _plan(family, pp_size=2, dp_shard_size=2, stage_layers=[2, 3])
    assert plan.stages is not None
    for parameter in plan.parameters:
        assert plan.stages.stages[parameter.stage].is_local(parameter.name)
        inside = parameter.name.startswith(f"{plan.stages.layer_list}.")
        assert not inside or parameter.stage == (
            int(parameter.name.split(".")[2 if family != "opt" else 3]) > 1
        )
    document = json.loads(to_json(plan))
    assert [len(stage["layers"]) for stage in document["stages"]["stages"]] == [2, 3]


def test_it_is_printed() -> None:
    plan = _plan("llama", changes={"tie_word_embeddings": True}, pp_size=2, tp_size=2)
    text = str(plan)
    rows = {
        line.split()[0]: line.split()
        for line in text.splitlines()
        if line.startswith(("model.", "lm_head"))
    }
    assert rows["model.embed_tokens.weight"][2] == "0"
    assert rows["model.layers.*.mlp.up_proj.weight"][2] == "0-1"
    assert rows["model.norm.weight"][2] == "1"
    assert "sum over stages 0, 1" in text
    assert "tied to model.embed_tokens.weight, a copy on stage 1" in text
    assert "largest stage / mean: 1." in text
    layer = 2 * (32 * 32 + 32 * 16 + 75 * 32) // 2 + 2 * 32
    assert f"largest rank: {3 * layer + 34 * 32:,} parameters" in text


def test_models_of_one_structure_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every stage and layout; one whose tensors are others', or whose modules do something else, once more."""
    runs: list[str] = []
    probe = passage.PassageProbe
    monkeypatch.setattr(
        passage, "PassageProbe", lambda model, *given: runs.append(model) or probe(model, *given)
    )
    with proved_anew():
        for tied, layout in (
            (False, {}),
            (False, {"virtual_stages": 2, "pipeline_schedule": "zbv"}),
            (True, {}),
        ):
            assign_stages(
                on_meta(_config("llama", tie_word_embeddings=tied)),
                ParallelConfig(pp_size=2, **layout),
            )
    assert len(runs) == 2
    model = on_meta(_config("llama"))
    model.model.norm.register_forward_pre_hook(lambda *_: None)
    assign_stages(model, ParallelConfig(pp_size=2))
    assert len(runs) == 3


def test_a_large_model_takes_seconds() -> None:
    config = LlamaConfig(
        num_hidden_layers=80,
        hidden_size=8192,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
    )
    model = on_meta(config)
    start = time.process_time()
    plan = assign_stages(
        model, ParallelConfig(pp_size=8, virtual_stages=2, pipeline_schedule="interleaved1f1b")
    )
    assert time.process_time() - start < 5
    assert {len(stage.layers) for stage in plan.stages} <= {4, 5, 6}
    assert plan.imbalance < 1.25


def test_an_encoder_decoder_that_classifies_texts_by_their_last_token_is_traced() -> None:
    config = tiny_clone(AutoConfig.for_model("bart"), layers=2)
    plan = assign_stages(
        on_meta(config, AutoModelForSequenceClassification), ParallelConfig(pp_size=2)
    )
    assert plan.stages[-1].modules[-1] == "classification_head"
