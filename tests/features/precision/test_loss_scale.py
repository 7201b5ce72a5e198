"""float16: one scale and one decision over all ranks, those of torch's GradScaler in one process."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import GradScalerKwargs
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ConfigError, MemoryConfig, ParallelConfig, RoutingConfig
from hfscale._compat.transformers.experts import use_eager_experts
from hfscale.testing import RankPool
from hfscale.testing.parity import ragged_batch
from hfscale.train.runtime import Part, Runtime, runtime_of
from hfscale.train.runtime.shards import local_tensor

from ...layouts import named
from ...mixtures import qwen3_moe
from ...sweeps import cases
from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
LAYOUTS: dict[str, dict[str, Any]] = {
    **named("one", "tp2", "sequence", "1f1b", "zbv", "shard2", "replicate2", "cp2"),
    "pp2, tp2": {"pp_size": 2, "tp_size": 2},
    "pp2, shard2": {"pp_size": 2, "dp_shard_size": 2},
}
OVERFLOWS = 2.0**22
FITS = 2.0**14
# FSDP2 sums weights' gradients over tokens in 16 bits.
DATA = (
    "shard2",
    "replicate2",
    "cp2",
    "pp2, shard2",
)
STEPS = 8


def config(tied: bool = False) -> Any:
    return tiny("llama", num_hidden_layers=4, tie_word_embeddings=tied)


def batches(world: int) -> list[list[list[dict[str, Tensor]]]]:
    """``[step][distinct batch][microbatch]``: the same four microbatches whatever the layout."""
    generator = torch.Generator().manual_seed(4)
    steps = [
        [ragged_batch(generator, 67, 2, length, False) for length in (13, 8, 13, 8)]
        for _ in range(STEPS)
    ]
    return [[step[rank::world] for rank in range(world)] for step in steps]


def reference(path: str, scale: float) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses and scales of one process of stock code, and its weights at the end."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
    losses = []
    scales = []
    for (microbatches,) in batches(1):
        labels = [int((each["labels"][:, 1:] != -100).sum()) for each in microbatches]
        total = 0.0
        for each, count in zip(microbatches, labels, strict=True):
            with torch.autocast("cpu", torch.float16):
                loss = model(**each).loss * count / sum(labels)
            scaler.scale(loss).backward()
            total += float(loss.detach())
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(total)
        scales.append(scaler.get_scale())
    return losses, scales, {name: value.clone() for name, value in model.state_dict().items()}


def trained(
    path: str, layout: dict[str, Any], scale: float
) -> tuple[list[float], list[dict[str, float]], float]:
    """Losses and metrics of a layout, and the largest difference of its weights from the reference's."""
    model = hfscale.from_pretrained(
        path,
        parallel=ParallelConfig(**layout),
        mixed_precision="fp16",
        loss_scaling=GradScalerKwargs(init_scale=scale, growth_interval=1000),
        dtype=torch.float32,
    )
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    seen = []
    for step in batches(hfscale.batch_world(model)):
        losses.append(float(hfscale.train_step(model, step[hfscale.batch_rank(model)])))
        seen.append(hfscale.metrics(model))
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert bool(seen[-1]["step_was_skipped"]) == (not gradients)
        assert all(torch.isfinite(local_tensor(gradient)).all() for gradient in gradients)
        hfscale.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    runtime = runtime_of(model)
    expected = torch.load(Path(path) / f"end {scale}.pt")
    apart = max(
        float(
            (local_tensor(p.detach()) - planned.take(expected[planned.name], runtime.mesh.ranks))
            .abs()
            .max()
        )
        for planned, p in runtime.parameters()
        if local_tensor(p).numel()
    )
    return losses, seen, apart


@pytest.fixture(
    scope="module",
    params=[False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["untied", "tied"],
)
def start(request: pytest.FixtureRequest) -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config(request.param)).save_pretrained(directory)
        found = {}
        for scale in (OVERFLOWS, FITS):
            *found[scale], weights = reference(directory, scale)
            torch.save(weights, Path(directory) / f"end {scale}.pt")
        yield directory, found


def run(
    pools: Pools, layout: dict[str, Any], function: Callable[..., Any], *given: Any
) -> list[Any]:
    size = ParallelConfig(**layout).total_size
    return pools(size).run(function, *given) if size > 1 else [function(*given)]


@pytest.mark.daily("untied-zbv")
@pytest.mark.parametrize(
    "layout",
    cases(LAYOUTS, daily=LAYOUTS.keys() - {"tp2", "1f1b", "replicate2", "pp2, tp2", "shard2"}),
)
def test_steps_are_those_of_a_grad_scaler(pools: Pools, start: Any, layout: str) -> None:
    """The first steps overflow, and change nothing; then it trains. Over data ranks gradients overflow a little earlier
    than in one process: these begin where nothing does.
    """
    path, known = start
    scale = FITS if layout in DATA else OVERFLOWS
    losses, scales = known[scale]
    skipped = sum(after < before for before, after in zip([scale, *scales], scales, strict=False))
    assert skipped == 0 if layout in DATA else 2 <= skipped <= STEPS - 3
    for found, seen, apart in run(pools, LAYOUTS[layout], trained, path, LAYOUTS[layout], scale):
        assert [each["loss_scale"] for each in seen] == scales
        assert seen[-1]["skipped_steps"] == skipped
        assert found == pytest.approx(losses, rel=1e-3)
        assert apart < 2e-3


EXACT: dict[str, dict[str, Any]] = {
    **{name: LAYOUTS[name] for name in ("one", "tp2", "sequence", "1f1b", "zbv", "pp2, tp2")},
    "ep2, tp2": {"ep_size": 2, "tp_size": 2, "dp_shard_size": 1},
    "ep2, pp2": {"ep_size": 2, "tp_size": 2, "pp_size": 2, "dp_shard_size": 1},
}


def gradients_of(layout: dict[str, Any], mixed: str, again: str | None) -> list[Tensor]:
    """In float64, which autocast leaves alone, so that nothing but the scaling is left."""
    routed = "ep_size" in layout
    model = hfscale.from_config(
        qwen3_moe(num_hidden_layers=4) if routed else config(tied=True),
        parallel=ParallelConfig(**layout),
        mixed_precision=mixed,
        routing=RoutingConfig(balance_loss=0.1, z_loss=0.1) if routed else None,
        memory=MemoryConfig(recompute=again) if again else None,
        peft_config=None if again else LoraConfig(r=3, target_modules=["q_proj", "o_proj"]),
        dtype=torch.float64,
    )
    use_eager_experts(model.train())
    for _ in range(2):  # gradients add up
        hfscale.train_step(model, batches(1)[0][0])
    return [p.grad for p in model.parameters() if p.requires_grad]


@pytest.mark.daily("zbv")
@pytest.mark.parametrize(
    "layout", cases(EXACT, daily=EXACT.keys() - {"sequence", "pp2, tp2", "ep2, tp2", "1f1b"})
)
def test_gradients_are_true(pools: Pools, layout: str) -> None:
    """Every factor on the way is a power of two."""
    for again in (None, "full"):
        plain, scaled = (
            run(pools, EXACT[layout], gradients_of, EXACT[layout], mixed, again)
            for mixed in ("no", "fp16")
        )
        for one, other in zip(plain, scaled, strict=True):
            largest = max(float(gradient.abs().max()) for gradient in one)
            assert largest > 1e-4
            assert all(
                torch.allclose(a, b, rtol=0, atol=1e-14 * largest)
                for a, b in zip(one, other, strict=True)
            )


class Poison(Part):
    """An overflow on one rank, in some steps."""

    def __init__(self, steps: set[int]) -> None:
        self._steps = steps

    @contextmanager
    def around_gradients(self, runtime: Runtime) -> Iterator[None]:
        yield
        last = runtime.mesh.layout.total_size - 1
        if (
            dist.get_rank() if dist.is_initialized() else 0
        ) == last and runtime.steps in self._steps:
            gradient = next(p.grad for _, p in reversed(runtime.parameters()) if p.grad is not None)
            local_tensor(gradient).view(-1)[0] = float("inf")


def poisoned(path: str, layout: dict[str, Any], name: str) -> list[tuple[dict[str, float], bool]]:
    """After every step, the metrics, and whether weights and state were left as they were."""

    def build() -> tuple[Any, Any]:
        model = hfscale.from_pretrained(
            path,
            parallel=ParallelConfig(**layout),
            mixed_precision="fp16",
            loss_scaling=GradScalerKwargs(init_scale=1024.0, growth_interval=2),
            dtype=torch.float32,
        )
        optimizer = hfscale.create_optimizer(model.train(), name, lr=0.01, weight_decay=0.1)
        runtime = runtime_of(model)
        runtime.parts = (*runtime.parts, Poison({3, 4, 7}))
        return model, optimizer

    model, optimizer = build()
    found = []
    for number, step in enumerate(batches(hfscale.batch_world(model))):
        if number == 6:  # the scale is about to grow
            hfscale.save_state(model, f"{path}/state", optimizer=optimizer)
            model, optimizer = build()
            hfscale.load_state(model, f"{path}/state", optimizer=optimizer)
            runtime_of(model).steps = number
        before = [local_tensor(p.detach()).clone() for p in model.parameters()]
        hfscale.train_step(model, step[hfscale.batch_rank(model)])
        optimizer.step()
        optimizer.zero_grad()
        same = all(
            torch.equal(a, local_tensor(p.detach()))
            for a, p in zip(before, model.parameters(), strict=True)
        )
        found.append((hfscale.metrics(model), same))
    return found


@pytest.mark.daily("zbv-adamw_torch")
@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("tp2", "adamw_8bit"),
        ("zbv", "adamw_torch"),
        ("shard2", "adafactor"),
        ("pp2, tp2", "muon"),
        ("replicate2", "sgd"),
        pytest.param("cp2", "adamw_torch_fused", marks=pytest.mark.slow),
        ("one", "adamw_torch"),
    ],
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    pools: Pools, tmp_path: Path, layout: str, name: str
) -> None:
    """With any optimizer; and a resumed run goes on with the scale."""
    AutoModelForCausalLM.from_config(config(tied=True)).save_pretrained(tmp_path)
    # Grows at 2 and 6; overflows at 3, 4, 7.
    scales = [
        1024.0,
        2048.0,
        1024.0,
        512.0,
        512.0,
        1024.0,
        512.0,
        512.0,
    ]
    for found in run(pools, LAYOUTS[layout], poisoned, str(tmp_path), LAYOUTS[layout], name):
        assert [metrics["loss_scale"] for metrics, _ in found] == scales
        assert [same for _, same in found] == [
            number in (3, 4, 7) for number in range(1, STEPS + 1)
        ]
        assert found[-1][0]["skipped_steps"] == 3


def added(path: str, layout: dict[str, Any], to_none: bool) -> list[tuple[bool, dict[str, float]]]:
    """After every step of two calls, whether weights were left as they were, and the metrics."""
    model = hfscale.from_pretrained(
        path,
        parallel=ParallelConfig(**layout),
        mixed_precision="fp16",
        loss_scaling=GradScalerKwargs(init_scale=1024.0, growth_interval=2),
        dtype=torch.float32,
    )
    optimizer = hfscale.create_optimizer(model.train(), "sgd", lr=0.1)
    runtime = runtime_of(model)
    # The first call of its step, the second, both, and the first after a state was loaded.
    runtime.parts = (*runtime.parts, Poison({5, 8, 9, 10, 15}))
    found = []
    for number in range(8):
        if number == 7:
            hfscale.save_state(model, f"{path}/state", optimizer=optimizer)
            hfscale.load_state(model, f"{path}/state", optimizer=optimizer)
        before = [local_tensor(p.detach()).clone() for p in model.parameters()]
        for step in batches(hfscale.batch_world(model))[:2]:
            hfscale.train_step(model, step[hfscale.batch_rank(model)])
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        after = [local_tensor(p.detach()) for p in model.parameters()]
        found.append((all(map(torch.equal, before, after)), hfscale.metrics(model)))
    return found


@pytest.mark.parametrize(
    ("layout", "to_none"), [("tp2", True), ("zbv", True), ("shard2", False), ("one", False)]
)
def test_a_step_of_several_calls_is_skipped_as_a_whole(
    pools: Pools, tmp_path: Path, layout: str, to_none: bool
) -> None:
    """As by a scaler, whose gradients stay infinite until the step: whichever call overflowed, and once for all."""
    AutoModelForCausalLM.from_config(config()).save_pretrained(tmp_path)
    skipped = [False, False, True, True, True, False, False, True]
    scales = [1024.0, 2048.0, 1024.0, 512.0, 256.0, 256.0, 512.0, 256.0]
    for found in run(pools, LAYOUTS[layout], added, str(tmp_path), LAYOUTS[layout], to_none):
        assert [same for same, _ in found] == skipped
        assert [bool(seen["step_was_skipped"]) for _, seen in found] == skipped
        assert [seen["loss_scale"] for _, seen in found] == scales
        assert found[-1][1]["skipped_steps"] == sum(skipped)


def test_losses_that_nobody_scales_are_refused() -> None:
    model = hfscale.from_config(config(), mixed_precision="fp16", dtype=torch.float32)
    ids = torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(
        ConfigError, match=r"outside of hfscale\.train_step, which alone scales the loss"
    ):
        model(input_ids=ids, labels=ids)
    with torch.no_grad():
        assert model(input_ids=ids).logits.dtype == torch.float16
    model.eval()
    assert model(input_ids=ids).logits.shape == (1, 4, 67)
    assert hfscale.metrics(hfscale.from_config(config())) == {}


@pytest.mark.parametrize(
    ("given", "layout", "message"),
    [
        ({"loss_scaling": GradScalerKwargs()}, {}, "needs mixed_precision='fp16', got 'no'"),
        (
            {"mixed_precision": "fp16", "loss_scaling": {"init_scale": 2}},
            {},
            "must be an accelerate.GradScalerKwargs, got",
        ),
        (
            {"mixed_precision": "fp16", "loss_scaling": GradScalerKwargs(growth_factor=0.5)},
            {},
            "growth_factor above 1",
        ),
        (
            {"mixed_precision": "fp16", "loss_scaling": GradScalerKwargs(enabled=False)},
            {},
            "and enabled=True, got",
        ),
        (
            {"mixed_precision": "fp4"},
            {},
            "is unknown: did you mean 'fp8'. use one of no, bf16, bf16_params, fp8, fp16",
        ),
    ],
)
def test_what_does_not_fit(given: dict[str, Any], layout: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hfscale.from_config(config(), parallel=ParallelConfig(**layout), **given)
