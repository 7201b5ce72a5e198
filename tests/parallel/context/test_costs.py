"""What cut sequences send and keep is what the formulas say.

With ``K`` bytes of the keys of all tokens of a layer, as many of values, and ``Q`` of queries, a rank of ``n`` sends
per layer, forward and backward: gather ``6 K (n-1)/n`` (once more in the backward pass), ring ``4 K (n-1)/n + 2 K``
(gradients travel all the way home), heads ``4 (Q + r K) (n-1)/n^2``, where ``r`` ranks share a key head; heads in
groups of ``t``, around a ring of ``m = n/t`` groups, ``4 (Q + K) (t-1)/(n t) + (4 (m-1)/m + 2) K/t``.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ParallelConfig
from hfscale._compat.transformers.computing import causal_mask_function
from hfscale.features.memory.saved import count_saved
from hfscale.parallel.context.cut_batch import CAUSAL, FULL, SKIPPED, CutBatch, MaskBlocks
from hfscale.parallel.context.engine import GatheredBlocks, RingBlocks
from hfscale.plan.sequence_split import Split
from hfscale.testing import RankPool, Traffic, count_traffic
from hfscale.train.runtime import runtime_of

from ...tensor_memory import follow_memory
from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
ROWS = 3
WIDTH = 8
HEADS = 4
KEY_HEADS = 2
LAYERS = 2
SHORT = 16
LONG = 48


def _steps(directory: str, method: str, size: int) -> list[Traffic]:
    model = hfscale.from_pretrained(
        directory, parallel=ParallelConfig(cp_size=size, cp_method=method)
    ).train()
    found = []
    for length in (SHORT, SHORT, LONG):  # the first step also agrees on random streams
        ids = (torch.arange(ROWS * length) % 60).view(ROWS, length)
        with count_traffic() as traffic:
            hfscale.train_step(model, {"input_ids": ids, "labels": ids})
        found.append(traffic)
    return found[1:]


def sent(short: Traffic, long: Traffic, method: str, size: int) -> float:
    """Bytes that a rank sends of the tokens that ``long`` has more."""
    payload = Traffic(payload=long.payload - short.payload)
    del payload.payload["recv"]
    # Which exchanges within groups of two.
    return payload.bytes_sent(2 if method == "heads_ring" else size)


METHODS = [(method, size) for method in ("gather", "ring", "heads") for size in (2, 4)] + [
    ("heads_ring", 4)
]
SIX = {
    "hidden_size": 48,
    "intermediate_size": 160,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
"""Heads that four ranks cannot share out, and groups of two can."""


@pytest.mark.daily("heads_ring-4", "gather-2")
@pytest.mark.parametrize(("method", "size"), METHODS)
def test_bytes(pools: Pools, tmp_path: Path, method: str, size: int) -> None:
    """Of tokens: weights and labels are sent as well, whatever the length."""
    heads, key_heads = (6, 2) if method == "heads_ring" else (HEADS, KEY_HEADS)
    config = tiny("llama", **(SIX if method == "heads_ring" else {}))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    tokens = ROWS * (LONG - SHORT) * LAYERS * 4 * WIDTH
    q = tokens * heads
    k = tokens * key_heads
    n = size
    t = 2
    replicas = max(1, size // key_heads)
    groups = size / t
    formula = {
        "gather": 6 * k * (n - 1) / n,
        "ring": 4 * k * (n - 1) / n + 2 * k,
        "heads": 4 * (q + replicas * k) * (n - 1) / n**2,
        "heads_ring": 4 * (q + k) * (t - 1) / (n * t) + (4 * (groups - 1) / groups + 2) * k / t,
    }
    for short, long in pools(size).run(_steps, str(tmp_path), method, size):
        assert 0.99 * formula[method] <= sent(short, long, method, size) <= 1.01 * formula[method]


def _held(method: str, layout: dict[str, int], length: int) -> tuple[int, int]:
    """The most bytes that a source of blocks holds at once, kernels apart, and what is estimated."""
    model = hfscale.from_config(tiny("llama"), parallel=ParallelConfig(cp_method=method, **layout))
    mesh = runtime_of(model).mesh
    split = Split(length, layout["cp_size"])
    group = mesh.group("cp")
    assert group is not None
    own = split.length(mesh.ranks["cp"])
    k = torch.randn(1, KEY_HEADS, own, WIDTH)
    source = GatheredBlocks(split.lengths, group)
    if method == "ring":
        source = RingBlocks(split.lengths, mesh.ranks["cp"], group)  # type: ignore[assignment]
    with follow_memory() as memory:
        source.gradients(k, k, lambda rank, kb, vb: (kb, vb))
    return memory.peak, hfscale.memory_estimate(model, tokens=length).exchanged


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("method", ["gather", "ring"])
def test_what_is_held_of_other_ranks(pools: Pools, method: str, size: int) -> None:
    for peak, estimated in pools(size).run(_held, method, {"cp_size": size}, 512):
        assert estimated <= peak <= 2 * estimated


def _kept(directory: str, size: int, method: str) -> int:
    """Bytes that a step keeps for its backward pass."""
    layout = ParallelConfig(cp_size=size, cp_method=method)
    model = hfscale.from_pretrained(directory, parallel=layout).train()
    plan = runtime_of(model).plan
    ids = (torch.arange(2 * 512) % 60).view(2, 512)
    with count_saved(model, plan.layers, plan.head) as saved:
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    return saved.layers + saved.around


@pytest.mark.daily("ring-2", "heads_ring-4")
@pytest.mark.parametrize(("method", "size"), METHODS)
def test_activations_are_cut(pools: Pools, tmp_path: Path, method: str, size: int) -> None:
    """With a key head for each rank: replicas of heads would be kept too."""
    config = tiny("llama", **(SIX if method == "heads_ring" else {"num_key_value_heads": HEADS}))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    whole = _kept(str(tmp_path), 1, "auto")
    for kept in pools(size).run(_kept, str(tmp_path), size, method):
        assert kept <= (1.06 if method.startswith("heads") else 1.001) * whole / size


def _work(split: Split, rank: int) -> int:
    """Scores that a rank computes under a causal mask, without a mask in memory."""
    mask = MaskBlocks(
        CutBatch(split, rank), causal_mask_function, 1, torch.device("cpu"), print, print
    )
    work = 0
    for rows in split.pieces(rank):
        for columns in (piece for other in range(split.size) for piece in split.pieces(other)):
            kind = mask.kind(rows, columns)
            wide = columns[1] - columns[0]
            high = rows[1] - rows[0]
            assert kind in (SKIPPED, FULL, CAUSAL)
            work += {SKIPPED: 0, FULL: high * wide, CAUSAL: high * (high + 1) // 2}[kind]
    return work


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_ranks_have_the_same_work(size: int) -> None:
    """And no mask exists: a pair of pieces is skipped, read whole, or below the diagonal."""
    split = Split(4099, size)
    tokens = 4099
    work = [_work(split, rank) for rank in range(size)]
    assert sum(work) == tokens * (tokens + 1) // 2
    assert max(work) <= 1.02 * sum(work) / size
