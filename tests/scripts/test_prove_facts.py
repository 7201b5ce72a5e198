"""The table of facts: proved again for a sample of its families, and enough for plans of them."""

import copy
import json
from contextlib import suppress
from typing import Any

import pytest
import transformers
from prove_facts import LAYOUTS, as_text, cases, differences, prove, read, written
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import hfscale
from hfscale.models import facts
from hfscale.models.facts import TABLE, Facts

pytestmark = [
    pytest.mark.skipif(
        transformers.__version__ not in json.loads(TABLE.read_text())["transformers"],
        reason="the table is of another transformers",
    ),
    pytest.mark.filterwarnings("ignore"),  # of stock code, about its own configs
]


@pytest.fixture(scope="module")
def sample() -> tuple[Facts, dict[str, str]]:
    """What is proved now."""
    return prove([*cases("gpt2")][:2] + [*cases("starcoder2")][:1], doubted=True)


def test_a_sample_of_the_table_is_proved_again(sample: tuple[Facts, dict[str, str]]) -> None:
    facts, _ = sample
    assert {"GPT2LMHeadModel", "Starcoder2ForCausalLM"} <= facts.proved.keys()
    assert differences(facts) == []


def test_what_the_table_does_not_say_is_found(sample: tuple[Facts, dict[str, str]]) -> None:
    facts = copy.deepcopy(sample[0])
    changed = next(
        answers
        for answers in facts.proved["GPT2LMHeadModel"].values()
        if "passage transformer.h" in answers
    )
    changed["passage transformer.h"]["returns"] = 7
    changed["another question"] = True
    wrong, missing = differences(facts)
    assert "passage transformer.h: proved" in wrong
    assert missing.endswith("another question: not in the table")


def test_it_is_read_as_it_is_written(sample: tuple[Facts, dict[str, str]]) -> None:
    facts, configs = sample
    table = written(facts.proved, configs)
    assert json.loads(as_text(["2", "1"], table)) == {"transformers": ["1", "2"], "classes": table}
    assert read(table)[0] == facts.proved
    assert any("default" in group["configs"].values() for group in table["GPT2LMHeadModel"])


@pytest.mark.daily(
    "gemma-tp_size-sequence_parallel",
    "llama-pp_size",
    "qwen3_moe-tp_size",
    "llama-cp_size",
    "bamba-tp_size-sequence_parallel",
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda sizes: "-".join(sizes))
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma", "t5", "bamba"])
def test_plans_of_its_families_run_nothing(
    family: str, layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        facts, "prove", lambda question, *_, **__: pytest.fail(f"{question} is not in the table")
    )
    auto_class = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    config = AutoConfig.for_model(
        family, **({"decoder_start_token_id": 0} if family == "t5" else {})
    )
    with suppress(hfscale.PlanError):
        hfscale.plan(config, hfscale.ParallelConfig(**layout), auto_class=auto_class)
