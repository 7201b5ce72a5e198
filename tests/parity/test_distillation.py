"""A student taught in a layout, by a teacher in the same layout or another: equal to the divergence in one process."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    Gemma2Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

import hfscale
from hfscale import ParallelConfig
from hfscale.testing import RankPool, assert_layout_equal
from hfscale.testing.parity import Batch, Case

from ..distributed.ops.test_divergence import divergence
from ..refusals import refusal_of
from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
Layout = dict[str, Any]
WIDER = tiny("qwen2", hidden_size=48, num_hidden_layers=3)


@dataclass
class Distilled(Case):
    """A student of a random teacher, or of itself without its adapters."""

    # None: the student itself.
    teacher: PreTrainedConfig | None = field(default_factory=lambda: WIDER)
    teacher_layout: Layout = field(default_factory=dict)
    beta: float = 0.5
    temperature: float = 1.0
    lengths: Any = (13, 8)

    def reference_step(self, model: Any, step: list[list[Batch]]) -> list[Tensor]:
        microbatches = [microbatch for rank in step for microbatch in rank]
        count = sum(self.count(microbatch["labels"]) for microbatch in microbatches)
        loss = torch.zeros((), dtype=torch.float64)
        for microbatch in microbatches:
            valid = nn.functional.pad(microbatch["labels"][:, 1:], (0, 1), value=-100) != -100
            given = {name: value for name, value in microbatch.items() if name != "labels"}
            with torch.no_grad():
                if self.teacher is None:
                    with model.disable_adapter():
                        taught = model(**given).logits
                else:
                    taught = stock_teacher(self.teacher)(**given).logits
            part = self.divergence(model(**given).logits, taught)[valid].sum() / count
            part.backward()
            loss += part.detach()
        return [loss] * len(step)

    def divergence(self, logits: Tensor, taught: Tensor) -> Tensor:
        return divergence(logits, taught, self.beta, self.temperature)

    def layout_step(self, model: Any, microbatches: list[Batch]) -> Tensor:
        if not hasattr(model, "taught"):
            teacher = model
            parallel = ParallelConfig(**self.teacher_layout)
            if self.teacher is not None:
                teacher = hfscale.from_config(
                    self.teacher, parallel=parallel, dtype=torch.float64, seed=5
                )
            made = hfscale.Teacher(teacher, model, beta=self.beta, temperature=self.temperature)
            object.__setattr__(model, "taught", made)
        return hfscale.train_step(model, microbatches, teacher=model.taught)


def stock_teacher(config: PreTrainedConfig) -> Any:
    return hfscale.from_config(config, dtype=torch.float64, seed=5).eval()


def case(**changes: Any) -> Distilled:
    config = tiny("llama", num_hidden_layers=4, tie_word_embeddings=False)
    return Distilled(config, **{"rows": 4, "accumulation": 4, **changes})


TP2 = {"tp_size": 2}
DP2 = {"dp_shard_size": 2}
CP2 = {"cp_size": 2}
PP2 = {"pp_size": 2}


def test_in_one_process() -> None:
    assert_layout_equal(case(beta=0.0, temperature=2.0), ParallelConfig(), None)


@pytest.mark.daily("{'pp_size': 2}-{'tp_size': 2}")
@pytest.mark.parametrize("layout", [TP2, DP2, CP2, PP2], ids=str)
@pytest.mark.parametrize("teacher", [TP2, DP2, CP2, PP2], ids=str)
def test_two_ranks(pools: Pools, layout: Layout, teacher: Layout) -> None:
    beta = {"tp_size": 0.5, "dp_shard_size": 0.0, "cp_size": 1.0, "pp_size": 0.1}[
        next(iter(teacher))
    ]
    assert_layout_equal(
        case(teacher_layout=teacher, beta=beta, temperature=1.5), ParallelConfig(**layout), pools(2)
    )


LORA = LoraConfig(
    r=3, lora_alpha=5, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
)
CAPPED = Gemma2Config(
    **{
        "hidden_size": 32,
        "intermediate_size": 50,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    },
    **{
        "num_key_value_heads": 2,
        "vocab_size": 67,
        "final_logit_softcapping": 1.5,
        "query_pre_attn_scalar": 8,
    },
    **{"bos_token_id": 1, "eos_token_id": 2, "sliding_window": 8},
)
"""A teacher with a tied head whose logits are capped: what is done to them has to reach the student's last stage."""


@pytest.mark.daily("layout3-changes3")
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (TP2, {"peft": LORA, "teacher": None}),
        (PP2, {"peft": LORA, "teacher": None, "beta": 1.0}),
        (DP2, {"peft": LORA, "teacher": None}),
        (PP2, {"teacher": CAPPED, "teacher_layout": TP2}),
        (
            {"tp_size": 2, "sequence_parallel": True},
            {"teacher": CAPPED, "teacher_layout": PP2, "beta": 1.0},
        ),
        ({"pp_size": 2, "pipeline_schedule": "zbv", "virtual_stages": 2}, {"teacher_layout": PP2}),
        (TP2, {"frozen": ("lm_head", "layers.1"), "teacher_layout": DP2}),
        (
            PP2,
            {"frozen": ("lm_head", "layers.3", "model.norm"), "teacher_layout": DP2, "beta": 0.0},
        ),
        (TP2, {"checkpointing": True, "teacher_layout": TP2}),
    ],
)
def test_adapters_caps_schedules_and_frozen_weights(
    pools: Pools, layout: Layout, changes: dict[str, Any]
) -> None:
    assert_layout_equal(case(**changes), ParallelConfig(**layout), pools(2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "teacher"),
    [
        ({"tp_size": 2, "dp_shard_size": 2}, {"dp_shard_size": 2, "pp_size": 2}),
        ({"dp_replicate_size": 2, "dp_shard_size": 2}, {"tp_size": 2, "pp_size": 2}),
        ({"pp_size": 2, "tp_size": 2}, {"dp_shard_size": 4}),
        ({"cp_size": 2, "tp_size": 2}, {"dp_shard_size": 2, "cp_size": 2}),
        ({"pp_size": 2, "dp_shard_size": 2}, {"pp_size": 2, "dp_shard_size": 2}),
    ],
    ids=str,
)
def test_products(pools: Pools, layout: Layout, teacher: Layout) -> None:
    assert_layout_equal(
        case(teacher_layout=teacher, temperature=0.7), ParallelConfig(**layout), pools(4)
    )


@pytest.mark.slow
def test_data_ranks_that_the_teacher_groups_unevenly(pools: Pools) -> None:
    teacher = {"tp_size": 2, "dp_shard_size": 3}
    layout = ParallelConfig(dp_shard_size=2, cp_size=3)
    assert_layout_equal(case(teacher_layout=teacher), layout, pools(6))


def evaluated(layout: Layout, teacher: Layout, empty: bool) -> list[float]:
    """Losses of an evaluation, with and without outputs, and of a step in which a rank may have no row."""
    student = hfscale.from_config(
        tiny("llama"), parallel=ParallelConfig(**layout), dtype=torch.float64, seed=0
    )
    model = hfscale.from_config(
        WIDER, parallel=ParallelConfig(**teacher), dtype=torch.float64, seed=5
    ).train()
    taught = hfscale.Teacher(model, student, beta=0.3)
    ids = torch.randint(3, 67, (4, 9), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.where(ids % 3 > 0, -100)}
    own = batch
    if ParallelConfig(**layout).batch_world == 2:
        own = {
            name: value[:0] if empty and hfscale.batch_rank(student) else value
            for name, value in batch.items()
        }
    first = hfscale.eval_step(student.eval(), own, teacher=taught)
    second, outputs = hfscale.eval_step(student, own, teacher=taught, return_outputs=True)
    third = hfscale.train_step(student.train(), own, teacher=taught)
    assert model.training
    assert outputs.logits.shape[-1] == 67
    losses = [first, second, third]
    if not {"pp_size", "cp_size"} & layout.keys() and not empty:
        loss, _, count = taught.loss(own)
        losses += [loss.detach(), taught.loss(own, divisor=1)[0].detach() / count]
        assert loss.requires_grad
    return [float(loss) for loss in losses]


@pytest.mark.daily(
    "{'cp_size': 2}-{'cp_size': 2}-False", "{'dp_shard_size': 2}-{'pp_size': 2}-True"
)
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize(
    ("layout", "teacher"), [(TP2, DP2), (DP2, TP2), (DP2, PP2), (PP2, TP2), (CP2, CP2)], ids=str
)
def test_evaluation_and_empty_ranks(
    pools: Pools, layout: Layout, teacher: Layout, empty: bool
) -> None:
    expected = evaluated({}, {}, False)[0]
    for found in pools(2).run(evaluated, layout, teacher, empty):
        assert found == pytest.approx([expected] * len(found), rel=1e-12)


def test_what_cannot_teach_is_refused(tmp_path: Path) -> None:
    student = hfscale.from_config(tiny("llama"), seed=0)
    for given, words in (
        (
            hfscale.from_config(tiny("llama", vocab_size=70), seed=0),
            "70 tokens and the student one of 67",
        ),
        (student, "only if nothing but adapters trains"),
        (
            hfscale.from_config(
                tiny("llama"), auto_class=AutoModelForSequenceClassification, seed=0
            ),
            "no loss over a",
        ),
    ):
        assert words in refusal_of(lambda given=given: hfscale.Teacher(given, student))
    other = hfscale.from_config(tiny("llama"), seed=0)
    taught = hfscale.Teacher(other, student)
    ids = torch.ones(2, 4, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    assert "another student" in refusal_of(lambda: hfscale.train_step(other, batch, teacher=taught))
    smoothed = refusal_of(
        lambda: hfscale.train_step(student, batch, teacher=taught, label_smoothing=0.1)
    )
    assert (
        smoothed
        == "teacher replaces the model's loss: leave loss_fn, score_loss, label_smoothing and "
        "other terms of a loss out"
    )
    assert "beta" in refusal_of(lambda: hfscale.Teacher(other, student, beta=1.5))
    hfscale.get_peft_model(other, LoraConfig(target_modules=["lm_head"]))
    assert "adapters of its head" in refusal_of(lambda: hfscale.Teacher(other, student))


def test_other_tokenizers_are_refused(tmp_path: Path) -> None:
    models = []
    for place, words in (("one", ["a", "b"]), ("two", ["b", "a"])):
        hfscale.save_pretrained(hfscale.from_config(tiny("llama"), seed=0), tmp_path / place)
        tokenizer = Tokenizer(
            WordLevel({word: number for number, word in enumerate(words)}, unk_token="a")
        )
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / place)
        models.append(hfscale.from_pretrained(tmp_path / place))
    assert "have different vocabularies" in refusal_of(lambda: hfscale.Teacher(*models))
    hfscale.Teacher(models[0], hfscale.from_pretrained(tmp_path / "one"))
