"""Packed rows: documents in one row compute what each computes by itself, or the model is refused before a step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    TrainingArguments,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale.errors import PlanError
from hfscale.testing import Case, RankPool, assert_layout_equal
from hfscale.train.packed_rows.guard import check_packed_rows

from ...families import config_of
from ...sweeps import pairs
from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "shard2": {"dp_shard_size": 2},
    "cp2": {"cp_size": 2},
}
DAILY = [
    ("gpt_oss", "tp2"),
    ("opt", "pp2"),
    ("bloom", "shard2"),
    ("bert", "one"),
    ("roberta", "tp2"),
    ("gpt_oss", "cp2"),
    ("bamba", "cp2"),
    ("lfm2", "pp2"),
    ("falcon_h1", "tp2"),
    ("jamba", "one"),
]

# Stock code computes part of these in float32, whose rounding depends on what else is in the batch.
TOLERANCES = {"modernbert-decoder": 1e-6}
# Routers that stay in float32, which the comparison in float64 does not run over shards; a loss of texts with pictures.
NOT_COMPARED = {
    ("ernie4_5_moe", "shard2"),
    ("hunyuan_v1_moe", "shard2"),
    ("ernie4_5_moe", "cp2"),
    ("hunyuan_v1_moe", "cp2"),
}
NOT_COMPARED |= {("git", layout) for layout in LAYOUTS}


@dataclass
class PackedCase(Case):
    """Rows of several documents for the layout; each document by itself for the reference.

    Attributes:
        masked: whether an attention mask comes along, whose last tokens are padding.
        start: the position of a document's first token.
    """

    learning_rate: float = 0.1
    masked: bool = False
    start: int = 0
    documents: tuple[tuple[int, ...], ...] = ((1, 6, 1, 4), (5, 7))

    def batches(self, batch_world: int) -> list[list[list[dict[str, Tensor]]]]:
        generator = torch.Generator().manual_seed(5)
        step = [
            [self._rows(generator) for _ in range(self.accumulation)] for _ in range(batch_world)
        ]
        return [step] * self.steps

    def _rows(self, generator: torch.Generator) -> dict[str, Tensor]:
        ids = torch.randint(
            3, 60, (len(self.documents), sum(self.documents[0])), generator=generator
        )
        rows = [torch.cat([torch.arange(n) for n in lengths]) for lengths in self.documents]
        positions = torch.stack(rows) + self.start
        ignored = (torch.rand(ids.shape, generator=generator) < 0.3) | (positions == self.start)
        batch = {
            "input_ids": ids,
            "labels": ids.masked_fill(ignored, -100),
            "position_ids": positions,
        }
        if self.masked:
            batch["attention_mask"] = mask = torch.ones_like(ids)
            mask[1, -2:], batch["labels"][1, -2:] = 0, -100
        return batch

    def reference_step(self, model: Any, step: list[list[dict[str, Tensor]]]) -> list[Tensor]:
        parts = []
        for batch in (each for rank in step for each in rank):
            for row, lengths in enumerate(self.documents):
                of_documents = (batch[name][row].split(lengths) for name in ("input_ids", "labels"))
                parts += [
                    (ids[None], labels[None]) for ids, labels in zip(*of_documents, strict=True)
                ]
        counts = [self.count(labels) for _, labels in parts]
        total = torch.zeros((), dtype=torch.float64)
        for (ids, labels), count in zip(parts, counts, strict=True):
            if count:
                loss = (
                    model(input_ids=ids, labels=labels, use_cache=False).loss * count / sum(counts)
                )
                loss.backward()
                total += loss.detach()
        return [total] * len(step)


@pytest.mark.daily("gpt_oss-tp2", "opt-pp2", "bert-one")
@pytest.mark.parametrize(
    ("family", "layout"), pairs(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), LAYOUTS, daily=DAILY)
)
def test_documents_in_one_row_compute_what_each_does_by_itself(
    pools: Pools, family: str, layout: str
) -> None:
    try:
        config = config_of(family)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever stock code says of a clone that it cannot build
        pytest.skip(f"stock code builds no tiny {family}: {error}")
    start = config.pad_token_id + 1 if type(config.pad_token_id) is int and "bert" in family else 0
    parallel = ParallelConfig(**LAYOUTS[layout])
    try:
        check_packed_rows(model, start=start)
        hfscale.plan(config, parallel)
    except (ConfigError, PlanError):
        assert (family, layout) not in DAILY
        return
    pool = pools(2) if parallel.total_size > 1 else None
    assert_layout_equal(
        PackedCase(config, start=start), parallel, pool, TOLERANCES.get(family, 1e-10)
    )


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_an_attention_mask_beside_positions_keeps_documents_apart_too(family: str) -> None:
    config = tiny(family) if family == "llama" else config_of(family)
    assert_layout_equal(PackedCase(config, masked=True), ParallelConfig(), None)


def _packed(**changes: Any) -> dict[str, Any]:
    ids = torch.arange(12).view(1, 12) + 3
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions, **changes}


def test_only_the_changed_document_changes_in_a_plain_loop() -> None:
    stock = AutoModelForCausalLM.from_config(config_of("falcon"), dtype=torch.float64)
    model = hfscale.parallelize(stock, ParallelConfig()).train()
    first = model(**_packed(labels=None)).logits
    other = _packed()["input_ids"].clone()
    other[0, 2] = 40
    second = model(**_packed(input_ids=other, labels=None)).logits
    assert not torch.equal(first[:, 2:5], second[:, 2:5])
    torch.testing.assert_close(first[:, 5:], second[:, 5:], rtol=0, atol=0)


@pytest.mark.parametrize(
    "call", ["train_step", "eval_step", "token_scores", "plain loop", "Trainer"]
)
def test_models_whose_documents_affect_each_other_are_refused(call: str, tmp_path: Any) -> None:
    model = hfscale.parallelize(
        AutoModelForCausalLM.from_config(config_of("minimax")).train(), ParallelConfig()
    )
    calls: dict[str, Callable[[], Any]] = {
        "plain loop": lambda: model(**_packed()),
        "Trainer": lambda: hfscale.Trainer(
            model,
            TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[]),
            data_collator=DataCollatorWithFlattening(),
        ),
    }
    with pytest.raises(
        ConfigError, match=r"MiniMaxForCausalLM they do .*: give every document its own row"
    ):
        calls.get(call, lambda: getattr(hfscale, call)(model, _packed()))()
    one_document = torch.arange(12)[None]
    assert hfscale.eval_step(model, _packed(position_ids=one_document)).isfinite()


def test_lengths_of_documents_without_positions_are_refused() -> None:
    model = hfscale.parallelize(
        AutoModelForCausalLM.from_config(tiny("llama")).train(), ParallelConfig()
    )
    batch = _packed(cu_seq_lens_q=torch.tensor([0, 5, 12], dtype=torch.int32))
    with pytest.raises(ConfigError, match=r"separates 2 documents.*give position_ids too"):
        hfscale.train_step(
            model, {name: value for name, value in batch.items() if name != "position_ids"}
        )


def test_the_proof_leaves_the_random_state_alone() -> None:
    state = torch.random.get_rng_state()
    for family in ("llama", "gpt2", "mistral", "qwen3_moe"):
        with torch.device("meta"):
            check_packed_rows(AutoModelForCausalLM.from_config(AutoConfig.for_model(family)))
    assert torch.equal(torch.random.get_rng_state(), state)
