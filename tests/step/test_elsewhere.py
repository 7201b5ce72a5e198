"""Whole steps on a device that is neither the CPU nor CUDA's compute what they compute on the CPU."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import hfscale
from hfscale import MemoryConfig, ParallelConfig
from hfscale.testing import RankPool
from hfscale.train.runtime import local_tensor, runtime_of
from hfscale.train.step import _divisor

from ..layouts import LAYOUTS
from ..mixtures import qwen3_moe
from ..sweeps import cases
from ..tiny_models import tiny
from .elsewhere import NAME, elsewhere, register

Found = dict[str, Tensor]
Started = Callable[[int], RankPool]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"mixed_precision": "bf16", "dtype": torch.float32},
    "fp16": {"mixed_precision": "fp16", "dtype": torch.float32},
    "recompute": {"memory": MemoryConfig(recompute="full")},
    "compressed": {"memory": MemoryConfig(compress_activations=True)},
    "adafactor": {"optimizer": "adafactor"},
    "muon": {"optimizer": "muon"},
    "offload_optimizer": {"memory": MemoryConfig(offload_optimizer=True)},
    "rounding": {"dtype": torch.bfloat16, "stochastic_rounding": True},
    "packed": {"packed": True},
    "lora": {"lora": True},
}
CASES = [("one", option) for option in OPTIONS] + [
    (layout, option)
    for layout in LAYOUTS
    for option in ("plain", "bf16", "fp16")
    if layout != "one"
]
CASES.remove(("pipedream", "fp16"))  # which is refused
DAILY = [("one", "fp16"), ("one", "lora"), ("one", "offload_optimizer")]
DAILY += [("tp2", "fp16"), ("1f1b", "bf16"), ("shard2", "fp16"), ("cp2", "plain")]


@pytest.fixture(scope="module")
def started() -> Iterator[Started]:
    """Processes that have the device: it stays with them for life."""
    made = dict[int, RankPool]()
    yield lambda world: made.setdefault(world, RankPool(world, backend=register))
    for each in made.values():
        each.close()


def _steps(layout: ParallelConfig, mixture: bool, options: dict[str, Any]) -> Found:
    config = (
        qwen3_moe(num_hidden_layers=2)
        if mixture
        else tiny("llama", num_hidden_layers=2 * layout.pp_size)
    )
    given = {"dtype": torch.float64, **options}
    packed = given.pop("packed", False)
    lora = given.pop("lora", False)
    optimizer = given.pop("optimizer", "adamw_torch" if given["dtype"] == torch.float64 else "sgd")
    rounding = given.pop("stochastic_rounding", False)
    torch.manual_seed(0)
    model = hfscale.from_config(config, parallel=layout, **given)
    if lora:
        from peft import LoraConfig

        model = hfscale.get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"]))
    model.train()
    made = hfscale.create_optimizer(
        model, optimizer, lr=0.01, **({"stochastic_rounding": True} if rounding else {})
    )
    generator = torch.Generator().manual_seed(hfscale.batch_rank(model))
    found: Found = {}
    for step in range(2):
        ids = torch.randint(3, 60, (2, 2, 12), generator=generator)
        batch = [{"input_ids": one, "labels": one} for one in ids]
        for each in batch if packed else []:
            each["position_ids"] = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
        found[f"loss {step}"] = hfscale.train_step(model, batch)
        found[f"norm {step}"] = hfscale.clip_grad_norm_(model, 0.1)
        for planned, parameter in runtime_of(model).parameters():
            if parameter.grad is not None:
                found[f"{planned.name} {step}"] = local_tensor(parameter.grad).clone()
        made.step()
        made.zero_grad()
    found |= {
        planned.name: local_tensor(p.detach()) for planned, p in runtime_of(model).parameters()
    }
    found["evaluated"] = hfscale.eval_step(model, batch)
    return found


def _twice(layout: ParallelConfig, mixture: bool, options: dict[str, Any]) -> list[str]:
    expected = _steps(layout, mixture, options)
    with elsewhere():
        found = _steps(layout, mixture, options)
        strange = [
            f"{name} is on {tensor.device}"
            for name, tensor in found.items()
            if tensor.device.type != NAME
        ]
        found = {name: tensor.cpu() for name, tensor in found.items()}
    strange += [f"{name} is missing" for name in found.keys() ^ expected.keys()]
    tolerance = 1e-12 if options.get("dtype", torch.float64) == torch.float64 else 0.02
    strange += [
        f"{name}: {float((found[name].double() - expected[name].double()).abs().max())}"
        for name in found.keys() & expected.keys()
        if not torch.allclose(
            found[name].double(),
            expected[name].double(),
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
        )
    ]
    return strange


@pytest.mark.daily("shard2-fp16", "1f1b-bf16")
@pytest.mark.parametrize(("layout", "option"), cases(CASES, daily=DAILY))
def test_steps_compute_what_they_compute_on_the_cpu(
    started: Started, layout: str, option: str
) -> None:
    parallel = ParallelConfig(**LAYOUTS[layout])
    given = (parallel, "ep2" in layout, OPTIONS[option])
    assert started(parallel.total_size).run(_twice, *given) == [[]] * parallel.total_size


def _divisors() -> list[float]:
    with elsewhere() as device:
        given = ((5.0, True), (0.0, False), (0.0, True), (-1.0, False), (torch.inf, False))
        count = torch.tensor(7, device=device)
        return [
            float(_divisor(torch.tensor([each], device=device), count, alone))
            for each, alone in given
        ]


def test_divisors_that_the_host_does_not_see(started: Started) -> None:
    """What it would refuse is nan."""
    assert started(1).run(_divisors) == [
        pytest.approx([5, 1, torch.nan, torch.nan, torch.nan], nan_ok=True)
    ]


def _mixes() -> list[str]:
    heard = []
    with elsewhere() as device:
        x = torch.ones(3, device=device)
        for mix in (lambda: x + torch.ones(3), lambda: torch._foreach_mul_([x], torch.tensor(2.0))):
            try:
                mix()
            except RuntimeError as error:
                heard.append(str(error))
    return heard


def test_a_mixture_of_devices_is_heard_of(started: Started) -> None:
    heard = started(1).run(_mixes)[0]
    assert [NAME in each for each in heard] == [True, True]
