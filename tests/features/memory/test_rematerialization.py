"""All but products and attention is computed again to the same bits; layers run in tiles of tokens."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import hfscale
from hfscale import ConfigError, MemoryConfig, PlanError
from hfscale.features.memory.rematerialization import rematerialize
from hfscale.features.memory.saved import count_saved
from hfscale.train.runtime import runtime_of

from ...families import config_of
from ...mixtures import qwen3_moe
from ...sweeps import cases
from ...tiny_models import tiny

TOKENS = 64


class Live(TorchDispatchMode):
    """Count the bytes that operators have made and that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most, self.seen = 0, 0, set[int]()

    def free(self, key: int, size: int) -> None:
        self.now -= size
        self.seen.discard(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            storage = leaf.untyped_storage() if isinstance(leaf, Tensor) else None
            if storage is not None and storage._cdata not in self.seen:
                self.seen.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
                self.most = max(self.most, self.now)
        return out


def step(
    config: Any, memory: MemoryConfig | None, dtype: torch.dtype
) -> tuple[list[Tensor], int, int]:
    """Gradients of a step, bytes that layers kept, and operations."""
    torch.manual_seed(0)
    model = hfscale.from_config(config, memory=memory, dtype=dtype).train()
    runtime = runtime_of(model)
    fired = list[int]()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: fired.append(id(p)))
    torch.manual_seed(1)
    ids = torch.randint(3, 40, (2, TOKENS // 2), generator=torch.Generator().manual_seed(0))
    saved = count_saved(runtime.model, runtime.plan.layers, runtime.plan.head)
    with saved as counted, FlopCounterMode(display=False) as flops:
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    assert len(fired) == len(set(fired)) > 10
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return gradients, counted.layers, flops.get_total_flops()


DROPS = {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "config",
    cases(
        [tiny("llama"), tiny("gpt2", **DROPS), config_of("qwen3_moe")],
        daily=[tiny("gpt2", **DROPS)],
    ),
    ids=lambda config: config.model_type,
)
def test_the_same_bits_for_fewer_bytes_and_no_product_more(config: Any, dtype: torch.dtype) -> None:
    expected, whole, products = step(config, None, dtype)
    found, kept, again = step(config, MemoryConfig(recompute="elementwise"), dtype)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert kept < 0.6 * whole
    assert again == products


def test_a_layer_of_llama_keeps_what_products_and_attention_read() -> None:
    config = tiny("llama", num_hidden_layers=3)
    hidden = config.hidden_size
    inner = config.intermediate_size
    heads = config.num_attention_heads
    keys = hidden * config.num_key_value_heads // heads
    rotary = 2 * TOKENS // 2 * hidden // heads * 4
    expected = 3 * TOKENS * (4 * (4 * hidden + 2 * keys + 2 * inner) + 4 * heads) + rotary
    assert step(config, MemoryConfig(recompute="elementwise"), torch.float32)[1] == expected


class Writing(nn.Module):
    """A layer that writes into what it has read, and draws numbers in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        y = self.inner(x)
        squared = (y.double() + table).pow(2)
        y.mul_(0.5)
        table.add_(1.0)
        noise = torch.empty_like(y).bernoulli_(0.5).div_(0.5)
        mixed = (squared.float() * y.sigmoid() * noise).view(-1, 8)
        mixed[0] = 0.0
        return self.outer(torch.nn.functional.softmax(mixed, -1)).view_as(x) + x


def test_memory_that_is_written_into_is_kept_before() -> None:
    """And all may be read twice."""
    x = torch.randn(3, 4, 8)
    found = []
    torch.manual_seed(0)
    module = Writing().train()
    for again in (False, True):
        if again:
            rematerialize(module)
        torch.manual_seed(1)
        given = x.clone().requires_grad_()
        loss = module(given * 1.0, torch.ones(8)).pow(2).sum()
        first = torch.autograd.grad(loss, [given, *module.parameters()], retain_graph=True)
        second = torch.autograd.grad(loss, [given, *module.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        found.append(first)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Twice(nn.Module):
    """Something is made of one place in memory, which is then written into, and again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor) -> Tensor:
        place = self.first(hidden_states)
        found = place.double().pow(2).sin()
        place.add_(self.second(hidden_states))
        return (found + place.double().pow(2).sin()).float()


def kept_by_version(tensor: Tensor, known: dict[Any, Tensor]) -> Tensor:
    """Copy memory once, as the hooks of offloaded and compressed activations do."""
    key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version
    return known.setdefault(key, tensor.detach().clone())


@pytest.mark.parametrize("again", [False, True])
def test_contents_of_one_place_are_kept_apart(again: bool) -> None:
    gradients = []
    known = dict[Any, Tensor]()
    for kept in (False, True):
        torch.manual_seed(0)
        layer = Twice().train()
        x = torch.randn(4, 8, requires_grad=True)
        if kept and again:
            rematerialize(layer)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, kept=kept: kept_by_version(tensor, known) if kept else tensor,
            lambda tensor: tensor,
        ):
            output = layer(x)
        output.sum().backward()
        gradients.append(x.grad)
    assert torch.equal(gradients[0], gradients[1])


@pytest.mark.parametrize("how", ["full", "elementwise"])
@pytest.mark.parametrize("family", cases(["llama", "gpt2"], daily=["gpt2"]))
def test_tiles_change_nothing_and_hooks_fire_once(family: str, how: str) -> None:
    expected, *_ = step(tiny(family), None, torch.float64)
    found, *_ = step(tiny(family), MemoryConfig(recompute=how, tile_tokens=14), torch.float64)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


def most_per_token(length: int, **memory: Any) -> float:
    """Most bytes that are alive in a step, for each token, over those of a step of few tokens."""
    config = tiny("llama", num_hidden_layers=4, intermediate_size=256, max_position_embeddings=4096)
    model = hfscale.from_config(config, memory=MemoryConfig(**memory), dtype=torch.float32).train()
    found = []
    for tokens in (length // 8, length):
        ids = torch.randint(3, 60, (1, tokens))
        with Live() as live:
            hfscale.train_step(model, {"input_ids": ids, "labels": ids})
        found.append(live.most)
        model.zero_grad()
    return (found[1] - found[0]) / (length - length // 8)


@pytest.mark.slow
def test_in_tiles_a_layer_holds_no_multiple_of_its_widest_matrix() -> None:
    plain = most_per_token(256)
    again = most_per_token(256, recompute="full")
    short, long = (
        most_per_token(length, recompute="full", tile_tokens=32) for length in (256, 512)
    )
    assert long < 1.01 * short
    assert 2 * short < again < plain


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (qwen3_moe(), {}, "distributes all tokens of a microbatch to experts at once"),
        (
            tiny("llama"),
            {"mixed_precision": "fp8"},
            "fp8', which needs one scale for a whole tensor",
        ),
    ],
)
def test_what_cannot_run_in_tiles_is_refused_with_the_plan(
    config: Any, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        hfscale.plan(config, memory=MemoryConfig(recompute="full", tile_tokens=8), **given)


def test_tiles_need_layers_that_are_recomputed() -> None:
    with pytest.raises(
        ConfigError, match="needs recompute='full' or 'elementwise', got recompute='none'"
    ):
        MemoryConfig(tile_tokens=8)
