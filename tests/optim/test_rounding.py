"""Weights in bfloat16 rounded by chance: right in the mean, and the same in every layout; states on the host."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hfscale
from hfscale import ConfigError, MemoryConfig, ParallelConfig
from hfscale.optim.stock import key_of, places_of, write_rounded
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.shards import local_tensor

from .cases import CONFIGS, OWN, build, make, run, state_bytes
from .test_update import LAYOUTS, ON

Pools = Callable[[int], RankPool]
NAMES = ("adamw_torch", "adamw_8bit", "lion_32bit", "sgd")


def test_the_mean_is_right() -> None:
    """A third of the way between two neighbours, a third of the entries go up; exact values stay; seeds differ."""
    value = 1.0
    step = 2**-7
    wide = torch.tensor([value, value + step / 3, -(value + 2 * step / 3), 0.0, 1e-20]).repeat(
        20_000, 1
    )
    places = [torch.arange(20_000) * 5, torch.arange(5)]

    def rounded(key: int) -> Tensor:
        share = torch.empty_like(wide, dtype=torch.bfloat16)
        write_rounded(share, wide, places, key)
        return share

    one = rounded(key_of(0, 1, "weight"))
    other = rounded(key_of(0, 2, "weight"))
    assert (one[:, 0] == 1).all()
    assert (one[:, 3] == 0).all()
    assert not torch.equal(one, other)
    for found in (one, other):
        assert {float(each) for each in found[:, 1].unique()} == {1.0, 1.0 + step}
        mean = found.double().mean(0)
        assert mean[1] == pytest.approx(1 + step / 3, abs=step * 0.02)
        assert mean[2] == pytest.approx(-(1 + 2 * step / 3), abs=step * 0.02)
        assert mean[4] == pytest.approx(1e-20, rel=1e-3)
    up = (one[:, 1] > 1).double() - 1 / 3
    again = (other[:, 1] > 1).double() - 1 / 3
    assert abs(float((up * again).mean())) < 0.01  # updates have nothing to do with each other
    assert abs(float((up[1:] * up[:-1]).mean())) < 0.01  # nor have neighbours
    odd = torch.tensor([float("inf"), float("-inf"), float("nan"), 3.4e38])
    share = torch.empty(4, dtype=torch.bfloat16)
    write_rounded(share, odd, [torch.arange(4)], 7)
    assert share[0] == float("inf")
    assert share[1] == float("-inf")
    assert share[2].isnan()


def test_small_updates_are_not_lost() -> None:
    """A hundred updates of a thousandth of the last bit's half."""
    moved = {}
    for rounding in (False, True):
        model = hfscale.from_config(CONFIGS["rows"](), dtype=torch.bfloat16, seed=1)
        weight = model.model.layers[0].mlp.up_proj.weight
        with torch.no_grad():
            weight.fill_(1.0)
        with pytest.warns(UserWarning, match="stalls") if not rounding else nullcontext():
            optimizer = hfscale.create_optimizer(
                model, "sgd", lr=1e-4, stochastic_rounding=rounding
            )
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        moved[rounding] = 1 - float(weight.detach().double().mean())
    assert moved[False] == 0
    assert moved[True] == pytest.approx(0.01, rel=0.05)


def trained(layout: dict[str, Any], kind: str, path: str) -> list[str]:
    """What differs from the stored weights, bit for bit."""
    stored = torch.load(path)
    apart = []
    for name in NAMES:
        model = build(kind, torch.bfloat16, ParallelConfig(**layout))
        run(model, kind, make(model, name, stochastic_rounding=True, rounding_seed=5), range(3))
        runtime = runtime_of(model)
        for planned, parameter in runtime.parameters():
            mine = local_tensor(parameter.detach())
            if not torch.equal(mine, planned.take(stored[name][planned.name], runtime.mesh.ranks)):
                apart.append(f"{name} {planned.name}")
    return apart


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    directory = tmp_path_factory.mktemp("rounded")

    def of(kind: str) -> str:
        path = directory / f"{kind}.pt"
        if not path.exists():
            found = {}
            for name in NAMES:
                model = build(kind, torch.bfloat16)
                run(
                    model,
                    kind,
                    make(model, name, stochastic_rounding=True, rounding_seed=5),
                    range(3),
                )
                found[name] = {n: p.detach().clone() for n, p in model.named_parameters()}
            torch.save(found, path)
        return str(path)

    return of


@pytest.mark.daily("ragged-tp2")
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("ragged", "tp2"),
        ("ragged", "shard4"),
        ("fused", "tp2, shard2"),
        ("fused", "pp2"),
        ("experts", "ep2, tp2"),
        ("rows", "tp4"),
    ],
)
def test_the_same_in_every_layout(
    pools: Pools, alone: Callable[[str], str], kind: str, layout: str
) -> None:
    """Bit for bit: fused projections in parts, empty shares, 8-bit states in blocks and whole."""
    assert layout in ON[kind]
    for apart in pools(ParallelConfig(**LAYOUTS[layout]).total_size).run(
        trained, LAYOUTS[layout], kind, alone(kind)
    ):
        assert apart == []


def test_places_are_those_in_the_whole_tensor() -> None:
    plan = hfscale.plan(CONFIGS["fused"](), ParallelConfig(tp_size=2, dp_shard_size=2))
    for planned in plan.parameters[:20]:
        whole = torch.arange(torch.Size(planned.shape).numel()).view(planned.shape)
        for ranks in ({"tp": 0, "dp_shard": 1}, {"tp": 1, "dp_shard": 0}):
            places = places_of(planned, ranks, torch.device("cpu"))
            expected = planned.take(whole, ranks)
            found = sum(
                part.view(*(-1 if d == dim else 1 for d in range(len(places))))
                for dim, part in enumerate(places)
            )
            assert torch.equal(torch.as_tensor(found), expected)


def on_host(
    layout: dict[str, Any], kind: str, name: str, dtype: torch.dtype, offload: bool, path: str
) -> list[Tensor]:
    """Weights after steps with the state on the host, or without; the second half of them resumed."""
    memory = MemoryConfig(offload_optimizer=offload)
    rounding = {"stochastic_rounding": True} if dtype == torch.bfloat16 else {}
    for begin in (0, 2):
        model = hfscale.from_config(
            CONFIGS[kind](), parallel=ParallelConfig(**layout), memory=memory, dtype=dtype, seed=2
        )
        optimizer = make(model, name, **rounding)
        if begin:
            hfscale.load_state(model, path, optimizer=optimizer)
        run(model, kind, optimizer, range(begin, begin + 2))
        assert optimizer.state_device == (torch.device("cpu") if offload or rounding else None)
        hfscale.save_state(model, path, optimizer=optimizer)
        options = {**OWN.get(name, {}), **rounding}
        estimated = hfscale.memory_estimate(model, name, optim_args=options).optimizer
        if kind == "rows" and not begin:  # of others, some have no gradient
            assert estimated == (0 if offload else state_bytes(optimizer))
    return [local_tensor(p.detach()) for p in model.parameters()]


@pytest.mark.daily("adamw_8bit-dtype2-rows-shard2", "adamw_torch_fused-dtype0-rows-tp2")
@pytest.mark.parametrize(
    ("kind", "layout"), [("rows", "tp2"), ("rows", "shard2"), ("rows", "pp2"), ("ragged", "tp2")]
)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("adamw_torch_fused", torch.float32),
        ("adamw_8bit", torch.float32),
        ("adamw_8bit", torch.bfloat16),
    ],
)
def test_states_on_the_host_change_nothing(
    pools: Pools, tmp_path: Path, kind: str, layout: str, name: str, dtype: torch.dtype
) -> None:
    """In blocks, and whole where shards are not whole blocks."""
    here, there = (
        pools(2).run(
            on_host, LAYOUTS[layout], kind, name, dtype, offload, str(tmp_path / f"{offload}")
        )
        for offload in (False, True)
    )
    for one, other in zip(here, there, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_what_does_not_fit_is_refused() -> None:
    model = hfscale.from_config(
        CONFIGS["rows"](), memory=MemoryConfig(offload_optimizer=True), dtype=torch.float32
    )
    ids = torch.ones(1, 4, dtype=torch.int64)
    hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    for name in ("adafactor", "muon"):
        with pytest.raises(
            ConfigError, match=r"offload_optimizer=True needs an optimizer .* use 'adamw_torch'"
        ):
            hfscale.create_optimizer(model, name, lr=1e-3)
    with pytest.raises(
        ConfigError, match="AdamW would keep its state on the device of the parameters"
    ):
        torch.optim.AdamW(model.parameters()).step()
    with pytest.raises(
        ConfigError, match="stochastic_rounding=True needs an optimizer that can update"
    ):
        hfscale.create_optimizer(
            build("rows", torch.bfloat16), "muon", lr=1e-3, stochastic_rounding=True
        )
    with pytest.raises(ConfigError, match="offload_optimizer='yes' is not a switch"):
        MemoryConfig(offload_optimizer="yes")  # type: ignore[arg-type]
