"""What cut sequences send and keep is what the formulas say.

With ``K`` bytes of the keys of all tokens of a layer, as many of values, and ``Q`` of queries, a rank of ``n`` sends
per layer, forward and backward: gather ``6 K (n-1)/n`` (once more in the backward pass), ring ``4 K (n-1)/n + 2 K``
(gradients travel all the way home), heads ``4 (Q + r K) (n-1)/n^2``, where ``r`` ranks share a key head.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ParallelConfig
from hfscale.runtime import runtime_of
from hfscale.testing import RankPool, Traffic, count_traffic

from ...models import tiny

Pools = Callable[[int], RankPool]
ROWS, WIDTH, HEADS, KEY_HEADS, LAYERS = 3, 8, 4, 2, 2
SHORT, LONG = 16, 48


def _steps(directory: str, method: str, size: int) -> list[Traffic]:
    model = hfscale.from_pretrained(directory, parallel=ParallelConfig(cp_size=size, cp_method=method)).train()
    found = []
    for length in (SHORT, SHORT, LONG):  # the first step also agrees on random streams
        ids = (torch.arange(ROWS * length) % 60).view(ROWS, length)
        with count_traffic() as traffic:
            hfscale.train_step(model, {"input_ids": ids, "labels": ids})
        found.append(traffic)
    return found[1:]


def sent(traffic: Traffic, size: int) -> float:
    return traffic.bytes_sent(size) - traffic.payload["recv"]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("method", ["gather", "ring", "heads"])
def test_bytes(pools: Pools, tmp_path: Path, method: str, size: int) -> None:
    """Of tokens: weights and labels are sent as well, whatever the length."""
    AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float32).save_pretrained(tmp_path)
    tokens = ROWS * (LONG - SHORT) * LAYERS * 4 * WIDTH
    q, k, n = tokens * HEADS, tokens * KEY_HEADS, size
    replicas = max(1, size // KEY_HEADS)
    formula = {
        "gather": 6 * k * (n - 1) / n,
        "ring": 4 * k * (n - 1) / n + 2 * k,
        "heads": 4 * (q + replicas * k) * (n - 1) / n**2,
    }
    for short, long in pools(size).run(_steps, str(tmp_path), method, size):
        assert sent(long, size) - sent(short, size) == pytest.approx(formula[method], rel=0.01)


def _kept(directory: str, size: int, method: str) -> int:
    """Bytes of activations that a forward pass of a step keeps."""
    layout = ParallelConfig(cp_size=size, cp_method=method)
    model = hfscale.from_pretrained(directory, parallel=layout).train()
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter) and tensor.ndim > 2:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = (torch.arange(2 * 512) % 60).view(2, 512)
    assert runtime_of(model).mesh.layout == layout
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    return sum(storages.values())


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("method", ["gather", "ring", "heads"])
def test_activations_are_cut(pools: Pools, tmp_path: Path, method: str, size: int) -> None:
    """With a key head for each rank: replicas of heads would be kept too."""
    config = tiny("llama", num_key_value_heads=HEADS)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    whole = _kept(str(tmp_path), 1, "auto")
    for kept in pools(size).run(_kept, str(tmp_path), size, method):
        assert kept <= 1.06 * whole / size
