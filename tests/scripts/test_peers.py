"""The lane of peers' tests: what it excuses, which tests it asks, how it finds and makes what they name."""

import json
import re
from pathlib import Path

import pytest
from peers.judge import Outcome, Refusal, judge, read_refusals, to_ask
from peers.models_made import class_of
from peers.rows import TRAIN, make_rows
from peers.run import HERE
from peers.suites import SUITES

REFUSED = "hfscale.errors.ConfigError: peft_type P_TUNING is not supported over ranks"
REFUSAL = Refusal("trl", ("tp2",), "prompt", "P_TUNING is not supported", "prompts are no shards")


@pytest.mark.parametrize(
    ("changes", "layout", "excused"),
    [
        ({}, "tp2", True),
        ({}, "one", False),
        ({"id": "test_other"}, "tp2", False),
        ({"words": "hfscale.errors.ConfigError: another refusal"}, "tp2", False),
        # A crash is never excused, whatever its message says.
        ({"words": "RuntimeError: P_TUNING is not supported"}, "tp2", False),
        ({"words": f"AssertionError: {REFUSED}"}, "tp2", False),
    ],
)
def test_a_refusal_excuses_its_own_words_alone(
    changes: dict[str, str], layout: str, excused: bool
) -> None:
    outcome = Outcome(**{"id": "test_prompt", "outcome": "failed", "words": REFUSED, **changes})
    judgement = judge("trl", layout, [outcome], [REFUSAL])
    assert bool(judgement.refused) == excused
    assert bool(judgement.faults) != excused


def test_what_a_test_compares_itself_is_excused_by_its_own_type() -> None:
    said = "The size of tensor a (456) must match the size of tensor b (911)"
    refusal = Refusal("peft", ("tp2",), "save", "must match", "slices", error="RuntimeError")
    for error, excused in (("RuntimeError", True), ("AssertionError", False)):
        outcome = Outcome("test_save", "failed", words=f"{error}: {said}")
        assert refusal.excuses("peft", "tp2", outcome) == excused


def test_a_test_that_is_skipped_with_ours_alone_is_at_fault() -> None:
    assert judge("trl", "one", [Outcome("test_it", "skipped")], []).faults


def test_tests_that_pass_with_stock_classes_and_reach_one_are_asked() -> None:
    stock = [
        Outcome("reaches", "passed", ("SFTTrainer",)),
        Outcome("reaches none", "passed"),
        Outcome("fails with stock", "failed", ("SFTTrainer",)),
    ]
    assert to_ask({each.id: each for each in stock}) == ["reaches"]


def test_committed_refusals_are_of_known_suites_and_layouts() -> None:
    for refusal in read_refusals(HERE / "refused.json"):
        assert refusal.reason
        assert re.search(refusal.tests, "test_") is None, (
            refusal
        )  # one that names no test excuses none
        assert set(refusal.layouts) <= set(SUITES[refusal.peer].layouts), refusal
        assert len(refusal.words) > 15, refusal  # words that would excuse anything excuse nothing


@pytest.mark.parametrize(
    ("test", "method", "excused"),
    [
        ("test_it[AdaLoraConfig-config_kwargs0-model]", "ADALORA", True),
        ("test_it[dtype0-VeraConfig-config_kwargs0-model]", "VERA", True),
        # What hfscale shards is excused neither by its test nor by its words.
        ("test_it[dtype0-LoraConfig-config_kwargs0-model]", "ADALORA", False),
        ("test_it[AdaLoraConfig-config_kwargs0-model]", "LORA", False),
    ],
)
def test_adapters_that_hfscale_shards_are_never_excused_as_others_are(
    test: str, method: str, excused: bool
) -> None:
    words = (
        f"hfscale.errors.ConfigError: peft_type {method} is not supported over ranks: hfscale does not know how to "
        "shard its parameters"
    )
    outcome = Outcome(test, "failed", words=words)
    judgement = judge("peft", "tp2", [outcome], read_refusals(HERE / "refused.json"))
    assert bool(judgement.refused) == excused


def test_counts_are_of_known_suites() -> None:
    path = Path(HERE / "counts.json")
    for name, row in json.loads(path.read_text()).items():
        peer, layout = name.split(", ")
        assert layout in SUITES[peer].layouts
        assert row["asked"] == row["passed"] + row["at fault"] + sum(row["refused"].values())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (
            "trl-internal-testing/tiny-Qwen2ForSequenceClassification-2.5",
            "Qwen2ForSequenceClassification",
        ),
        ("peft-internal-testing/tiny-random-gpt2", "GPT2LMHeadModel"),
        ("peft-internal-testing/opt-125m", "OPTForCausalLM"),
        ("peft-internal-testing/tiny-OPTForCausalLM-lora", None),
        ("some/folder", None),
    ],
)
def test_an_id_says_its_class(name: str, kind: str | None) -> None:
    found = class_of(name)
    assert (found and found[0].__name__) == kind


@pytest.mark.parametrize("form", ["standard", "conversational"])
@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        ("prompt_only", {"prompt"}),
        ("preference", {"prompt", "chosen", "rejected"}),
        ("unpaired_preference", {"prompt", "completion", "label"}),
    ],
)
def test_rows_have_the_columns_that_their_configuration_says(
    form: str, kind: str, columns: set[str]
) -> None:
    made = make_rows("trl-internal-testing/zen", f"{form}_{kind}")
    assert set(made["train"].column_names) == columns
    assert len(made["train"]) == TRAIN
    assert isinstance(made["test"][0]["prompt"], str if form == "standard" else list)
