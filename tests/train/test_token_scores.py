"""Scores of tokens, and losses made of them, equal those of whole logits in one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale.testing import RankPool

from ..families import config_of
from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
Layout = dict[str, Any]
FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
TEMPERATURE = 0.7
WHOLE = [
    {"tp_size": 2},
    {"tp_size": 2, "sequence_parallel": True},
    {"dp_shard_size": 2},
    {"cp_size": 2},
    {"tp_size": 2, "dp_shard_size": 2},
]
STAGES: list[Layout] = [
    {"pp_size": 2},
    {"pp_size": 2, "pipeline_schedule": "zbv", "virtual_stages": 2},
    {"pp_size": 2, "tp_size": 2},
    {"pp_size": 2, "dp_shard_size": 2},
]


def rows(place: int, count: int = 3) -> dict[str, Tensor]:
    """One batch: padding, labels that are masked, and one row without any."""
    generator = torch.Generator().manual_seed(place)
    ids = torch.randint(3, 67, (count, 9), generator=generator)
    mask = torch.ones_like(ids)
    labels = ids.clone()
    mask[0, 6:], labels[0, 6:], labels[1, :4], labels[2] = 0, -100, -100, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def expected_scores(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    logits = (
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        / TEMPERATURE
    )
    wanted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    log_p = logits.log_softmax(-1)
    valid = wanted != -100
    found = {
        "log_probs": log_p.gather(-1, wanted.clamp(min=0).unsqueeze(-1)).squeeze(-1),
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "log_sum_sq_probs": log_p.exp().square().sum(-1).log(),
        "mean_logits": logits.mean(-1),
        "is_top1": logits.argmax(-1) == wanted,
    }
    return {name: value.masked_fill(~valid, 0) for name, value in found.items()}


def loss_of(log_probs: Tensor, entropy: Tensor) -> Tensor:
    """Not linear, so that every token has a gradient of its own."""
    weights = torch.arange(log_probs.shape[1], dtype=log_probs.dtype) + 1
    return (-log_probs.exp() * weights).sum() - 0.1 * entropy.square().sum()


def score_and_step(path: str, out: str, layout: Layout) -> dict[str, Any]:
    model = hfscale.from_pretrained(
        path, parallel=ParallelConfig(**layout), dtype=torch.float64
    ).train()
    place = hfscale.batch_rank(model)
    staged = "pp_size" in layout
    batches = [rows(place + 10 * number) for number in range(4)]
    with torch.no_grad():
        seen = hfscale.token_scores(model, batches[0], temperature=TEMPERATURE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if staged:

        def score_loss(scores: hfscale.TokenScores, index: int) -> Tensor:
            return loss_of(scores.log_probs, scores.entropy) * (index + 1)

        loss = hfscale.train_step(model, batches, score_loss=score_loss, temperature=TEMPERATURE)
    else:
        loss = torch.zeros((), dtype=torch.float64)
        for index, batch in enumerate(batches):
            scores = hfscale.token_scores(model, batch, temperature=TEMPERATURE)
            one = loss_of(scores.log_probs, scores.entropy) * (index + 1)
            one.backward()
            loss += one.detach()
    norm = hfscale.clip_grad_norm_(model, 1e9)
    optimizer.step()
    hfscale.save_pretrained(model, out)
    return {
        "seen": {name: getattr(seen, name) for name in FIELDS},
        "place": place,
        "loss": loss,
        "norm": norm,
    }


@pytest.mark.daily("layout8", "layout2")
@pytest.mark.parametrize("layout", [*WHOLE, *STAGES])
def test_scores_and_losses_equal_one_process(pools: Pools, layout: Layout, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = tiny(
        "llama", num_hidden_layers=4, vocab_size=67, tie_word_embeddings="pp_size" in layout
    )
    stock = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    stock.save_pretrained(tmp_path / "start")
    parallel = ParallelConfig(**layout)
    found = pools(parallel.total_size).run(
        score_and_step, str(tmp_path / "start"), str(tmp_path / "out"), layout
    )

    losses = []
    for place in range(parallel.batch_world):
        parts = [expected_scores(stock, rows(place + 10 * number)) for number in range(4)]
        losses.append(
            sum(
                loss_of(part["log_probs"], part["entropy"]) * (i + 1)
                for i, part in enumerate(parts)
            )
        )
    (sum(losses) / len(losses)).backward()
    norm = torch.nn.utils.clip_grad_norm_(stock.parameters(), 1e9)
    for result in found:
        with torch.no_grad():
            whole = expected_scores(stock, rows(result["place"]))
        for name in FIELDS:
            torch.testing.assert_close(
                result["seen"][name], whole[name], rtol=1e-10, atol=1e-10, msg=name
            )
        mean = sum(losses) / len(losses) if "pp_size" in layout else losses[result["place"]]
        torch.testing.assert_close(result["loss"], mean.detach(), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(result["norm"], norm, rtol=1e-6, atol=0)
    torch.optim.SGD(stock.parameters(), lr=0.1).step()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    for name, value in stock.state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], value, rtol=1e-6, atol=1e-7)


def padded(config: Any, attention: str, period: int) -> tuple[Any, dict[str, Tensor]]:
    """A model, and two rows of which the second begins with padding; documents of ``period`` tokens, or one in each."""
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(
        config, dtype=torch.float64, attn_implementation=attention
    ).eval()
    ids = torch.randint(3, config.vocab_size, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0) % period
    return stock, {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def log_probs_of(layout: Layout, config: Any, attention: str, period: int) -> Tensor:
    stock, batch = padded(config, attention, period)
    model = hfscale.parallelize(stock, ParallelConfig(**layout))
    with torch.no_grad():
        return hfscale.token_scores(model, batch).log_probs


@pytest.mark.parametrize(("family", "attention"), [("gptj", "eager"), ("gpt_neox", "sdpa")])
@pytest.mark.parametrize("layout", [{}, {"tp_size": 2, "sequence_parallel": True}, {"cp_size": 2}])
def test_scores_behind_left_padding(
    pools: Pools, layout: Layout, family: str, attention: str
) -> None:
    """In one document they are stock's; in packed rows each document's own, whatever padding predicts before them."""
    config = config_of(family, 2)
    ranks = pools(2) if layout else None

    def found(period: int) -> Tensor:
        if ranks is None:
            return log_probs_of(layout, config, attention, period)
        return ranks.run(log_probs_of, layout, config, attention, period)[0]

    def expected(stock: Any, **batch: Tensor) -> Tensor:
        with torch.no_grad():
            scores = stock(**batch).logits[:, :-1].log_softmax(-1)
        return scores.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]

    stock, batch = padded(config, attention, 12)
    one = expected(stock, **batch) * batch["attention_mask"][:, 1:]
    torch.testing.assert_close(found(12)[:, :-1], one, rtol=1e-10, atol=1e-10)
    packed = found(5)
    for row, start, end in ((0, 0, 5), (0, 5, 10), (0, 10, 12), (1, 2, 7), (1, 7, 12)):
        document = expected(stock, input_ids=batch["input_ids"][row : row + 1, start:end])
        torch.testing.assert_close(
            packed[row, start : end - 1], document[0], rtol=1e-10, atol=1e-10
        )


def refused(path: str) -> str:
    model = hfscale.from_pretrained(path, parallel=ParallelConfig(pp_size=2, num_microbatches=4))
    with pytest.raises(ConfigError) as caught:
        hfscale.train_step(model, rows(0, 4), score_loss=lambda scores, _: scores.log_probs.sum())
    return str(caught.value)


def test_a_loss_is_about_what_was_given(pools: Pools, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(tmp_path)
    for message in pools(2).run(refused, str(tmp_path)):
        assert "pass a list of microbatches" in message
