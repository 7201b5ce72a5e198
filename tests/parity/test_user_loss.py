"""A loss of the user's own, of what a model returns, in layouts: equal to one process with the same loss."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale.models.clone import tiny_clone
from hfscale.testing import RankPool, assert_layout_equal, plain
from hfscale.train.runtime import local_tensor
from tests.plain_cases import UserLossCase

Pools = Callable[[int], RankPool]


def pairs(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    """Rows in twos, of which the first is to be scored higher by a margin that the model knows nothing of."""
    better = outputs.logits[::2, 0]
    worse = outputs.logits[1::2, 0]
    return -nn.functional.logsigmoid(better - worse - batch["margins"][::2]).sum(), len(better)


def odd_tokens(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Cross entropy of tokens with odd ids only; some microbatches have none."""
    labels = batch["labels"][:, 1:]
    counted = (labels % 2 == 1) & (labels > batch["least"])
    losses = nn.functional.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="none"
    )
    return (losses * counted.flatten()).sum(), counted.sum()


def with_margins(case: plain.PlainCase, generator: torch.Generator, length: int) -> Any:
    batch = plain.causal_lm(case, generator, length)
    del batch["labels"]
    rows = 2 + 2 * (length % 2)  # ragged: batches of one pair, and of two
    margins = torch.rand(case.rows, generator=generator, dtype=torch.float64)
    return {name: value[:rows] for name, value in {**batch, "margins": margins}.items()}


def with_thresholds(case: plain.PlainCase, generator: torch.Generator, length: int) -> Any:
    least = 100 if length == 8 else 5  # nothing counts in every second microbatch
    return {**plain.causal_lm(case, generator, length), "least": torch.full((case.rows, 1), least)}


def reward(family: str = "llama") -> UserLossCase:
    config = tiny_clone(AutoConfig.for_model(family), num_labels=1, pad_token_id=0, layers=2)
    auto = AutoModelForSequenceClassification
    make = with_margins
    return UserLossCase(config, rows=4, auto_class=auto, make_batch=make, loss_fn=pairs)


def odd() -> UserLossCase:
    return UserLossCase(
        tiny_clone(AutoConfig.for_model("llama")), make_batch=with_thresholds, loss_fn=odd_tokens
    )


LAYOUTS = {
    "one process": ParallelConfig(),
    "tp": ParallelConfig(tp_size=2),
    "sequence": ParallelConfig(tp_size=2, sequence_parallel=True),
    "dp": ParallelConfig(dp_shard_size=2),
    "pp": ParallelConfig(pp_size=2),
    "pp x dp": ParallelConfig(pp_size=2, dp_shard_size=2),
}


@pytest.mark.daily("pp x dp", "sequence")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pairs(pools: Pools, layout: str) -> None:
    size = LAYOUTS[layout].total_size
    assert_layout_equal(reward(), LAYOUTS[layout], pools(size) if size > 1 else None)


@pytest.mark.daily("tp", "pp")
@pytest.mark.parametrize("layout", ["tp", "dp", "pp"])
def test_counts_of_tokens(pools: Pools, layout: str) -> None:
    assert_layout_equal(odd(), LAYOUTS[layout], pools(2))


def test_an_encoder_in_stages(pools: Pools) -> None:
    assert_layout_equal(reward("bert"), LAYOUTS["pp"], pools(2))


def test_gradients_of_before_are_added_to() -> None:
    case = odd()
    model = hfscale.from_config(case.config, dtype=torch.float64, seed=0)
    first, second = case.batches(1)[0][0]
    other = {**second, "least": torch.full((case.rows, 1), 5)}
    each = []
    for batches in ([first], [other], [first, other]):
        model.zero_grad()
        for batch in batches:
            hfscale.train_step(model, batch, odd_tokens)
        each.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for one, two, both in zip(*each, strict=True):
        torch.testing.assert_close(one + two, both, rtol=1e-12, atol=1e-14)


def _behind(looks: bool) -> tuple[bool, float, list[torch.Tensor]]:
    """A step behind passes that no backward pass followed."""
    case = odd()
    model = hfscale.from_config(case.config, parallel=LAYOUTS["dp"], dtype=torch.float64, seed=0)
    batch = case.batches(1)[0][0][0]
    ids = batch["input_ids"][:, :3]
    held = list(model.parameters())
    if looks:
        model.generate(input_ids=ids, max_new_tokens=2)
    same = all(one is other for one, other in zip(model.parameters(), held, strict=True))
    if looks:
        model(input_ids=ids)
    loss = hfscale.train_step(model, batch, odd_tokens)
    return (
        same,
        float(loss),
        [local_tensor(parameter.grad) for parameter in held if parameter.grad is not None],
    )


def test_behind_passes_without_backward_passes(pools: Pools) -> None:
    for plain_run, other in zip(
        pools(2).run(_behind, False), pools(2).run(_behind, True), strict=True
    ):
        assert other[0]
        assert other[1] == plain_run[1]
        assert len(other[2]) == len(plain_run[2]) > 0
        assert all(map(torch.equal, plain_run[2], other[2]))


def _evaluated(layout: ParallelConfig, config: Any, batch: Any) -> Any:
    model = hfscale.from_config(
        config, parallel=layout, auto_class=AutoModelForCausalLM, dtype=torch.float64, seed=3
    ).eval()
    known = {name: value for name, value in batch.items() if name != "least"}
    loss, outputs = hfscale.eval_step(model, known, return_outputs=True)
    own, others = hfscale.eval_step(model, [batch] * 4, odd_tokens, return_outputs=True)
    return float(loss), outputs.logits, float(own), [each["logits"] for each in others]


@pytest.mark.parametrize("layout", ["tp", "pp", "dp"])
def test_outputs_of_an_evaluation(pools: Pools, layout: str) -> None:
    case = odd()
    batch = {**case.batches(1)[0][0][0], "least": torch.full((3, 1), 5)}
    # Rows enough for microbatches.
    batch = {name: torch.cat([value, value[:1]]) for name, value in batch.items()}
    expected = _evaluated(ParallelConfig(), case.config, batch)
    for loss, logits, own, others in pools(2).run(_evaluated, LAYOUTS[layout], case.config, batch):
        assert (loss, own) == pytest.approx((expected[0], expected[2]), rel=1e-12)
        torch.testing.assert_close(logits, expected[1], rtol=1e-10, atol=1e-12)
        assert len(others) == 4
        torch.testing.assert_close(others[3], expected[1], rtol=1e-10, atol=1e-12)


def test_what_is_no_sum_and_count() -> None:
    case = odd()
    model = hfscale.from_config(case.config, dtype=torch.float64, seed=0)
    batch = case.batches(1)[0][0][0]
    with pytest.raises(
        ConfigError, match="return the sum of the microbatch's losses, and their number"
    ):
        hfscale.train_step(model, batch, lambda outputs, _: outputs.logits.sum())
    with pytest.raises(ConfigError, match="loss_fn replaces the model's loss"):
        hfscale.train_step(model, batch, odd_tokens, label_smoothing=0.1)
    with pytest.raises(ConfigError, match="at least one row on every rank for loss_fn"):
        hfscale.train_step(model, {name: value[:0] for name, value in batch.items()}, odd_tokens)


def test_float16_of_a_class_whose_loss_nobody_knows() -> None:
    """What scales losses knows of none, and gradients are true all the same."""
    config = tiny_clone(AutoConfig.for_model("bert"))
    model = hfscale.from_config(
        config, auto_class=AutoModel, dtype=torch.float32, mixed_precision="fp16", seed=0
    )
    batch = {"input_ids": torch.arange(8).view(2, 4)}
    for _ in range(20):  # until the scale of the loss is small enough
        hfscale.train_step(
            model, batch, lambda outputs, _: (outputs.pooler_output.square().sum(), 2)
        )
        if not hfscale.metrics(model)["step_was_skipped"]:
            break
    norm = float(hfscale.clip_grad_norm_(model, 1e9))
    stock = AutoModel.from_config(config, dtype=torch.float32)
    stock.load_state_dict(model.state_dict())
    (stock(**batch).pooler_output.square().sum() / 2).backward()
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(stock.parameters(), 1e9)), rel=0.02)
