"""``auto_class`` is a class of transformers, or its name."""

from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification, LlamaForSequenceClassification

import hfscale
from hfscale import ConfigError

from ..tiny_models import tiny


@pytest.mark.parametrize(
    "given", [AutoModelForSequenceClassification, "AutoModelForSequenceClassification"]
)
def test_a_class_or_its_name(given: Any) -> None:
    assert isinstance(
        hfscale.from_config(tiny("llama"), auto_class=given), LlamaForSequenceClassification
    )
    assert "score.weight" in hfscale.plan(tiny("llama"), auto_class=given).by_name


@pytest.mark.parametrize("given", ["AutoModelForSequenceClasification", "LlamaConfig", None, int])
def test_a_misspelt_name_is_refused_with_close_ones(given: Any) -> None:
    with pytest.raises(
        ConfigError, match="auto_class must be one of transformers' Auto classes"
    ) as caught:
        hfscale.from_config(tiny("llama"), auto_class=given)
    assert (
        given != "AutoModelForSequenceClasification"
        or "AutoModelForSequenceClassification" in str(caught.value)
    )


def test_a_given_config_is_left_as_it_was() -> None:
    config = tiny("llama")
    before = (config.to_dict(), config._attn_implementation)
    for run in (hfscale.plan, hfscale.from_config):
        run(config, attn_implementation="eager")
        assert (config.to_dict(), config._attn_implementation) == before
