"""What one step sends under tensor parallelism is what the formula says, counted at torch's dispatcher.

Per layer and microbatch of ``b x s`` tokens: four all-reduces of ``b s h`` (enter and leave of two blocks); besides,
one all-reduce of ``b s h`` for the embedding (forward) and one for the head (backward), all-gathers of ``2 b (s - 1)``
numbers for the loss (the last position predicts nothing), and one all-reduce a step for all parameters that a cut block
uses whole.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ParallelConfig, _host
from hfscale.testing import RankPool, Traffic, count_traffic

from .models import tiny

Pools = Callable[[int], RankPool]
B, S, H, LAYERS = 3, 10, 32, 2


def count(path: str, microbatches: int, checkpointing: bool) -> Traffic:
    model = hfscale.from_pretrained(path, parallel=ParallelConfig(tp_size=2)).train()
    if checkpointing:
        _host.enable_checkpointing(model)
    ids = torch.arange(B * S).view(B, S)
    batch = [{"input_ids": ids, "labels": ids}] * microbatches
    hfscale.train_step(model, batch)  # the first step also agrees on the random stream
    with count_traffic() as traffic:
        hfscale.train_step(model, batch)
    return traffic


# parameters that a cut block uses whole: number per layer, entries of each
@pytest.mark.parametrize(("family", "shared"), [("llama", []), ("gpt2", [H, H]), ("qwen3", [8, 8])])
@pytest.mark.parametrize(("microbatches", "checkpointing"), [(1, False), (3, False), (1, True)])
def test_tensor_parallel_step(
    pools: Pools, tmp_path: Path, family: str, shared: list[int], microbatches: int, checkpointing: bool
) -> None:
    AutoModelForCausalLM.from_config(tiny(family), dtype=torch.float32).save_pretrained(tmp_path)
    for traffic in pools(2).run(count, str(tmp_path), microbatches, checkpointing):
        # Recomputation repeats a layer's forward pass up to the last tensor that backward needs, which is the input of
        # the MLP's row projection: one of the two all-reduces.
        edges = (5 if checkpointing else 4) * LAYERS
        activations = microbatches * (edges + 2) * B * S * H * 4
        parameters = LAYERS * sum(shared) * 4
        gathered = microbatches * 2 * B * (S - 1) * 4
        assert traffic.payload == {"allreduce": activations + parameters, "allgather": gathered}
        assert traffic.calls["allreduce"] == microbatches * (edges + 2) + bool(shared)
        # two ranks in a ring: 2 (n - 1) / n of an all-reduce is its payload
        assert traffic.bytes_sent(2) == activations + parameters + gathered


def count_one() -> Traffic:
    model = hfscale.from_config(tiny("llama"))
    ids = torch.arange(B * S).view(B, S)
    with count_traffic() as traffic:
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    return traffic


def test_one_process_is_silent() -> None:
    assert not count_one().calls
