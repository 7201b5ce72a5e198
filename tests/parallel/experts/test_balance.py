"""The arithmetic of balance, and that the bias update does its work."""

from pathlib import Path
from typing import Any

import pytest
import torch

import hfscale
from hfscale import ParallelConfig, RoutingConfig
from hfscale.parallel.experts.forward_contexts import real_tokens
from hfscale.parallel.experts.load_report import LayerLoad
from hfscale.parallel.experts.router_functions import (
    balance_loss,
    bias_step,
    expert_counts,
    expert_sums,
    probabilities,
    z_loss,
)
from tests.parity.test_balance import _config, _microbatches, _together


def test_balance_is_one_where_all_is_even_and_the_number_of_experts_where_one_has_all() -> None:
    real = torch.ones(1, 8, dtype=torch.bool)
    index = torch.arange(8).remainder(4).view(1, 8, 1)
    even = expert_sums(torch.zeros(1, 8, 4), index, real, "softmax")
    assert float(balance_loss(even)) / 8 == pytest.approx(1.0)
    assert float(z_loss(even)) / 8 == pytest.approx(float(torch.tensor(4.0).log() ** 2))
    alone = torch.tensor([50.0, 0.0, 0.0, 0.0]).expand(1, 8, 4)
    all_to_one = expert_sums(alone, torch.zeros(1, 8, 1, dtype=torch.int64), real, "softmax")
    assert float(balance_loss(all_to_one)) / 8 == pytest.approx(4.0)


def test_sums_of_slices_add_up_and_padding_adds_nothing() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 10, 5, dtype=torch.float64)
    index = torch.randint(0, 6, (3, 10, 2))
    real = torch.rand(3, 10) < 0.7
    whole = expert_sums(logits, index, real, "sigmoid")
    parts = [
        expert_sums(logits[:, s], index[:, s], real[:, s], "sigmoid")
        for s in (slice(0, 4), slice(4, 10))
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole)
    logits[~real] = 1e6
    torch.testing.assert_close(expert_sums(logits, index, real, "sigmoid"), whole)
    for sample in range(3):
        expected = [int((index[sample][real[sample]] == expert).sum()) for expert in range(5)]
        assert expert_counts(index, 5, real)[sample].tolist() == expected


def test_a_sequence_of_padding_alone_is_no_division_by_zero() -> None:
    sums = expert_sums(
        torch.randn(1, 3, 4),
        torch.zeros(1, 3, 1, dtype=torch.int64),
        torch.zeros(1, 3).bool(),
        "softmax",
    )
    assert float(balance_loss(sums)) == 0
    assert float(z_loss(sums)) == 0


def test_probabilities_are_taken_once_and_in_32_bits() -> None:
    logits = torch.tensor([[4.0, 1.0, -2.0]], dtype=torch.bfloat16)
    torch.testing.assert_close(probabilities(logits), logits.float().softmax(-1))
    each = logits.float().sigmoid()
    torch.testing.assert_close(probabilities(logits, "sigmoid"), each / each.sum())


def test_bias_steps_go_towards_the_mean() -> None:
    assert bias_step(torch.tensor([5, 1, 3, 3]), 0.01).tolist() == [-0.01, 0.01, 0.0, 0.0]


def test_measures_of_a_load() -> None:
    def load(*tokens: int) -> LayerLoad:
        return LayerLoad("a layer", tokens)

    assert load(4, 4, 4).max_over_mean == 1.0
    assert load(4, 4, 4).entropy == pytest.approx(1.0)
    assert load(12, 0, 0).max_over_mean == 3.0
    assert load(12, 0, 0).entropy == 0.0
    assert load(6, 6, 0, 0).entropy == pytest.approx(0.5)
    assert load(0, 0).max_over_mean == load(0, 0).entropy == load(7).entropy == 1.0


def test_real_tokens_of_every_kind_of_mask() -> None:
    ids = torch.ones(2, 4, dtype=torch.int64)
    padded = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    assert real_tokens({"input_ids": ids}).all()
    assert torch.equal(
        real_tokens({"inputs_embeds": torch.ones(2, 4, 8), "attention_mask": padded}), padded.bool()
    )
    allowed = torch.ones(4, 4).tril().bool() & padded.bool()[:, None, None, :]
    added = torch.zeros(2, 1, 4, 4).masked_fill(~allowed, torch.finfo(torch.float32).min)
    for mask in (
        allowed,
        added,
        allowed.int(),
        {"sliding_attention": None, "full_attention": added},
    ):
        assert torch.equal(real_tokens({"input_ids": ids, "attention_mask": mask}), padded.bool())
    cached = torch.cat((torch.zeros(2, 3), padded), 1)
    assert torch.equal(real_tokens({"input_ids": ids, "attention_mask": cached}), padded.bool())


def _skewed(
    layout: ParallelConfig | None, rate: float, directory: str | None = None, steps: int = 20
) -> Any:
    """A model whose routers all prefer one expert, trained a little by biases alone: loads before and after, biases."""
    config = _config("deepseek_v3")
    config.n_group = config.topk_group = 1
    routing = RoutingConfig(bias_update_rate=rate)
    model = hfscale.from_config(
        config, parallel=layout, dtype=torch.float64, routing=routing
    ).train()
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer[1] += 0.2
    mine = _microbatches()[hfscale.batch_rank(model) :: hfscale.batch_world(model)]
    loads = []
    for _ in range(steps):
        hfscale.train_step(model, mine)
        loads.append([layer.max_over_mean for layer in hfscale.expert_load(model).layers])
    before = {
        name: buffer.clone() for name, buffer in model.named_buffers() if "correction_bias" in name
    }
    hfscale.eval_step(model, mine)
    model(**mine[0]) if model.training and (layout is None or layout.size("pp") == 1) else None
    for name, buffer in before.items():
        assert torch.equal(model.get_buffer(name), buffer), "only training steps move a bias"
    if directory is not None:
        hfscale.save_pretrained(model, directory)
    return loads, before


def test_bias_updates_balance_a_skewed_router_and_are_saved(tmp_path: Path) -> None:
    loads, biases = _skewed(None, 0.008, str(tmp_path / "saved"))
    assert min(loads[0]) > 1.9, "every token chooses the preferred expert"
    assert max(loads[-1]) < 1.3
    assert min(_skewed(None, 1e-9, steps=3)[0][-1]) > 1.9
    again = hfscale.from_pretrained(str(tmp_path / "saved"), dtype=torch.float64)
    for name, bias in biases.items():
        torch.testing.assert_close(again.get_buffer(name).double(), bias.double())


@pytest.mark.slow
def test_bias_updates_are_the_same_on_every_rank(pools: Any) -> None:
    _, expected = _skewed(None, 0.01, steps=10)
    for layout in (
        ParallelConfig(ep_size=2),
        ParallelConfig(tp_size=2, sequence_parallel=True, ep_size=2),
    ):
        for _, biases in pools(2).run(_skewed, layout, 0.01, steps=10):
            for name, bias in biases.items():
                torch.testing.assert_close(bias, expected[name])


def test_a_bias_of_16_bits_is_moved_in_32() -> None:
    config = _config("deepseek_v3")
    model = hfscale.from_config(
        config, dtype=torch.bfloat16, routing=RoutingConfig(bias_update_rate=0.001)
    ).train()
    gate = model.model.layers[0].mlp.gate
    gate.e_score_correction_bias.fill_(1.0)
    hfscale.train_step(model, _together(_microbatches()))
    moved = (gate.e_score_correction_bias - 1.0).abs()
    assert moved.max() == pytest.approx(0.001, rel=1e-3)
