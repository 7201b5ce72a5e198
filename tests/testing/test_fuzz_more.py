"""What random draws have beyond a layout and a loop."""

from random import Random

import pytest
import torch

from hfscale import MemoryConfig, ParallelConfig
from hfscale.config.options import Options
from tests.fuzz import Draw, choose
from tests.fuzz.between import _log_probs, _scored
from tests.fuzz.choose_more import _another
from tests.fuzz.levers import planned_by, scaled_by
from tests.fuzz.ranks import sum_of_tokens

LEVERS = {"recompute", "offload_activations", "offload_optimizer", "offload_parameters"}
LEVERS |= {
    "bf16",
    "fp16",
    "fp8",
    "gradient_compression",
    "compress_activations",
    "stochastic_rounding",
}


def test_they_are_possible() -> None:
    draws = list[Draw]()
    levers = set[str]()
    # The rarest is one of fifty to a hundred; which draws have it depends on the families that transformers has.
    while len(draws) < 300 or (len(draws) < 900 and not levers >= LEVERS):
        draws.append(choose(0, len(draws)))
        levers |= {*draws[-1].levers, *(draws[-1].memory or {})}
    assert levers >= LEVERS
    for draw in draws:
        MemoryConfig(**(draw.memory or {}))
        Options(**planned_by(draw), **scaled_by(draw))
    again = [draw for draw in draws if draw.resume_layout is not None]
    assert again
    for draw in again:
        first = draw.parallel()
        second = ParallelConfig(**(draw.resume_layout or {}))
        assert (first.total_size, first.batch_world) == (second.total_size, second.batch_world), (
            draw.write()
        )
        assert draw.resume


def test_there_is_another_layout_where_axes_can_be_exchanged() -> None:
    draw = Draw("llama", layout={"tp_size": 2, "dp_shard_size": 2}, resume=True, microbatches=2)
    found = [_another(Random(seed), draw) for seed in range(40)]
    axes = {
        tuple(sorted(name for name in each if name.endswith("_size"))) for each in found if each
    }
    assert axes >= {
        ("dp_replicate_size", "pp_size"),
        ("cp_size", "dp_shard_size"),
        ("dp_replicate_size", "tp_size"),
    }
    assert _another(Random(0), draw.change(layout={"dp_shard_size": 2, "ep_size": 2})) is None


def test_what_stock_code_says_of_tokens() -> None:
    ids = torch.tensor([[3, 1, 2], [0, 4, 4]])
    batch = {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    found = _log_probs(logits, batch)
    wanted = logits.log_softmax(-1)
    assert found.tolist() == [
        [wanted[0, 0, 1].item(), wanted[0, 1, 2].item(), 0.0],
        [wanted[1, 0, 4].item(), 0.0, 0.0],
    ]
    behind = {**batch, "attention_mask": batch["attention_mask"].flip(1)}
    one_document, packed = (
        _scored(Draw("llama", positions=True, packed=more), behind)[1].tolist()
        for more in (False, True)
    )
    assert one_document == [True, True, True]
    assert packed == [False, True, True]
    total, count = sum_of_tokens(
        type("", (), {"logits": logits}), {"labels": ids.masked_fill(ids == 2, -100)}
    )
    assert count == 3
    assert total.item() == pytest.approx(-(found[0, 0] + wanted[1, 0, 4] + wanted[1, 1, 4]).item())
