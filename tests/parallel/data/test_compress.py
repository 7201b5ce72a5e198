"""Gradients between replicas in 16 bits and by factors: against the formulas, in any layout, counted in bytes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import GradScalerKwargs
from torch import Tensor
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ConfigError, Float8Config, MemoryConfig, ParallelConfig
from hfscale.extras.powersgd.low_rank import PowerSGD, first_factor
from hfscale.parallel.data.gradient_compression import narrow_mean
from hfscale.testing import RankPool, count_traffic
from hfscale.testing.parity import ragged_batch
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.shards import local_tensor

from ...mixtures import qwen3_moe
from ...step.streams import lifetimes
from ...step.test_budgets import Launches
from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicate2": {"dp_replicate_size": 2},
    "shard2": {"dp_replicate_size": 2, "dp_shard_size": 2},
    "tp2": {"dp_replicate_size": 2, "tp_size": 2},
    "sequence": {"dp_replicate_size": 2, "tp_size": 2, "sequence_parallel": True},
    "1f1b": {"dp_replicate_size": 2, "pp_size": 2},
    "zbv": {"dp_replicate_size": 2, "pp_size": 2, "pipeline_schedule": "zbv"},
    "ep2": {"dp_replicate_size": 2, "dp_shard_size": 2, "ep_size": 2},
    "cp2": {"dp_replicate_size": 2, "cp_size": 2},
}
_QUICK = ("replicate2", "tp2", "1f1b")  # the axes by themselves; make test-all runs the rest
STEPS = 3
Shares = dict[str, Tensor]


def power_sgd(
    gradients: list[Tensor], errors: list[Tensor], factor: Tensor
) -> tuple[Tensor, list[Tensor], Tensor]:
    """One step of the paper's algorithm 1 over workers, in one process: the gradient, errors, the next factor."""
    wanted = [gradient + error for gradient, error in zip(gradients, errors, strict=True)]
    left = torch.linalg.qr(torch.stack([matrix @ factor for matrix in wanted]).mean(0))[0]
    right = torch.stack([matrix.T @ left for matrix in wanted]).mean(0)
    found = left @ right.T
    return found, [matrix - found for matrix in wanted], right


def compressed(rank: int) -> tuple[list[Tensor], dict[str, Any]]:
    """Gradients of several steps of a buffer of two matrices and a vector, by this rank's own numbers."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    group = dist.group.WORLD
    assert group is not None
    sizes = [(12, 10), (7,), (9, 2, 4)]
    hook = PowerSGD(group, sizes, rank, seed=3)
    found = []
    for step in range(STEPS):
        flat = torch.randn(12 * 10 + 7 + 9 * 8, generator=generator, dtype=torch.float64)
        if step == 2:  # a run that went on
            saved = hook.state()
            hook = PowerSGD(group, sizes, rank, seed=3)
            hook.put_state(saved, torch.device("cpu"))
        hook(flat)
        found.append(flat)
    partial = torch.full((5,), float(dist.get_rank()), dtype=torch.float64)
    hook(partial)  # not all have a gradient: the mean
    narrow = torch.full((5,), 1 / 3 + dist.get_rank(), dtype=torch.float32)
    narrow_mean(narrow, group, torch.bfloat16)
    return found, {"partial": partial, "narrow": narrow}


def test_factors_are_those_of_the_paper(pools: Pools) -> None:
    ranks = pools(2).run(compressed, 2)
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    factors = {0: first_factor(3, 0, 10, 2).double(), 2: first_factor(3, 2, 8, 2).double()}
    errors = {
        i: [torch.zeros(shape, dtype=torch.float64)] * 2
        for i, shape in ((0, (12, 10)), (2, (9, 8)))
    }
    for step in range(STEPS):
        flats = [
            torch.randn(12 * 10 + 7 + 9 * 8, generator=each, dtype=torch.float64)
            for each in generators
        ]
        parts = [flat.split([120, 7, 72]) for flat in flats]
        expected = [torch.empty(0)] * 3
        for i, shape in ((0, (12, 10)), (2, (9, 8))):
            expected[i], errors[i], factors[i] = power_sgd(
                [part[i].view(shape) for part in parts], errors[i], factors[i]
            )
        expected[1] = (parts[0][1] + parts[1][1]) / 2
        whole = torch.cat([part.reshape(-1) for part in expected])
        for found, _ in ranks:
            assert torch.allclose(found[step], whole, rtol=0, atol=1e-12)
    for found, other in ranks:
        assert torch.equal(found[-1], ranks[0][0][-1])
        assert (other["partial"] == 0.5).all()
        assert other["narrow"] == pytest.approx(torch.full((5,), 5 / 6).numpy(), rel=2**-8)


def _together() -> tuple[int, bool]:
    """How often a buffer's factors are made orthonormal, and whether that gives what each by itself gives."""
    group = dist.group.WORLD
    generator = torch.Generator().manual_seed(dist.get_rank())
    assert group is not None
    sizes = [(12, 10), (9, 8), (12, 7)]
    starts = (0, 120, 192)
    flat = torch.randn(276, generator=generator, dtype=torch.float64)
    pieces = [
        flat[start : start + size[0] * size[1]].clone()
        for start, size in zip(starts, sizes, strict=True)
    ]
    with Launches() as counted:
        PowerSGD(group, sizes, 2, seed=3)(flat)
    for number, (size, piece) in enumerate(zip(sizes, pieces, strict=True)):
        alone = PowerSGD(group, [size], 2, seed=0)
        alone._factors[0] = first_factor(3, number, size[1], 2).double()
        alone(piece)
    return counted.seen["aten.linalg_qr.default"], torch.equal(flat, torch.cat(pieces))


def test_matrices_of_one_height_are_made_orthonormal_at_once(pools: Pools) -> None:
    assert pools(2).run(_together) == [(2, True)] * 2


def _vector_in_16_bits() -> Tensor:
    group = dist.group.WORLD
    assert group is not None
    flat = torch.cat((torch.randn(120), torch.full((7,), 40000.0))).half()
    PowerSGD(group, [(12, 10), (7,)], 2, seed=0)(flat)
    return flat[120:]


def test_vectors_in_16_bits_are_divided_before_they_are_rounded(pools: Pools) -> None:
    """The sum of two is beyond float16, their mean is not."""
    assert all((vector == 40000).all() for vector in pools(2).run(_vector_in_16_bits))


def test_a_matrix_of_that_rank_is_exact(pools: Pools) -> None:
    for exact, narrow in pools(2).run(_of_low_rank):
        assert exact < 1e-12
        assert narrow < 2**-7


def _of_low_rank() -> tuple[float, float]:
    """How far the mean is off, in shares of its largest entry, in 64 and in 16 bits."""
    generator = torch.Generator().manual_seed(5)
    left, right = (torch.randn(20, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    own = (1 + dist.get_rank()) * left @ right.T
    group = dist.group.WORLD
    assert group is not None

    def off(dtype: torch.dtype) -> float:
        flat = own.reshape(-1).to(dtype, copy=True)
        PowerSGD(group, [(20, 20)], 2, seed=0)(flat)
        mean = 1.5 * left @ right.T
        return float((flat.view(20, 20) - mean).abs().max() / mean.abs().max())

    return off(torch.float64), off(torch.bfloat16)


def scaled(scales: list[float], overflows: int | None) -> list[Tensor]:
    """Means over replicas of gradients that come multiplied by ``scales``, divided again; one is infinite."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    group = dist.group.WORLD
    assert group is not None
    now = [1.0]
    hook = PowerSGD(group, [(12, 10)], 2, seed=3, unit=lambda: now[0])
    found = []
    for step, scale in enumerate(scales):
        now[0] = scale
        flat = (
            torch.full((120,), float("inf"))
            if step == overflows
            else torch.randn(120, generator=generator) * scale
        )
        hook(flat)
        found.append(flat / scale)
    return found


def test_errors_follow_the_loss_scale_and_keep_no_overflow(pools: Pools) -> None:
    plain = pools(2).run(scaled, [1.0] * 3, None)
    changing = pools(2).run(scaled, [1024.0, 64.0, 64.0, 128.0], 2)
    for wanted, found in zip(plain, changing, strict=True):
        assert not found.pop(2).isfinite().any()
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def overflowing(scale: float) -> list[dict[str, float]]:
    """What steps say that begin with such a loss scale."""
    model = hfscale.from_config(
        tiny("llama"),
        parallel=ParallelConfig(
            dp_replicate_size=2, gradient_compression="powersgd", powersgd_rank=2
        ),
        mixed_precision="fp16",
        loss_scaling=GradScalerKwargs(init_scale=scale, backoff_factor=2.0**-32),
        dtype=torch.float32,
    ).train()
    ids = torch.arange(24).view(2, 12)
    seen = []
    for _ in range(3):
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
        seen.append(hfscale.metrics(model))
    return seen


def test_a_step_that_overflows_is_not_remembered(pools: Pools) -> None:
    for seen in pools(2).run(overflowing, 2.0**40):
        assert [each["skipped_steps"] for each in seen] == [1, 1, 1]


def step_of(
    path: str, layout: dict[str, Any], kind: dict[str, Any], state: str
) -> tuple[Shares, Shares, int]:
    """This rank's shares before and after steps, and the bytes that it reduced in the last one."""

    def build() -> Any:
        return hfscale.from_pretrained(
            path,
            parallel=ParallelConfig(**layout, **kind),
            dtype=torch.float32,
            experts_implementation="eager",
        ).train()

    model = build()
    generator = torch.Generator().manual_seed(2)
    sent = 0
    start = shares(model)
    world = hfscale.batch_world(model)
    rank = hfscale.batch_rank(model)
    for number in range(STEPS):
        if state and number == 2:
            hfscale.save_state(model, state)
            model = build()
            hfscale.load_state(model, state)
        batches = [
            [ragged_batch(generator, 67, 2, 13, False) for _ in range(2)] for _ in range(world)
        ]
        with count_traffic() as counted:
            hfscale.train_step(model, batches[rank])
        sent = counted.payload["allreduce"]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.5 * parameter.grad
                    parameter.grad = None
    return start, shares(model), sent


def shares(model: Any) -> Shares:
    return {
        planned.name: local_tensor(p.detach()).clone()
        for planned, p in runtime_of(model).parameters()
    }


def apart(one: Shares, other: Shares) -> float:
    return float(sum((one[name] - other[name]).square().sum() for name in one)) ** 0.5


@pytest.mark.daily("replicate2")
@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=() if each in _QUICK else pytest.mark.slow) for each in LAYOUTS],
)
def test_training(pools: Pools, tmp_path: Path, layout: str) -> None:
    """16 bits differ by roundings, factors by less than the updates; a resumed run goes on bit by bit."""
    torch.manual_seed(0)
    config = qwen3_moe() if layout == "ep2" else tiny("llama", num_hidden_layers=4)
    AutoModelForCausalLM.from_config(config, experts_implementation="eager").save_pretrained(
        tmp_path
    )
    sizes = LAYOUTS[layout]
    pool = pools(ParallelConfig(**sizes).total_size)
    factors = {"gradient_compression": "powersgd", "powersgd_rank": 4}
    kinds = ({}, {"gradient_compression": "bf16"}, factors)
    runs = [pool.run(step_of, str(tmp_path), sizes, kind, "") for kind in kinds]
    resumed = pool.run(step_of, str(tmp_path), sizes, factors, str(tmp_path / "state"))
    for exact, narrow, few, again in zip(*runs, resumed, strict=True):
        assert apart(again[1], few[1]) == 0
        moved = apart(exact[0], exact[1])
        assert 0 < apart(exact[1], narrow[1]) < 2**-6 * moved
        assert 0 < apart(exact[1], few[1]) < 0.9 * moved
        if layout == "replicate2":
            assert few[2] < 0.6 * exact[2]
            assert narrow[2] < 0.51 * exact[2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gradient_compression": "bf16"}, "use dp_replicate_size=2 or more"),
        (
            {"gradient_compression": "int8", "dp_replicate_size": 2},
            "is unknown: use one of no, bf16, fp16, powersgd",
        ),
        ({"powersgd_rank": 2, "dp_replicate_size": 2}, "needs gradient_compression='powersgd'"),
        (
            {"gradient_compression": "powersgd", "powersgd_rank": 0, "dp_replicate_size": 2},
            "at least 1",
        ),
    ],
)
def test_what_does_not_fit(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**given)


def over_streams(layout: dict[str, Any], built: dict[str, Any]) -> tuple[int, list[str]]:
    """Pieces of memory that two steps, the second adding to gradients, used on several streams; what was wrong."""
    model = hfscale.from_config(tiny("llama"), parallel=ParallelConfig(**layout), **built).train()
    ids = torch.arange(24).view(2, 12)
    with lifetimes() as seen:
        for _ in range(2):
            hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    return seen.crossed, seen.faults


def test_offloaded_activations_live_until_their_stream_is_done() -> None:
    memory = MemoryConfig(offload_activations="64")
    crossed, faults = over_streams({}, {"dtype": torch.float32, "memory": memory})
    assert crossed
    assert not faults


@pytest.mark.daily("powersgd", "eight bits")
@pytest.mark.parametrize("kind", ["bf16", "powersgd", "no", "eight bits"])
def test_buffers_live_until_their_streams_are_done(pools: Pools, kind: str) -> None:
    """FSDP2 runs hooks on another stream than that which makes their buffers, and gives these back behind its back."""
    replicated = {
        "dp_replicate_size": 2,
        **({"gradient_compression": kind} if kind != "no" else {}),
    }
    layout = {"dp_shard_size": 2} if kind == "eight bits" else replicated
    # Reduced in 32 bits: gradients are no views of it.
    narrow = {
        "dtype": torch.bfloat16,
        "mixed_precision": "bf16",
    }
    offloaded = {"dtype": torch.float32, "memory": MemoryConfig(offload_parameters=True)}
    eight = {
        "dtype": torch.float32,
        "mixed_precision": "fp8",
        "float8": Float8Config(fp8_all_gather=True),
    }
    for built in (
        (eight,) if kind == "eight bits" else (narrow, {"dtype": torch.bfloat16}, offloaded)
    ):
        for crossed, faults in pools(2).run(over_streams, layout, built):
            assert crossed
            assert not faults
