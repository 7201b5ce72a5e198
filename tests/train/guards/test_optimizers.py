"""Optimizers that look at whole tensors are refused over parts of them; those that treat entries one by one are not."""

import warnings
from collections.abc import Callable
from typing import Any

import bitsandbytes
import pytest
import torch
import transformers
from torch import nn
from torch.torch_version import TorchVersion

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale.testing import RankPool

from ...tiny_models import tiny

Pools = Callable[[int], RankPool]


class Own(torch.optim.Optimizer):
    """Of a kind: ``sign``, a ``norm`` of each tensor (LARS), of ``all`` tensors together, or with ``noise``."""

    def __init__(self, params: Any, lr: float = 0.1, kind: str = "sign") -> None:
        super().__init__(params, {"lr": lr, "kind": kind})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        kind = self.defaults["kind"]
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        together = sum(float(p.grad.square().sum()) for p in held) ** 0.5
        for p in held:
            update = {
                "sign": lambda p: p.grad.sign(),
                "norm": lambda p: p.grad * p.norm() / p.grad.norm(),
                "all": lambda p: p.grad / together,
                "noise": lambda p: p.grad + torch.randn_like(p),
            }[kind](p)
            p.sub_(update * self.defaults["lr"])


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


def vectors(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 1]


MAKE: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, amsgrad=True),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "bitsandbytes AdamW8bit": lambda m: bitsandbytes.optim.AdamW8bit(m.parameters(), lr=0.1),
    "sign": lambda m: Own(m.parameters()),
    "noise": lambda m: Own(m.parameters(), kind="noise"),
    "Adafactor of vectors": lambda m: torch.optim.Adafactor(vectors(m)),
    "hfscale's adafactor": lambda m: hfscale.create_optimizer(m, "adafactor", lr=0.1),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "transformers Adafactor": lambda m: transformers.Adafactor(m.parameters()),
    "Muon": lambda m: torch.optim.Muon(matrices(m)),
    "norm": lambda m: Own(m.parameters(), kind="norm"),
    "bitsandbytes LAMB": lambda m: bitsandbytes.optim.LAMB(m.parameters(), lr=0.1),
    "all": lambda m: Own(m.parameters(), kind="all"),
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.1),
}
OVER_SHARDS = {
    "Adafactor",
    "transformers Adafactor",
    "LBFGS",
    "bitsandbytes AdamW8bit",
    "bitsandbytes LAMB",
}
if TorchVersion(torch.__version__) < (2, 15):  # since then DTensor has the operator that it lacked
    OVER_SHARDS.add("Rprop")
WHOLE = {"Adafactor", "transformers Adafactor", "Muon", "norm", "bitsandbytes LAMB"}
TOGETHER = {"all", "LBFGS"}


def refused(layout: dict[str, int]) -> dict[str, str]:
    """What the first step says; a trial leaves the random streams as they are."""
    said = {}
    for name, make in MAKE.items():
        model = hfscale.from_config(tiny("llama"), parallel=ParallelConfig(**layout)).train()
        optimizer = make(model)
        ids = torch.arange(12).reshape(2, 6)
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
        before = torch.random.get_rng_state()
        try:
            optimizer.step(*([lambda: torch.zeros(())] if name == "LBFGS" else []))
        except ConfigError as error:
            said[name] = str(error)
        if name != "noise":
            assert torch.equal(torch.random.get_rng_state(), before)
    return said


@pytest.mark.daily("layout2-expected2", "layout0-expected0")
@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"tp_size": 2}, WHOLE | TOGETHER),
        ({"pp_size": 2}, TOGETHER),
        ({"dp_shard_size": 2}, OVER_SHARDS),
        ({"dp_replicate_size": 1}, set()),
    ],
)
def test_a_first_step(pools: Pools, layout: dict[str, int], expected: set[str]) -> None:
    for said in pools(max(layout.values())).run(refused, layout):
        assert set(said) == expected
        assert all("create_optimizer" in each for each in said.values())


def _told_of_blocks(layout: dict[str, int], hidden: int, name: str) -> list[str]:
    """Return the warnings of a step of one of bitsandbytes' optimizers."""
    config = tiny("llama", hidden_size=hidden, intermediate_size=2 * hidden)
    model = hfscale.from_config(config, parallel=ParallelConfig(**layout)).train()
    trained = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    if name == "ours":
        optimizer: Any = hfscale.create_optimizer(model, "adamw_8bit", lr=0.1)
    else:
        optimizer = getattr(bitsandbytes.optim, name)(trained, lr=0.1)
    ids = torch.arange(12).reshape(2, 6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            hfscale.train_step(model, {"input_ids": ids, "labels": ids})
            optimizer.step()
    return [str(each.message) for each in caught if "one process by rounding" in str(each.message)]


@pytest.mark.parametrize(
    ("name", "hidden", "layout", "told"),
    [
        ("AdamW8bit", 64, {"tp_size": 2}, True),
        ("PagedLion8bit", 64, {"tp_size": 2}, True),
        ("AdamW8bit", 512, {"tp_size": 2}, False),  # whole blocks
        ("AdamW", 64, {"tp_size": 2}, False),  # in 32 bits
        ("ours", 64, {"tp_size": 2}, False),
        ("AdamW8bit", 64, {"pp_size": 2, "num_microbatches": 2}, False),
    ],
)
def test_states_whose_blocks_are_those_of_shards_are_told(
    pools: Pools, name: str, hidden: int, layout: dict[str, int], told: bool
) -> None:
    first, second = pools(2).run(_told_of_blocks, layout, hidden, name)
    assert len(first) == told
    assert second == []
