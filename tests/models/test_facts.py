"""What is known of model classes beforehand: asked of a table, and proved where the table is silent."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hfscale
from hfscale import ParallelConfig
from hfscale.extras.proofs.infer.search_blueprint import infer
from hfscale.models import class_source, facts
from hfscale.models.blueprint import as_data, from_data
from hfscale.models.class_source import _without_comments, source_hash
from hfscale.models.clone import tiny_clone
from hfscale.models.facts import _config_classes, digest
from hfscale.models.kept_facts import KeptFacts

from ..families import config_of
from ..proved_anew import proved_anew
from ..tiny_models import needs, tiny


def _model(family: str = "llama", **changes: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **changes))


def _digest(model: Any) -> str:
    return digest(type(model), model.config, model)


@pytest.fixture
def proved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The questions that are proved from here on."""
    asked: list[str] = []
    real = facts.prove
    monkeypatch.setattr(
        facts, "prove", lambda question, *a, **k: asked.append(question) or real(question, *a, **k)
    )
    return asked


def test_sizes_and_scales_are_of_one_digest() -> None:
    small = _model(
        hidden_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=99,
    )
    scaled = _model(
        rms_norm_eps=1e-5, bos_token_id=7, eos_token_id=8, use_cache=False, initializer_range=0.1
    )
    assert _digest(_model()) == _digest(small) == _digest(scaled) != ""


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"pad_token_id": 5},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_an_answer_may_depend_on_is_in_the_digest(changes: dict[str, Any]) -> None:
    assert _digest(_model(**changes)) not in ("", _digest(_model()))


def test_kinds_of_layers_are_in_the_digest() -> None:
    both = _model("gemma3_text", num_hidden_layers=6)
    alike = _model("gemma3_text", num_hidden_layers=12)
    local = _model("gemma3_text", num_hidden_layers=6, layer_types=["sliding_attention"] * 6)
    assert _digest(both) == _digest(alike) != _digest(local)


def test_changed_code_has_no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked = _model()
    other = _model()
    hooked.model.norm.register_forward_hook(lambda *_: None)
    assert _digest(hooked) == ""
    other.lm_head.__class__ = type("Head", (torch.nn.Linear,), {})
    assert _digest(other) == ""
    monkeypatch.setattr(type(other.model.layers[0].mlp), "forward", lambda self, x: x)
    assert _digest(_model()) == ""


def test_what_is_unknown_is_proved_once_and_said(
    proved: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny("llama", attention_bias=True)
    with proved_anew(), caplog.at_level("INFO", facts.__name__):
        first = str(hfscale.plan(config, ParallelConfig(pp_size=2)))
        assert proved == ["passage"]
        assert str(hfscale.plan(config, ParallelConfig(pp_size=2))) == first
    assert proved == ["passage"]
    assert [record.message for record in caplog.records] == [
        "LlamaForCausalLM with this config is not among hfscale's facts: a tiny clone is run; "
        "its answers are kept in this process"
    ]


def test_a_digest_is_of_what_the_modeling_files_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '"""Words."""\n\nclass A:\n    """Words."""\n\n    def f(self):\n        # words\n        return """1"""\n'
    assert _without_comments(text) == 'class A:\n    def f(self):\n        return """1"""'
    before = _digest(_model())
    monkeypatch.setattr(
        class_source, "_folder_hash", lambda folder: f"{folder.name} as it was changed"
    )
    assert _digest(_model()) not in ("", before)


def test_a_composite_has_the_source_of_its_inner_models() -> None:
    config = AutoConfig.for_model("llava")
    text = type(config.text_config)
    vision = type(config.vision_config)
    assert {*_config_classes(config)} == {type(config), text, vision}
    assert (
        len({source_hash([type(config)]), source_hash([type(config), text]), source_hash([text])})
        == 3
    )


def test_what_is_proved_is_kept_for_later_processes(
    tmp_path: Path, proved: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned() -> tuple[str, list[str]]:
        """A plan by what a new process knows, and what it had to prove."""
        proved.clear()
        with proved_anew() as known:
            known._kept = KeptFacts(tmp_path)
            return str(hfscale.plan(tiny("llama"), ParallelConfig(pp_size=2))), [*proved]

    monkeypatch.setenv("RANK", "1")
    first = planned()
    assert first[1] == ["passage"]
    assert [*tmp_path.rglob("*.json")] == [], "the first rank writes alone"
    monkeypatch.setenv("RANK", "0")
    assert planned() == first
    assert planned() == (first[0], [])
    (kept,) = tmp_path.rglob("*.json")
    kept.write_text(kept.read_text()[:-9])
    assert planned() == first, "a damaged file is none"
    assert planned() == (first[0], [])
    tmp_path.joinpath("file").touch()
    KeptFacts(tmp_path / "file").add("A", "1", "question", 2)
    assert KeptFacts(tmp_path / "file").read("A", "1") == {}, "what cannot be written keeps nothing"


def test_the_table_answers_for_its_digests_alone(proved: list[str]) -> None:
    layout = ParallelConfig(cp_size=2)
    with proved_anew() as known:
        planned = str(hfscale.plan(tiny("llama"), layout))
    assert proved == ["mixing"]
    with proved_anew(known.proved):
        assert str(hfscale.plan(tiny("llama"), layout)) == planned
        assert proved == ["mixing"]
        hfscale.plan(tiny("llama", attention_bias=True), layout)
        assert proved == ["mixing", "mixing"]


@needs("deepseek_v4")
def test_what_names_sizes_is_not_for_other_models() -> None:
    """Its layers get a stream of another shape, which a refusal names."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of("deepseek_v4"))
    with proved_anew() as known:
        answer = known.ask("entry", model, firsts={"model.layers.0": "model"}, embedding=None)
        assert answer["odd"] == {"model": [1, 2, 4, 32]}
    assert known.proved == {}


def test_models_of_one_digest_that_differ_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        facts, "prove", lambda question, model: (model.config.num_hidden_layers, True)
    )
    with proved_anew(doubted=True) as known:
        assert [
            known.ask("anything", _model(num_hidden_layers=layers)) for layers in (2, 2, 3)
        ] == [2, 2, 3]
    (said,) = known.contradictions
    assert said.endswith("anything: proved both 2 and 3")


@pytest.mark.daily("gpt2")
@pytest.mark.parametrize("family", ["gpt2", "phi3", "bloom"])
def test_an_inference_is_read_as_it_was_written(family: str) -> None:
    config = tiny_clone(AutoConfig.for_model(family, pad_token_id=0))
    with torch.device("meta"):
        found = infer(AutoModelForCausalLM.from_config(config))
    assert from_data(json.loads(json.dumps(as_data(found)))) == found
