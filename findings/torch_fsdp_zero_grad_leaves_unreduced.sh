#!/usr/bin/env bash
# FSDP2 (fully_shard) of torch 2.14.1, seen on CPUs over gloo on 2026-11-29.
# Expected: after zero_grad() a model has no gradients, so that a microbatch whose loss was not finite can be dropped.
# Seen: gradients of a backward pass without synchronization (set_requires_gradient_sync(False), which accumulation sets)
# stay in FSDP2's own buffers, which neither model.zero_grad() nor optimizer.zero_grad() reaches, nor reset_iter_state(),
# which is said to discard them: they are added to the next step that synchronizes. So does a step that runs out of memory
# in its second microbatch. DDP's no_sync() leaves them in .grad, where zero_grad() drops them. In 2.15.0 reset_iter_state()
# drops them, zero_grad() does not.
# Exits with 1 if it behaves otherwise.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/python" -m pip install --quiet torch==2.14.1 numpy==2.4.4
"$place/venv/bin/python" - "$place/store" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
dropped, kept = torch.full((1, 2), 100.0), torch.ones(1, 2)


def over_fsdp() -> list[float]:
    model = nn.Linear(2, 1, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_requires_gradient_sync(False)
    model(dropped).sum().backward()
    model.zero_grad()
    optimizer.zero_grad()
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    model(kept).sum().backward()
    return model.weight.grad.to_local().flatten().tolist()


def over_ddp() -> list[float]:
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    with model.no_sync():
        model(dropped).sum().backward()
    model.zero_grad()
    model(kept).sum().backward()
    return model.module.weight.grad.flatten().tolist()


found = {"FSDP2": over_fsdp(), "DDP": over_ddp()}
for name, gradient in found.items():
    print(f"{name}: gradient after zero_grad() and one more pass {gradient}")
dist.destroy_process_group()
sys.exit(found != {"FSDP2": [101.0, 101.0], "DDP": [1.0, 1.0]})
PYTHON
