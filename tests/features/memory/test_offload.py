"""What waits on the host comes back as it was, in any layout; and how many bytes went there is a formula."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hfscale
from hfscale import ConfigError, MemoryConfig, ParallelConfig, PlanError
from hfscale._compat.torch_fsdp import managed_places
from hfscale.testing import RankPool, assert_layout_equal
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.shards import local_tensor

from ...mixtures import EAGER, qwen3_moe
from ...sweeps import pairs
from ...tiny_models import tiny
from ..quantization.models import save, wide
from .test_recompute import HIDDEN, LAYOUTS, ROTARY, TOKENS, case_of, gradients, kept

Pools = Callable[[int], RankPool]
WAYS: dict[str, dict[str, Any]] = {
    "activations": {"offload_activations": "64"},
    "inputs": {"offload_activations": "64", "recompute": "full"},
    "scores": {"offload_activations": "1KB", "recompute": "selective"},
    "parameters": {"offload_parameters": True},
    "all": {"offload_activations": "64", "offload_parameters": True, "recompute": 2},
}
DATA = [name for name, layout in LAYOUTS.items() if ParallelConfig(**layout).data_world > 1]


@pytest.mark.daily("shard2-all", "zbv-activations")
@pytest.mark.parametrize(
    ("layout", "way"),
    [
        case
        for case in pairs(
            LAYOUTS,
            WAYS,
            daily=[
                *((layout, "activations") for layout in ("zbv", "ep2", "lora, sequence")),
                *((layout, "inputs") for layout in ("1f1b", "ep2, tp2")),
                *((layout, "parameters") for layout in ("replicate2", "cp2", "lora, shard2")),
                ("shard2", "all"),
                ("regather", "activations"),
            ],
        )
        if (case.values[1] not in ("parameters", "all") or case.values[0] in DATA)
        and case.values != ("cp2", "scores")
    ],
)
def test_equal_to_one_process(pools: Pools, layout: str, way: str) -> None:
    parallel = ParallelConfig(**LAYOUTS[layout])
    case = case_of(layout, "selective" if way == "scores" else "full")
    case.memory = MemoryConfig(**WAYS[way])
    assert_layout_equal(
        case, parallel, pools(parallel.total_size) if parallel.total_size > 1 else None
    )


def plainly_held() -> list[str]:
    """Parameters that nobody brings from the host to the device that computes."""
    config = qwen3_moe(num_hidden_layers=2)
    memory = MemoryConfig(offload_parameters=True)
    model = hfscale.from_config(config, parallel=ParallelConfig(ep_size=2), memory=memory, **EAGER)
    managed = {id(place.module._parameters.get(place.name)) for place in managed_places(model)}
    return [name for name, parameter in model.named_parameters() if id(parameter) not in managed]


def test_experts_of_one_rank_alone_are_copied_to_the_device_too(pools: Pools) -> None:
    for names in pools(2).run(plainly_held):
        assert not names


PIPELINED: dict[str, Any] = {"pp_size": 2, "dp_shard_size": 2}


@pytest.mark.daily("1f1b")
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_shards_on_the_host_under_stages(pools: Pools, schedule: str) -> None:
    case = case_of("shard2", "full")
    case.memory = MemoryConfig(**WAYS["all"])
    assert_layout_equal(case, ParallelConfig(**PIPELINED, pipeline_schedule=schedule), pools(4))


def copied(layout: dict[str, Any], memory: MemoryConfig) -> tuple[float, int, list[str]]:
    """Bytes that a step copied, the estimate of what stays, and its notes."""
    config = tiny("llama", num_hidden_layers=4)
    model = hfscale.from_config(
        config,
        parallel=ParallelConfig(**layout),
        memory=memory,
        attn_implementation="sdpa",
        dtype=torch.float32,
    )
    ids = torch.randint(3, 60, (4, 32), generator=torch.Generator().manual_seed(0))
    hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    estimated = hfscale.memory_estimate(model, tokens=TOKENS)
    return (
        hfscale.metrics(model)["offloaded_activation_bytes"],
        estimated.activations,
        list(estimated.notes),
    )


@pytest.mark.daily("sequence")
@pytest.mark.parametrize("layout", ["one", "tp2", "sequence"])
def test_copied_bytes_are_the_formula(pools: Pools, layout: str) -> None:
    """Of recomputed layers their inputs; of others what they keep, each tensor once."""
    tp = LAYOUTS[layout].get("tp_size", 1)
    run = pools(2).run if tp > 1 else lambda function, *given: [function(*given)]
    stream = TOKENS * HIDDEN * 4 // (tp if "sequence" in layout else 1)
    for inputs, _, _ in run(copied, LAYOUTS[layout], MemoryConfig(**WAYS["inputs"])):
        assert inputs == 4 * stream
    for large, _, _ in run(
        copied, LAYOUTS[layout], MemoryConfig(offload_activations=f"{stream + 1}", recompute="full")
    ):
        assert large == 0
    if tp == 1:
        everything, stays, notes = copied({}, MemoryConfig(offload_activations="1"))
        here, estimated, _ = kept(None, {}, "sdpa")
        assert everything == here - ROTARY  # sines and cosines, which all layers are given, stay
        assert stays < estimated
        assert any("of activations; at most two layers'" in note for note in notes)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "shard2"])
def test_over_four_bits(pools: Pools, tmp_path: Path, layout: str) -> None:
    path = save(wide("llama"), tmp_path)
    ways = [None, *(MemoryConfig(**WAYS[way]) for way in ("activations", "inputs"))]
    ways += [MemoryConfig(**WAYS["all"])] if layout == "shard2" else []
    found = [pools(2).run(gradients, path, LAYOUTS[layout], way) for way in ways]
    for other in found[1:]:
        for rank, expected in zip(other, found[0], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(rank, expected, strict=True))


def test_a_graph_that_is_kept_is_read_twice() -> None:
    memory = MemoryConfig(offload_activations="64")
    ids = torch.arange(24).view(2, 12)
    found = []
    for asked in (None, memory):
        model = hfscale.from_config(tiny("llama"), memory=asked, dtype=torch.float32)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def where(layout: dict[str, Any]) -> set[str]:
    model = hfscale.from_config(
        tiny("llama"),
        parallel=ParallelConfig(**layout),
        memory=MemoryConfig(offload_parameters=True),
    )
    estimated = hfscale.memory_estimate(model)
    assert estimated.weights == estimated.gradients == estimated.optimizer == 0 < estimated.gathered
    assert any(
        note.startswith("on the host: shards, gradients and optimizer of")
        for note in estimated.notes
    )
    return {local_tensor(p.detach()).device.type for _, p in runtime_of(model).parameters()}


def test_what_does_not_fit_is_refused(pools: Pools) -> None:
    assert pools(2).run(where, LAYOUTS["shard2"]) == [{"cpu"}] * 2
    with pytest.raises(PlanError, match="use dp_shard_size=2 or more, or offload_optimizer=True"):
        hfscale.plan(
            tiny("llama"), ParallelConfig(tp_size=2), memory=MemoryConfig(offload_parameters=True)
        )
    for wrong in (3, "much"):
        with pytest.raises(ConfigError, match="use True, False, or a size like '1MiB'"):
            MemoryConfig(offload_activations=wrong)  # type: ignore[arg-type]
    memory = MemoryConfig(offload_activations=True, offload_optimizer=True)
    plan = str(hfscale.plan(tiny("llama"), memory=memory))
    assert (
        "on the host: the optimizer's state, what layers keep for the backward pass, in tensors of 1,048,576"
        in plan
    )
