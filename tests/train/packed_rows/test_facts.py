"""Packed rows under flash attention, which is told where examples end, here by a stand-in for the kernel."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale.testing import RankPool
from hfscale.train.packed_rows.facts import with_document_lengths

from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
LENGTHS = [[5, 7], [3, 4, 5]]
IDS = torch.arange(24).view(2, 12) % 61 + 3
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
LABELS = IDS.where(POSITIONS != 0, -100)
BATCH = {"input_ids": IDS, "labels": LABELS, "position_ids": POSITIONS}


def _flash(
    module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any
) -> tuple[Any, None]:
    """What the kernel computes: attention within what lies between two borders, of all rows one after the other."""
    borders = kwargs["cu_seq_lens_q"]
    assert borders.dtype == torch.int32
    assert kwargs["cu_seq_lens_k"] is borders
    assert kwargs["max_length_q"] == kwargs["max_length_k"] == borders.diff().max()
    rows = len(query)
    heads = (x.transpose(0, 1).flatten(1, 2) for x in (query, key, value))  # [h, rows s, d]
    parts = zip(*(x.split(borders.diff().tolist(), 1) for x in heads), strict=True)
    made = [
        F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True) for part in parts
    ]
    return torch.cat(made, 1).transpose(0, 1).unflatten(0, (rows, -1)), None


def _step(layout: ParallelConfig, directory: str) -> tuple[float, float]:
    AttentionInterface.register("stand_in_for_flash", _flash)
    AttentionMaskInterface.register("stand_in_for_flash", lambda *_, **__: None)
    model = hfscale.from_pretrained(directory, parallel=layout, dtype=torch.float64).train()
    model.config._attn_implementation = "stand_in_for_flash"
    loss = hfscale.train_step(model, BATCH)
    return float(loss), float(hfscale.clip_grad_norm_(model, 1.0))


@pytest.mark.parametrize(
    "layout", [{}, {"tp_size": 2}, {"pp_size": 2, "num_microbatches": 2}], ids=["one", "tp", "pp"]
)
def test_flash_attention_stays_within_examples(
    pools: Pools, tmp_path: Any, layout: dict[str, int]
) -> None:
    AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float64).save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).train()
    loss = stock(**BATCH, use_cache=False).loss
    loss.backward()
    expected = float(loss.detach()), float(torch.nn.utils.clip_grad_norm_(stock.parameters(), 1.0))
    parallel = ParallelConfig(**layout)
    args = (parallel, str(tmp_path))
    for found in (
        pools(parallel.total_size).run(_step, *args) if parallel.total_size > 1 else [_step(*args)]
    ):
        # Stock computes its loss and norms in float32.
        assert found == pytest.approx(expected, rel=1e-6)


def test_borders() -> None:
    model = AutoModelForCausalLM.from_config(tiny("llama"))
    found = with_document_lengths(BATCH, model)
    assert (
        found["cu_seq_lens_q"].tolist() == found["cu_seq_lens_k"].tolist() == [0, 5, 12, 15, 19, 24]
    )
    assert found["max_length_q"] == found["max_length_k"] == 7
    assert with_document_lengths(
        {**BATCH, "attention_mask": torch.ones_like(IDS)}, model
    ).keys() == {
        *BATCH,
        "attention_mask",
    }
    # One row of positions for all.
    shared = with_document_lengths({**BATCH, "position_ids": POSITIONS[:1]}, model)
    assert shared["cu_seq_lens_q"].tolist() == [0, 5, 12, 17, 24]


def test_a_model_that_takes_no_borders_is_refused() -> None:
    class Closed(torch.nn.Module):
        def forward(self, input_ids: Any, position_ids: Any) -> None: ...

    with pytest.raises(ConfigError, match="microbatches of one row"):
        with_document_lengths(BATCH, Closed())
    one = {name: value[:1] for name, value in BATCH.items()}
    assert with_document_lengths(one, Closed()).keys() == one.keys()
