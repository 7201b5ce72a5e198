"""Layers that are compiled: collectives are part of their graphs, and results are what they were."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

import hfscale
from hfscale import Float8Config, MemoryConfig, ParallelConfig
from hfscale.testing import RankPool
from hfscale.train.runtime import local_tensor, runtime_of
from tests.layouts import LAYOUTS
from tests.mixtures import qwen3_moe
from tests.sweeps import cases
from tests.tiny_models import tiny

Pools = Callable[[int], RankPool]


def _step(
    family: str,
    layout: ParallelConfig,
    compiled: bool,
    whole: bool | None,
    backend: str = "aot_eager",
    blocks: bool = False,
    memory: MemoryConfig | None = None,
    adapters: bool = False,
    lengths: tuple[int, ...] = (12,),
    **given: Any,
) -> dict[str, torch.Tensor]:
    lora = LoraConfig(r=2, target_modules="all-linear") if blocks or adapters else None
    config = tiny(family, num_hidden_layers=2 * layout.size("pp")) if blocks else tiny(family)
    torch.manual_seed(0)
    given = {"dtype": torch.float64, **given}
    model = hfscale.from_config(
        config, parallel=layout, peft_config=lora, memory=memory, **given
    ).train()
    torch.compiler.reset()
    inductor.compile_threads = 1  # of a pool's rank, which starts no processes
    runtime = runtime_of(model)
    layers = [layer for layer in runtime.plan.layers if runtime.is_local(layer)]
    inside = [f"{layer}.{block}" for layer in layers for block in ("self_attn", "mlp")]
    for name in (inside if blocks else layers) if compiled else ():
        module = runtime.model.get_submodule(name)
        if whole is None:
            module.compile(backend=backend)
        else:
            module.forward = torch.compile(module.forward, backend=backend, fullgraph=whole)
    every = [torch.arange(2 * length).view(2, length) for length in lengths]
    loss = hfscale.train_step(model, [{"input_ids": ids, "labels": ids} for ids in every])
    torch.compiler.reset()
    gradients = {
        p.name: local_tensor(x.grad) for p, x in runtime.parameters() if x.grad is not None
    }
    return {"loss": loss, **gradients}


def check(plain: list[dict[str, torch.Tensor]], compiled: list[dict[str, torch.Tensor]]) -> None:
    for expected, found in zip(plain, compiled, strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("family", "sequence"),
    cases([("llama", False), ("gpt2", False), ("llama", True)], daily=[("gpt2", False)]),
)
def test_a_compiled_layer(pools: Pools, family: str, sequence: bool) -> None:
    """One graph (``fullgraph``), also where the stream between its blocks is cut along the sequence."""
    layout = ParallelConfig(tp_size=2, sequence_parallel=sequence)
    check(*(pools(2).run(_step, family, layout, how, True) for how in (False, True)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recompute", "regather", "adapters", "lengths"),
    [
        ("none", True, True, (13, 8)),
        ("selective", False, True, (13,)),
        ("full", False, False, (13, 8, 12)),
        ("full", False, True, (13,)),
        (["mlp"], False, False, (13,)),
    ],
)
def test_a_compiled_layer_over_a_cut_stream(
    pools: Pools, recompute: Any, regather: bool, adapters: bool, lengths: tuple[int, ...]
) -> None:
    """One graph (``fullgraph``), with shares of uneven and of several lengths, also where it is recomputed inside."""
    layout = ParallelConfig(tp_size=2, sequence_parallel=True, sequence_regather=regather)
    memory = None
    if recompute != "none":
        memory = MemoryConfig(recompute=recompute)
    more = "aot_eager", False, memory, adapters, lengths
    check(*(pools(2).run(_step, "llama", layout, how, True, *more) for how in (False, True)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "recipe"),
    cases([(name, recipe) for name in ("tp2", "sequence", "cp2", "shard2") for recipe in ("tensorwise", "rowwise")],
          daily=[("tp2", "tensorwise")]),
)  # fmt: skip
def test_products_in_8_bits(pools: Pools, name: str, recipe: str) -> None:
    layout = ParallelConfig(**LAYOUTS[name])
    whole = name in ("tp2", "sequence")
    given = {"mixed_precision": "fp8", "float8": Float8Config(recipe)}
    check(*(pools(2).run(_step, "llama", layout, how, whole, **given) for how in (False, True)))


@pytest.mark.slow
def test_layers_that_are_compiled_in_place(pools: Pools) -> None:
    """With their hooks, which cut the stream in front of the first, in graphs of their own."""
    layout = ParallelConfig(tp_size=2, sequence_parallel=True)
    more = ("aot_eager", False, None, True, (13, 8))
    check(*(pools(2).run(_step, "llama", layout, how, None, *more) for how in (False, True)))


@pytest.mark.slow
def test_compiled_blocks(pools: Pools) -> None:
    """By torch's own compiler, for this machine's processor, with adapters inside: a block has no collective in it."""
    layout = ParallelConfig(tp_size=2, sequence_parallel=True)
    run = pools(2).run
    check(*(run(_step, "llama", layout, how, True, "inductor", True) for how in (False, True)))


@pytest.mark.parametrize(
    ("layout", "recompute"),
    cases(
        [("tp2", "none"), ("tp2", "full"), ("1f1b", "none"), ("1f1b", "full"), ("zbv", "none"), ("shard2", "none"),
         ("shard2", "full"), ("sequence", "selective"), ("sequence", ["mlp"])],
        daily=[],  # the layers around them are compiled below
    ),
)  # fmt: skip
def test_compiled_blocks_of_every_layout(pools: Pools, layout: str, recompute: Any) -> None:
    """With adapters: one graph each (``fullgraph``)."""
    sizes = ParallelConfig(**LAYOUTS[layout])
    run = pools(2).run
    memory = MemoryConfig(recompute=recompute)
    check(
        *(run(_step, "llama", sizes, how, True, "aot_eager", True, memory) for how in (False, True))
    )


@pytest.mark.slow
@pytest.mark.parametrize("keep", [[], ["aten.mm"]])
def test_compiled_layers_that_are_recomputed(pools: Pools, keep: list[str]) -> None:
    """One graph (``fullgraph``): layers note nothing outside of it for their backward pass."""
    layout = ParallelConfig(tp_size=2)
    run = pools(2).run
    memory = MemoryConfig(recompute="full", recompute_keep=keep)
    check(
        *(
            run(_step, "llama", layout, how, True, "aot_eager", False, memory)
            for how in (False, True)
        )
    )


def _built(
    sizes: dict[str, Any],
    compiled: bool | str,
    memory: MemoryConfig | None,
    lora: bool,
    config: Any = None,
) -> Any:
    """Losses of rows of three lengths and their gradients, and how many graphs there were behind each."""
    layout = ParallelConfig(**sizes)
    config = config or tiny("llama", num_hidden_layers=2 * layout.size("pp"))
    torch.compiler.reset()
    counters.clear()
    adapter = LoraConfig(r=2, target_modules="all-linear") if lora else None
    model = hfscale.from_config(
        config,
        parallel=layout,
        dtype=torch.float64,
        memory=memory,
        peft_config=adapter,
        compile=compiled,
    ).train()
    losses = []
    graphs = []
    for length in (13, 8, 12):
        ids = torch.arange(2 * length).view(2, length)
        losses.append(hfscale.train_step(model, [{"input_ids": ids, "labels": ids}] * 2))
        graphs.append(counters["stats"]["unique_graphs"])
    torch.compiler.reset()
    grads = {
        p.name: local_tensor(x.grad)
        for p, x in runtime_of(model).parameters()
        if x.grad is not None
    }
    return {"loss": torch.stack(losses), **grads}, graphs


@pytest.mark.parametrize(
    ("name", "recompute", "lora"),
    cases(
        [*((name, None, False) for name in ("tp2", "sequence", "1f1b", "zbv", "cp2", "shard2")),
         *((name, "full", lora) for name in ("tp2", "sequence", "shard2") for lora in (False, True)),
         ("shard2", None, True)],
        daily=[("sequence", "full", False)],
    ),
)  # fmt: skip
def test_a_model_of_compiled_layers(pools: Pools, name: str, recompute: Any, lora: bool) -> None:
    """By ``compile=``: what plain layers compute, in one graph, and no more for a third length than for two; also where
    they are recomputed.
    """
    memory = None if recompute is None else MemoryConfig(recompute=recompute)
    plain, compiled = (
        pools(2).run(_built, LAYOUTS[name], how, memory, lora) for how in (False, "aot_eager")
    )
    check([found for found, _ in plain], [found for found, _ in compiled])
    for _, graphs in compiled:
        assert graphs[1] == graphs[2]
        assert lora or graphs == [1, 2, 2]


@pytest.mark.parametrize("name", cases(["tp2", "ep2", "1f1b", "shard2"], daily=["ep2"]))
def test_modules_beside_mixtures_are_compiled(pools: Pools, name: str) -> None:
    """Attention and norms, each by itself: what plain layers compute, in as many graphs for a third length."""
    sizes = {"dp_shard_size": 2, "ep_size": 2} if name == "ep2" else LAYOUTS[name]
    config = qwen3_moe(num_hidden_layers=2)
    plain, compiled = (
        pools(2).run(_built, sizes, how, None, True, config) for how in (False, "aot_eager")
    )
    check([found for found, _ in plain], [found for found, _ in compiled])
    for _, graphs in compiled:
        assert 0 < graphs[1] == graphs[2]


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of torch's compiler
def test_auto_compiles_where_triton_makes_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runtime_of(hfscale.from_config(tiny("llama"), compile="auto")).compiled is False
    monkeypatch.setattr("hfscale.api.assemble.is_fused", lambda device: True)
    model = hfscale.from_config(tiny("llama"), compile="auto")
    assert runtime_of(model).compiled == "inductor"
    assert all(layer._compiled_call_impl is not None for layer in model.model.layers)
