"""What layers keep in 8 bits where sequences are cut, and rows are padded at their left."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

import hfscale
from hfscale import MemoryConfig, ParallelConfig
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.shards import local_tensor

from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "sequence": {"tp_size": 2, "sequence_parallel": True},
    "ring": {"cp_size": 2, "cp_method": "ring"},
    "gather": {"cp_size": 2, "cp_method": "gather"},
    "heads": {"cp_size": 2, "cp_method": "heads"},
}
ERROR = 0.0075
"""Of the gradient's norm; 0.0060 in one process, 0.0066 at most in these layouts."""


def left_padded(tokens: int) -> dict[str, Tensor]:
    """Rows of which the first is whole, and the last has two tokens."""
    ids = torch.randint(3, 67, (3, tokens), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, : tokens // 2] = mask[2, : tokens - 2] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def small(heads: int) -> LlamaConfig:
    """Heads of 64 / ``heads`` numbers each."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }
    return tiny("llama", **sizes)


def gradients(
    layout: dict[str, Any], heads: int, compress: bool
) -> tuple[float, dict[str, Tensor], dict[str, Any]]:
    """The loss, and what this rank holds of the gradients, by name; and where it lies in the whole."""
    model = hfscale.from_config(
        small(heads),
        parallel=ParallelConfig(**layout),
        memory=MemoryConfig(compress_activations="1B" if compress else False),
        dtype=torch.float64,
        seed=3,
    ).train()
    loss = hfscale.train_step(model, left_padded(32))
    runtime = runtime_of(model)
    held = {
        planned.name: local_tensor(parameter.grad).clone()
        for planned, parameter in runtime.parameters()
    }
    return float(loss), held, {"ranks": runtime.mesh.ranks, "plan": runtime.plan.by_name}


@pytest.mark.parametrize("heads", [4, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_error_is_that_of_one_process(pools: Pools, layout: str, heads: int) -> None:
    """Of heads with four numbers the logarithms of sums are no longer few, and minus infinity where all is padding."""
    loss, wanted, _ = gradients({}, heads, compress=False)
    world = ParallelConfig(**LAYOUTS[layout]).total_size
    run = pools(world).run if world > 1 else lambda f, *given: [f(*given)]
    for told, found, place in run(gradients, LAYOUTS[layout], heads, True):
        assert told == pytest.approx(loss, rel=1e-6)
        apart = whole = 0.0
        for name, mine in found.items():
            theirs = place["plan"][name].take(wanted[name], place["ranks"])
            apart = apart + float((mine - theirs).pow(2).sum())
            whole = whole + float(theirs.pow(2).sum())
        assert 0 < (apart / whole) ** 0.5 < ERROR
