#!/bin/sh
# One would expect: a loss of DTensors whose rows are sharded over processes has the gradients of the whole batch, as
# the same arithmetic written out does.
# What happens: mse_loss, smooth_l1_loss, huber_loss, binary_cross_entropy and soft_margin_loss with reduction="mean"
# have the right value, and the right gradients times the number of processes, since their backward divides by the
# elements of one process. Nothing says so, and the same mean written out, l1_loss and binary_cross_entropy_with_logits
# are right. Where rows do not divide evenly, the rows of each process have another factor, and the value is wrong too
# (also that of binary_cross_entropy_with_logits): NaN if a process has no rows, as with 9 over four. A mean written out
# is right.
# Versions: torch 2.15.0, the same with 2.14.1; CPU, two and four processes over gloo, float64.
# Seen: value and gradient of one replicated weight, divided by those of plain tensors.
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

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

LOSSES = {
    "mse_loss": F.mse_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "binary_cross_entropy": lambda given, wanted: F.binary_cross_entropy(given.sigmoid(), wanted),
    "soft_margin_loss": lambda given, wanted: F.soft_margin_loss(given, 2 * wanted.round() - 1),
    "square().mean()": lambda given, wanted: (given - wanted).square().mean(),
    "l1_loss": F.l1_loss,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
}
SCALED = list(LOSSES)[:5]

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))


def compared(loss_of, rows):
    """Return the value and the gradient of a loss over sharded rows, divided by those of plain tensors."""
    torch.manual_seed(0)
    batch, wanted = torch.randn(rows, 6, dtype=torch.float64), torch.rand(rows, 3, dtype=torch.float64)
    weight = torch.randn(6, 3, dtype=torch.float64)
    plain = weight.clone().requires_grad_()
    loss = loss_of(batch @ plain, wanted)
    loss.backward()
    sharded = [distribute_tensor(each, mesh, [Shard(0)]) for each in (batch, wanted)]
    replicated = distribute_tensor(weight, mesh, [Replicate()]).requires_grad_()
    spread = loss_of(sharded[0] @ replicated, sharded[1]).full_tensor()
    spread.backward()
    ratios = replicated.grad.full_tensor() / plain.grad
    return (spread / loss).item(), ratios.min().item(), ratios.max().item()


size, as_told = mesh.size(), True
for rows in (2 * size, 2 * size + 1):
    for name, loss_of in LOSSES.items():
        value, low, high = compared(loss_of, rows)
        if dist.get_rank() == 0:
            told = f"{size} processes, {rows} rows, {name}: value x {value:.3f}, gradients x {low:.3f}"
            print(told if high - low < 1e-9 else f"{told} to {high:.3f}")
        right = [abs(ratio - 1) < 1e-9 for ratio in (value, low, high)]
        scaled = all(abs(ratio - size) < 1e-9 for ratio in (low, high))
        even = rows % size == 0
        value_right = even or name in ("square().mean()", "l1_loss")
        as_told = as_told and right[0] == value_right
        if name not in SCALED:
            as_told = as_told and right[1] and right[2]
        else:
            as_told = as_told and (scaled if even else not right[1] and not right[2])
dist.destroy_process_group()
sys.exit(0 if as_told else 1)
END
for size in 2 4; do
    "$python" -m torch.distributed.run --nproc-per-node "$size" "$work/script.py" 2> "$work/errors" || {
        cat "$work/errors"
        exit 1
    }
done
