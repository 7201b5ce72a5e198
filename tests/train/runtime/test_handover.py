"""An optimizer that was made before its model is cut, or taken apart, trains what has taken its parameters' place."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import peft
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, default_data_collator

import hfscale
from hfscale import ParallelConfig
from hfscale.testing import RankPool

from ...refusals import refusal_of
from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
STEPS = 3


class Wrapper(torch.optim.Optimizer):
    """Steps by an optimizer of the same groups, and has no state itself, like many that look ahead or sharpen."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.inner = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
        self.param_groups = self.inner.param_groups
        self.defaults = self.inner.defaults

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp": ("llama", {"tp_size": 2}),
    "tp-sequence": ("qwen2", {"tp_size": 2, "sequence_parallel": True}),
    "shard": ("gpt2", {"dp_shard_size": 2}),
    "replicate": ("llama", {"dp_replicate_size": 2}),
    "stages": ("gpt2", {"pp_size": 2}),
    "context": ("llama", {"cp_size": 2}),
    "tp-shard": ("gpt2", {"tp_size": 2, "dp_shard_size": 2}),
    "stages-shard": ("qwen2", {"pp_size": 2, "dp_shard_size": 2}),
}
IDS = torch.randint(3, 67, (STEPS, 4, 8), generator=torch.Generator().manual_seed(3))
ROWS = [{"input_ids": ids, "labels": ids} for ids in IDS.reshape(-1, 8)]


def made(family: str) -> Any:
    torch.manual_seed(0)
    changes = {"tie_word_embeddings": True} if family == "qwen2" else {}
    return AutoModelForCausalLM.from_config(tiny(family, **changes), dtype=torch.float64).train()


def optimizer_of(model: nn.Module, kind: str) -> tuple[Any, Any]:
    """Two groups of their own rates, as a script makes them, with a schedule of both."""
    named = dict(model.named_parameters())
    slow = [name for name in named if "bias" in name or "norm" in name or "ln_" in name]
    groups: list[dict[str, Any]] = [
        {"params": [each for name, each in named.items() if name not in slow], "weight_decay": 0.1},
        {"params": [named[name] for name in slow], "lr": 3e-2},
    ]
    if kind == "sgd":
        made: Any = torch.optim.SGD(groups, lr=1e-1, momentum=0.9)
    elif kind == "wrapper":
        made = Wrapper(groups)
    else:
        made = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
    return made, torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.8**step)


def step(model: Any, optimizer: Any, schedule: Any, ids: Tensor) -> list[float]:
    ids = ids[hfscale.batch_rank(model) :: hfscale.batch_world(model)]
    loss = hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    norm = hfscale.clip_grad_norm_(model, 0.9)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    assert all(each.grad is None for each in model.parameters())
    return [float(loss), float(norm)]


def run(
    layout: dict[str, Any], family: str, kind: str, stepped: bool
) -> tuple[Any, dict[str, Tensor]]:
    """Make model and optimizer, perhaps with a state of a step, cut the model, and train it."""
    model = made(family)
    optimizer, schedule = optimizer_of(model, kind)
    if stepped:
        for parameter in model.parameters():
            parameter.grad = parameter.detach().sin()
        optimizer.step()  # its gradients stay, and count in the next step
    hfscale.parallelize(model, ParallelConfig(**layout))
    told = [step(model, optimizer, schedule, ids) for ids in IDS]
    return told, dict(hfscale.stream_weights(model))


@pytest.mark.daily(
    "adamw-stepped-tp-shard", "sgd-new-stages", "adamw-new-stages-shard", "sgd-stepped-tp-sequence",
    "wrapper-stepped-tp", "wrapper-stepped-stages",
)  # fmt: skip
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stepped", [False, True], ids=["new", "stepped"])
@pytest.mark.parametrize("kind", ["sgd", "adamw", "wrapper"])
def test_a_loop_trains_as_one_process(pools: Pools, case: str, stepped: bool, kind: str) -> None:
    family, layout = CASES[case]
    told, weights = run({}, family, kind, stepped)
    for numbers, found in pools(ParallelConfig(**layout).total_size).run(
        run, layout, family, kind, stepped
    ):
        torch.testing.assert_close(numbers, told, rtol=1e-9, atol=1e-9)
        for name, each in found.items():
            torch.testing.assert_close(each, weights[name], rtol=1e-8, atol=1e-9)


def trained(layout: dict[str, Any] | None, by: str, out: str) -> list[float]:
    """The losses and norms of a Trainer, or of a loop with an Accelerator; ``None`` for the stock classes."""
    model = made("llama").float()
    optimizer, schedule = optimizer_of(model, "adamw")
    if by == "accelerator":
        return looped(model, optimizer, schedule, layout)
    world = ParallelConfig(**layout or {}).batch_world
    kinds = {"trainer": (transformers.Trainer, hfscale.Trainer)}
    kinds["seq2seq"] = (transformers.Seq2SeqTrainer, hfscale.Seq2SeqTrainer)
    chosen: Any = kinds[by][layout is not None]
    arguments = (
        transformers.TrainingArguments if by == "trainer" else transformers.Seq2SeqTrainingArguments
    )
    trainer = chosen(
        model=model,
        args=arguments(
            out, per_device_train_batch_size=4 // world, num_train_epochs=1, logging_steps=1, save_strategy="no",
            report_to=[], disable_tqdm=True, use_cpu=True, max_grad_norm=0.9,
        ),
        train_dataset=ROWS,
        data_collator=default_data_collator,
        optimizers=(optimizer, schedule),
        **({} if layout is None else {"parallel": ParallelConfig(**layout)}),
    )  # fmt: skip
    trainer.train()
    return [
        row[key]
        for row in trainer.state.log_history
        if "loss" in row
        for key in ("loss", "grad_norm")
    ]


def looped(model: Any, optimizer: Any, schedule: Any, layout: dict[str, Any] | None) -> list[float]:
    AcceleratorState._reset_state(reset_partial_state=layout is not None)
    if layout is not None:
        hfscale.parallelize(model, ParallelConfig(**layout))
    kind: Any = accelerate.Accelerator if layout is None else hfscale.Accelerator
    accelerator = kind(cpu=True)
    told = []
    loader = DataLoader(ROWS, batch_size=4 // ParallelConfig(**layout or {}).batch_world)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.8 ** (step // accelerator.num_processes)
    )
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.9)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        told += [float(accelerator.reduce(loss.detach(), "mean")), float(norm)]
    return told


CALLERS = [
    (by, layout)
    for by in ("trainer", "seq2seq", "accelerator")
    for layout in ("dp_shard", "tp", "pp")
]
CALLERS.remove(("accelerator", "pp"))  # a plain call needs all layers


@pytest.mark.daily("trainer-dp_shard", "accelerator-dp_shard", "seq2seq-pp")
@pytest.mark.parametrize(("by", "axis"), CALLERS, ids=map("-".join, CALLERS))
def test_trainers_and_accelerators_train_as_stock(
    pools: Pools, axis: str, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected = trained(None, by, str(tmp_path))
    assert len({*expected}) == 2 * STEPS  # it trains
    for found in pools(2).run(trained, {f"{axis}_size": 2}, by, str(tmp_path)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def unseen(layout: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """The same loop where no optimizer is found in memory, so that it follows at its first step."""
    with mock.patch("hfscale.train.runtime.handover._let_all_follow"):
        return run(layout, "llama", "adamw", True)


def test_an_optimizer_follows_at_its_first_step(pools: Pools) -> None:
    told, _ = run({}, "llama", "adamw", True)
    for found, _ in pools(2).run(unseen, {"tp_size": 2}):
        torch.testing.assert_close(found, told, rtol=1e-9, atol=1e-9)


LORA = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")


def stepped_factors(model: Any) -> Any:
    """Statistics of rows and columns, which cannot be cut."""
    optimizer = transformers.Adafactor(
        model.parameters(), lr=1e-3, relative_step=False, scale_parameter=False
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def said(layout: dict[str, Any], out: str) -> dict[str, str]:
    """What the first step of optimizers says that cannot follow, and what a Trainer says."""
    parallel = ParallelConfig(**layout)
    told = {}
    model = hfscale.parallelize(made("llama"), parallel)
    early = {
        "frozen": torch.optim.SGD(model.parameters(), lr=0.1),
        "sharded": hfscale.create_optimizer(model, "sgd", lr=0.1),
    }
    adapted = hfscale.get_peft_model(model, LORA, seed=0)
    early["merged"] = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    for name in ("frozen", "sharded"):
        told[name] = refusal_of(early[name].step)
    hfscale.merge_and_unload(adapted, quiet=True)
    told["merged"] = refusal_of(early["merged"].step)
    whole = made("llama")
    factors = stepped_factors(whole)
    hfscale.parallelize(whole, parallel)
    told["factors"] = refusal_of(factors.step)
    hooked = made("llama")
    hooked.lm_head.weight.register_post_accumulate_grad_hook(lambda _: None)
    told["hook"] = refusal_of(lambda: hfscale.parallelize(hooked, parallel))
    strange = torch.optim.SGD(made("llama").parameters(), lr=0.1)
    args = transformers.TrainingArguments(out, use_cpu=True, report_to=[])
    told["strange"] = refusal_of(lambda: hfscale.Trainer(whole, args, optimizers=(strange, None)))
    told["prepared"] = refusal_of(lambda: hfscale.Accelerator(cpu=True).prepare(whole, strange))
    return told


@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"pp_size": 2}])
def test_what_cannot_follow_is_refused(
    pools: Pools, layout: dict[str, Any], tmp_path: Path
) -> None:
    for told in pools(2).run(said, layout, str(tmp_path)):
        assert "must hold parameters that train" in told["frozen"]
        assert "make the optimizer after hfscale.get_peft_model" in told["frozen"]
        assert "got one made before hfscale.get_peft_model" in told["sharded"]
        assert "lora" in told["merged"]
        assert "make the optimizer after hfscale.merge_and_unload" in told["merged"]
        assert "tp_size" not in layout or "which is (67, 32)" in told["factors"]
        assert "got one on lm_head.weight: register it after parallelize" in told["hook"]
        assert "none of which belongs to the model" in told["strange"]
        assert "none of which belongs to the model" in told["prepared"]
