"""Modules that are no model of transformers train as Accelerate trains them, where every process has its own batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale.models.clone import tiny_clone
from hfscale.testing import RankPool

Pools = Callable[[int], RankPool]
ROWS = 4
STEPS = 3


def trained(layout: dict[str, Any], beside: bool, directory: str = "") -> list[float]:
    """Take three steps of a plain module, one begun again from its state; return norms, weights, the last outputs."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = hfscale.Accelerator(cpu=True)
    known = hfscale.from_config(tiny_clone(LlamaConfig()), parallel=ParallelConfig(**layout))
    if beside:
        accelerator.prepare(known)
    torch.manual_seed(3 + accelerator.process_index)  # the first process's weights count
    module = nn.Linear(3, 2, dtype=torch.float64)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    data = torch.linspace(-1, 1, ROWS * STEPS * 3, dtype=torch.float64).view(-1, 3) ** 3
    loader = DataLoader(data, batch_size=ROWS // accelerator.num_processes)
    module, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    found = []
    for batch in loader:
        accelerator.backward((module(batch) - 1).square().mean())
        found.append(float(accelerator.clip_grad_norm_(module.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        if directory and not beside:
            accelerator.save_state(directory)
            accelerator.wait_for_everyone()  # the first process writes
            nn.init.zeros_(accelerator.unwrap_model(module).weight)
            accelerator.load_state(directory)
    found += [float(value) for each in module.parameters() for value in each.flatten()]
    with torch.no_grad():
        outputs = module(data[accelerator.process_index :: accelerator.num_processes])
    return found + [float(accelerator.reduce(outputs.sum()))]


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("layout", [{"dp_replicate_size": 2}, {"dp_shard_size": 2}])
def test_three_steps_equal_one_process(
    pools: Pools, layout: dict[str, Any], beside: bool, tmp_path: Any
) -> None:
    (alone,) = pools(1).run(trained, {}, beside)
    for found in pools(2).run(trained, layout, beside, str(tmp_path)):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(alone), rtol=1e-12, atol=1e-12)


def refused(layout: dict[str, Any], late: bool) -> str:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = hfscale.Accelerator(cpu=True)
    data_alone = ParallelConfig(dp_replicate_size=2)
    hfscale.from_config(tiny_clone(LlamaConfig()), parallel=data_alone)
    if late:  # the model comes after what was prepared for processes
        accelerator.prepare(nn.Linear(2, 2) if "tp_size" in layout else DataLoader([1, 2]))
    model = hfscale.from_config(tiny_clone(LlamaConfig()), parallel=ParallelConfig(**layout))
    with pytest.raises(ConfigError) as caught:
        accelerator.prepare(model, *([] if late else [nn.Linear(2, 2)]))
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "late", "words"),
    [
        ({"tp_size": 2}, False, "must train where every process has a batch of its own, got tp2"),
        ({"cp_size": 2}, False, "must train where every process has a batch of its own"),
        ({"tp_size": 2}, True, "must train where every process has a batch of its own, got tp2"),
        ({"dp_shard_size": 2}, True, "or before, the data loaders"),
    ],
)
def test_ranks_that_share_a_batch_are_refused(
    pools: Pools, layout: dict[str, Any], late: bool, words: str
) -> None:
    for said in pools(2).run(refused, layout, late):
        assert words in said


def test_losses_are_scaled_for_plain_modules_alone() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = hfscale.Accelerator(cpu=True, mixed_precision="fp16")
    accelerator.prepare(nn.Linear(2, 2))
    with pytest.raises(
        ConfigError, match="mixed_precision='fp16' cannot be used: use 'no' or 'bf16'"
    ):
        accelerator.prepare(hfscale.from_config(tiny_clone(LlamaConfig())))
    AcceleratorState._reset_state(reset_partial_state=True)
