"""Encoder-decoders in stages: the encoder's layers and then the decoder's, equal to one process."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForTokenClassification

from hfscale import ParallelConfig
from hfscale.models.clone import tiny_clone
from hfscale.parallel.pipeline.microbatches import with_targets
from hfscale.testing import RankPool, assert_layout_equal, plain
from hfscale.testing.verify import changes_for
from tests.sweeps import cases

Pools = Callable[[int], RankPool]
PP2 = {"pp_size": 2, "num_microbatches": 2}


def case_of(family: str, layers: int = 4) -> plain.OwnLossCase:
    config = AutoConfig.for_model(family)
    config = tiny_clone(config, layers=layers, **changes_for(config, AutoModelForSeq2SeqLM))
    return plain.OwnLossCase(
        config,
        auto_class=AutoModelForSeq2SeqLM,
        make_batch=plain.sequence_to_sequence,
        over="labels",
    )


INTERLEAVED = {**PP2, "pipeline_schedule": "interleaved1f1b", "virtual_stages": 2}
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("mbart", {"pp_size": 4, "num_microbatches": 2, "pipeline_schedule": "gpipe"}),
    ("marian", INTERLEAVED),
    (
        "m2m_100",
        {**PP2, "stage_layers": [4, 4]},
    ),  # its labels are shifted inside of its forward pass
    # The second stage has the tied embedding under two names, neither the first one's.
    ("bart", {**PP2, "dp_shard_size": 2, "stage_layers": [4, 4]}),
    # Tables of relative positions, on every stage of their stack.
    ("t5", {**PP2, "tp_size": 2, "stage_layers": [2, 6]}),
    ("t5", {**INTERLEAVED, "dp_shard_size": 2}),
]
MORE: list[tuple[str, dict[str, Any]]] = [
    ("bart", PP2),
    ("bart", {**PP2, "tp_size": 2}),
    ("mt5", {**PP2, "pp_size": 4}),
    ("t5", {**PP2, "dp_shard_size": 2, "weights_regather": True}),
    (
        "mvp",
        {**PP2, "stage_layers": [3, 5]},
    ),  # layers of its encoder return something else than its decoder's
]


@pytest.mark.daily("m2m_100-2-2-[4, 4]")
@pytest.mark.parametrize(
    ("family", "layout"),
    cases([*LAYOUTS, *MORE], daily=LAYOUTS),
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_parity(pools: Pools, family: str, layout: dict[str, Any]) -> None:
    parallel = ParallelConfig(**layout)
    assert_layout_equal(case_of(family), parallel, pools(parallel.total_size))


@pytest.mark.parametrize(
    ("schedule", "accumulation"),
    cases([("zbv", 1), ("interleaved1f1b", 2)], daily=[("interleaved1f1b", 2)]),
)
def test_tables_are_looked_up_again_by_recomputed_layers(
    pools: Pools, schedule: str, accumulation: int
) -> None:
    microbatches = accumulation if accumulation > 1 else 3  # a batch of three rows is cut
    parallel = ParallelConfig(
        pp_size=2, pipeline_schedule=schedule, virtual_stages=2, num_microbatches=microbatches
    )
    case = replace(case_of("t5"), checkpointing=True, accumulation=accumulation)
    assert_layout_equal(case, parallel, pools(2))


def test_a_classifier_of_tokens_makes_what_its_decoder_reads_of_the_texts() -> None:
    config = tiny_clone(AutoConfig.for_model("t5gemma"), layers=2)
    model = AutoModelForTokenClassification.from_config(config)
    ids = torch.arange(3, 9)[None]
    batch = {"input_ids": ids, "labels": ids % 2}
    found = with_targets(model, model.get_decoder(), batch)["decoder_input_ids"]
    assert torch.equal(found[:, 1:], ids[:, :-1])
