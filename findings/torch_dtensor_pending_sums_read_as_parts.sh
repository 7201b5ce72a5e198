#!/bin/sh
# One would expect: a DTensor that holds a sum which processes have not added yet (placement Partial) behaves as its
# sum, as in arithmetic, comparisons and full_tensor(): that is what a DTensor's value is.
# What happens: item(), float() and int() return this process's part, without an error or a warning: 1 + 2 + 3 of
# 1, ..., 6 over two processes, and another number on each process. Maxima, minima and means have the same fault.
# fill_(3) writes 3 into every part, so the value is 3 times the number of processes; cosine_embedding_loss, which fills
# a tensor made like its sums of products, is (processes - cosine) for a pair of label 1 whose features are sharded, with
# right gradients. ones_like, full_like, zero_, add_, 1 - x and comparisons are right.
# So x.sum().item() is wrong, and (x.sum() + 0).item() right, because adding a number first asks for the sum.
# Versions: torch 2.15.0, the same with 2.14.1; CPU, two and three processes over gloo.
# Seen: 50 operators on pending sums, maxima, minima and means, compared with plain tensors.
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
import os
import sys
import warnings

import torch
import torch.multiprocessing
import torch.nn.functional as F
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def work(rank, world, meeting):
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo", f"file://{meeting}{world}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    values = torch.arange(1.0, 7.0)
    sharded = distribute_tensor(values, mesh, [Shard(0)])
    own = values.chunk(world)[rank]
    reductions = {"sum": torch.sum, "amax": torch.amax, "amin": torch.amin, "mean": torch.mean}
    seen = []
    for name, reduce in reductions.items():
        pending, right = reduce(sharded), reduce(values).item()
        seen.append((name, right, pending.item(), pending.full_tensor().item(), reduce(own).item()))
    filled = sharded.sum().fill_(3).full_tensor().item()
    added = (sharded.sum() + 0).item()

    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 1, 6, generator=generator, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    plain = F.cosine_embedding_loss(left, right, one).item()
    features = [distribute_tensor(each, mesh, [Shard(1)]) for each in (left, right)]
    label = distribute_tensor(one, mesh, [Replicate()])
    loss = F.cosine_embedding_loss(*features, label).full_tensor().item()
    if rank == 0:
        for name, want, item, full, part in seen:
            print(f"{world} processes, {name:>4}: {want:.2f}; full_tensor {full:.2f}; item {item:.2f}")
            assert full == want
            assert item == part
        print(f"{world} processes, fill_(3): {filled}; (sum + 0).item(): {added}")
        print(f"{world} processes, cosine embedding loss: plain {plain:.4f}, DTensor {loss:.4f}")
        assert filled == 3 * world
        assert added == 21
        assert abs(loss - plain - (world - 1)) < 1e-9
    distributed.destroy_process_group()


if __name__ == "__main__":
    for world in (2, 3):
        torch.multiprocessing.spawn(work, (world, sys.argv[1]), world)
    print("as seen")
END
"$python" "$work/script.py" "$work/meeting"
