"""What trains in a wrapper around a parallelized model: as in stock code in one process, refused over ranks."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale.models.precision import keep_float64
from hfscale.testing import RankPool

from ..refusals import refusal_of
from ..tiny_models import tiny

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")

Pools = Callable[[int], RankPool]
IDS = torch.randint(3, 60, (4, 9), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}


class Scaled(nn.Module):
    """A user's module around a model: an offset of its embeddings."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        self.offset = nn.Parameter(torch.full((32,), 0.1, dtype=torch.float64))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **rest: Any) -> Any:
        embedded = self.model.get_input_embeddings()(input_ids) + self.offset
        return self.model(inputs_embeds=embedded, labels=labels, **rest)


def prompt(kind: Any) -> Callable[[Any], Any]:
    return lambda model: peft.get_peft_model(
        model, kind(num_virtual_tokens=3, task_type="CAUSAL_LM")
    )


WRAPPERS = {
    "prompt": prompt(peft.PromptTuningConfig),
    "prefix": prompt(peft.PrefixTuningConfig),
    "module": Scaled,
}


def wrapped(model: Any, kind: str) -> Any:
    torch.manual_seed(1)
    return WRAPPERS[kind](model).double().train()


def stock() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float64)


@pytest.mark.filterwarnings(
    "ignore:`past_key_values` is deprecated:FutureWarning"
)  # PEFT's own call of transformers 5.24
@pytest.mark.parametrize("kind", WRAPPERS)
def test_it_trains_in_one_process_as_stock_does(kind: str) -> None:
    model = stock()
    models = [
        wrapped(copy.deepcopy(model), kind),
        wrapped(hfscale.parallelize(model, ParallelConfig()), kind),
    ]
    optimizers = [
        torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.5)
        for each in models
    ]
    for _ in range(3):
        with keep_float64():  # stock rotary embeddings are in 32 bits
            loss = models[0](**BATCH).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(models[0].parameters(), 0.01)
        with keep_float64():
            held, trained = (
                float(step(models[1], BATCH)) for step in (hfscale.eval_step, hfscale.train_step)
            )
        assert trained == pytest.approx(float(loss.detach()), rel=1e-7)
        assert held == pytest.approx(float(loss.detach()), rel=1e-7)
        assert float(hfscale.clip_grad_norm_(models[1], 0.01)) == pytest.approx(
            float(norm), rel=1e-6
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    named = [{name: p for name, p in each.named_parameters() if p.requires_grad} for each in models]
    for name, parameter in named[0].items():
        torch.testing.assert_close(named[1][name], parameter, rtol=1e-6, atol=1e-9)


def test_saves_that_would_leave_it_out_are_refused(tmp_path: Path) -> None:
    model = wrapped(hfscale.parallelize(stock(), ParallelConfig()), "module")
    optimizer = hfscale.create_optimizer(model, "adamw_torch", lr=0.1)
    assert any(model.offset is held for group in optimizer.param_groups for held in group["params"])
    with pytest.raises(
        ConfigError,
        match=r"would omit trainable parameters that were added later to the model or to a wrapper of it \(offset\)",
    ):
        hfscale.save_pretrained(model, tmp_path / "out")
    model.offset.requires_grad_(False)
    hfscale.save_pretrained(model, tmp_path / "out")


def refusals(layout: dict[str, Any], kind: str) -> list[str]:
    model = wrapped(hfscale.parallelize(stock(), ParallelConfig(**layout)), kind)
    rows = IDS.chunk(hfscale.batch_world(model))[hfscale.batch_rank(model)]
    words = []
    for call in (
        lambda: hfscale.train_step(model, {"input_ids": rows, "labels": rows}),
        lambda: hfscale.clip_grad_norm_(model, 1.0),
    ):
        with pytest.raises(ConfigError) as error:
            call()
        words.append(str(error.value))
    return words


@pytest.mark.parametrize("layout", [{"dp_shard_size": 2}, {"tp_size": 2}], ids=["shard2", "tp2"])
def test_it_is_refused_over_ranks(pools: Pools, layout: dict[str, Any]) -> None:
    for words in pools(2).run(refusals, layout, "module"):
        assert all("each rank would train its own" in each for each in words)


def stepped(layout: dict[str, Any], summed: bool) -> str:
    """What the first step of a plain loop says, whose optimizer holds the model's parameters and one around it."""
    model = hfscale.parallelize(stock(), ParallelConfig(**layout))
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    ids = IDS[hfscale.batch_rank(model) :: hfscale.batch_world(model)]
    (scale * model(input_ids=ids, labels=ids).loss).backward()
    if summed:
        dist.all_reduce(scale.grad)
    return refusal_of(optimizer.step)


@pytest.mark.parametrize("summed", [False, True])
def test_a_loop_that_lets_it_drift_is_refused(pools: Pools, summed: bool) -> None:
    expected = "accepted" if summed else "of which each rank would train its own"
    for words in pools(2).run(stepped, {"dp_replicate_size": 2}, summed):
        assert expected in words
