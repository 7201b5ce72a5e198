"""Classes whose loss is their own: train_step weights microbatches by what the loss is a mean over, stages included."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    CLIPConfig,
    CLIPModel,
)

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale.models.clone import tiny_clone
from hfscale.plan.feature_plans import OwnLossPlan
from hfscale.testing import RankPool, assert_layout_equal, plain
from hfscale.testing.verify import changes_for

Pools = Callable[[int], RankPool]


def to_text(
    case: plain.PlainCase, generator: torch.Generator, length: int
) -> dict[str, torch.Tensor]:
    """Texts to be made of others; without any label in short ones, of which decoders' inputs are made all the same."""
    batch = plain.sequence_to_sequence(case, generator, length)
    return batch if length > 8 else {**batch, "labels": torch.full_like(batch["labels"], -100)}


CLASSES: dict[str, tuple[Any, plain.Maker, str]] = {
    "texts": (AutoModelForSequenceClassification, plain.sequence_classification, "labels"),
    "tokens": (AutoModelForTokenClassification, plain.token_classification, "labels"),
    "masked": (AutoModelForMaskedLM, plain.causal_lm, "labels"),
    "decoder": (
        AutoModelForCausalLM,
        plain.causal_lm,
        "labels",
    ),  # which labels its tokens without shifting them
    "to text": (AutoModelForSeq2SeqLM, to_text, "labels"),
}
PP2 = {"pp_size": 2, "num_microbatches": 2}


def case_of(family: str, kind: str) -> plain.OwnLossCase:
    auto_class, maker, over = CLASSES[kind]
    config = AutoConfig.for_model(family)
    config = tiny_clone(config, layers=4, **changes_for(config, auto_class))
    return plain.OwnLossCase(config, auto_class=auto_class, make_batch=maker, over=over)


@pytest.mark.daily("bart-decoder-2", "gpt2-texts-2-2-zbv")
@pytest.mark.parametrize(
    ("family", "kind", "layout"),
    [
        ("llama", "texts", {"tp_size": 2}),
        ("bert", "texts", {"dp_shard_size": 2}),
        ("llama", "texts", PP2),
        ("gpt2", "texts", {**PP2, "pipeline_schedule": "zbv"}),
        ("bert", "texts", PP2),
        ("qwen2", "tokens", PP2),
        ("bert", "tokens", {"dp_replicate_size": 2}),
        ("roberta", "masked", PP2),
        ("bart", "to text", {"dp_shard_size": 2}),
        ("bart", "decoder", {"tp_size": 2}),
        ("whisper", "decoder", {"dp_shard_size": 2}),
        ("pegasus", "decoder", PP2),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_classes(pools: Pools, family: str, kind: str, layout: dict[str, Any]) -> None:
    assert_layout_equal(case_of(family, kind), ParallelConfig(**layout), pools(2))


def test_stages_with_adapters_and_the_head_that_peft_trains_whole(pools: Pools) -> None:
    peft = LoraConfig(r=2, target_modules="all-linear", task_type="SEQ_CLS")
    assert_layout_equal(
        replace(case_of("llama", "texts"), peft=peft), ParallelConfig(**PP2), pools(2)
    )


@pytest.mark.slow
def test_stages_and_data_ranks(pools: Pools) -> None:
    assert_layout_equal(case_of("llama", "texts"), ParallelConfig(**PP2, dp_shard_size=2), pools(4))


@pytest.mark.parametrize("kind", CLASSES)
def test_the_plan_says_over_what(kind: str) -> None:
    family = {"to text": "t5", "decoder": "trocr"}.get(kind, "bert")
    case = case_of(family, kind)
    plan = hfscale.plan(case.config, auto_class=case.auto_class)
    assert plan.feature(OwnLossPlan) == OwnLossPlan(case.over)
    assert not plan.no_step
    assert f"a mean over {case.over}; microbatches count by their {case.over}" in str(plan)


def test_a_number_to_predict(pools: Pools) -> None:
    """One class is a regression: a mean over rows as well."""
    config = tiny_clone(AutoConfig.for_model("bert"), id2label={0: "score"}, label2id={"score": 0})
    plan = hfscale.plan(config, auto_class=AutoModelForSequenceClassification)
    assert plan.feature(OwnLossPlan) == OwnLossPlan("rows")


def test_a_contrast_between_rows_is_no_mean() -> None:
    plan = hfscale.plan(tiny_clone(CLIPConfig()), auto_class=CLIPModel)
    assert plan.feature(OwnLossPlan) is None
    assert plan.no_step


def _steps(config: Any) -> tuple[float, list[float], str]:
    model = hfscale.from_config(
        config, auto_class=AutoModelForTokenClassification, dtype=torch.float64, seed=1
    ).eval()
    ids = torch.arange(12).view(2, 6)
    ignored = torch.full((2, 6), -100)
    labels = ids % 2
    empty = float(hfscale.train_step(model, {"input_ids": ids, "labels": ignored}))
    norm = float(hfscale.clip_grad_norm_(model, 1e9))
    batch = {"input_ids": ids, "labels": labels}
    losses = [float(hfscale.eval_step(model, [batch, {"input_ids": ids, "labels": ignored}]))]
    losses.append(float(model(**batch).loss.detach()))
    with pytest.raises(ConfigError, match="needs a loss over a vocabulary") as refused:
        hfscale.train_step(model, batch, label_smoothing=0.1)
    return empty + norm, losses, str(refused.value)


def test_a_microbatch_without_labels_counts_nothing() -> None:
    """Stock code's mean of nothing is nan."""
    nothing, (weighted, alone), _ = _steps(case_of("bert", "tokens").config)
    assert nothing == 0
    assert weighted == pytest.approx(alone, rel=1e-12)
