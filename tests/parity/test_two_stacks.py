"""Encoder-decoders in stages: the encoder's layers and then the decoder's, equal to one process."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from hfscale import ParallelConfig
from hfscale.families.clone import tiny_clone
from hfscale.testing import RankPool, assert_layout_equal, plain
from hfscale.testing.sample_batches import changes_for

Pools = Callable[[int], RankPool]
PP2 = {"pp_size": 2, "num_microbatches": 2}


def case_of(family: str, layers: int = 4) -> plain.OwnLossCase:
    config = AutoConfig.for_model(family)
    config = tiny_clone(config, layers=layers, **changes_for(config, AutoModelForSeq2SeqLM))
    return plain.OwnLossCase(
        config, auto_class=AutoModelForSeq2SeqLM, make_batch=plain.sequence_to_sequence, over="labels"
    )


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("bart", PP2),
        ("mbart", {"pp_size": 4, "num_microbatches": 2, "pipeline_schedule": "gpipe"}),
        ("marian", {**PP2, "pipeline_schedule": "interleaved1f1b", "virtual_stages": 2}),
        ("m2m_100", {**PP2, "stage_layers": [4, 4]}),  # its labels are shifted inside of its forward pass
        ("bart", {**PP2, "tp_size": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_parity(pools: Pools, family: str, layout: dict[str, Any]) -> None:
    parallel = ParallelConfig(**layout)
    assert_layout_equal(case_of(family), parallel, pools(parallel.total_size))
