#!/bin/sh
# One would expect: `parameter.data = values` replaces a parameter's values, as it does for plain tensors, or raises. It
# is the usual way to evaluate averaged weights and to put the trained ones back.
# What happens: for parameters that are DTensors (FSDP2's shards, tensor parallelism) the assignment is taken and has no
# effect: the local values stay, without an error. Reading `parameter.data` afterwards gives the old values too. Mutating
# `parameter.data` (copy_, mul_) works, and so does parameter.copy_(values) under no_grad.
# So a swap of averaged weights that is written with .data evaluates the trained weights.
# Versions: torch 2.15.0, the same with 2.14.1; CPU, one and two processes over gloo.
# Seen: by comparing evaluations of averaged weights over shards with one process.
# PYTHON=... uses an environment that has this package; otherwise it is installed in a temporary one.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-}
if [ -z "$python" ]; then
    python3 -m venv "$work/venv"
    python="$work/venv/bin/python"
    "$python" -m pip install --quiet torch==2.15.0 numpy
fi
export OMP_NUM_THREADS=1
cat > "$work/script.py" <<'END'
import sys
import warnings

import torch
import torch.multiprocessing
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def output(layer, x):
    result = layer(x).sum().item()
    layer.reshard()
    return result


def work(rank, world, meeting):
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo", f"file://{meeting}{world}", rank=rank, world_size=world)
    layer = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(layer.weight)
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    averaged = torch.ones_like(layer.weight)
    x = torch.ones(1, 2)

    plain = nn.Parameter(torch.zeros(2, 2))
    plain.data = torch.ones(2, 2)
    layer.weight.data = averaged
    assigned = layer.weight.full_tensor().sum().item(), output(layer, x)
    with torch.no_grad():
        layer.weight.copy_(averaged)
    copied = layer.weight.full_tensor().sum().item(), output(layer, x)
    layer.weight.data.mul_(2)
    mutated = layer.weight.full_tensor().sum().item()
    if rank == 0:
        print(f"{world} processes: a plain parameter after .data = ones: sum {plain.sum().item()}")
        print(f"  a shard after .data = ones: sum {assigned[0]}, output {assigned[1]}")
        print(f"  after copy_(ones): sum {copied[0]}, output {copied[1]}")
        print(f"  after .data.mul_(2): sum {mutated}")
        assert plain.sum() == 4
        assert assigned == (0, 0)
        assert copied == (4, 4)
        assert mutated == 8
    distributed.destroy_process_group()


if __name__ == "__main__":
    for world in (1, 2):
        torch.multiprocessing.spawn(work, (world, sys.argv[1]), world)
    print("as seen")
END
"$python" "$work/script.py" "$work/meeting"
