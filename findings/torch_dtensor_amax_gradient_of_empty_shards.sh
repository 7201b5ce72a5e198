#!/bin/sh
# One would expect: the gradient of a maximum goes to the entry that is largest, or in equal parts to the largest ones,
# also where a DTensor's rows are sharded; torch.max, and amax with its dimensions written out, do so.
# What happens: after amax(), amin() and the infinity norm without a dimension, backward divides by the number of largest
# entries that the first process of the group holds, on every process. If it holds none, the first process's gradients
# are NaN and the entry's own is infinite; if it holds two of three equal ones, each gets 1/2. The value is right, and
# nothing says anything.
# A clipped infinity norm, a scale for 8 bits that trains, or a penalty on the largest logit meets it as soon as the
# largest entry is in another process's rows.
# Versions: torch 2.15.0, the same with 2.14.1; CPU, two processes over gloo.
# Seen: gradients of 150 operators on DTensors, compared with plain tensors.
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
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

FUNCTIONS = {
    "amax()": lambda x: x.amax(),
    "infinity norm": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "amax((0, 1))": lambda x: x.amax((0, 1)),
    "max()": lambda x: x.max(),
}
INPUTS = {
    "largest in the first rows": [[9.0, 2.0], [1.0, 3.0]],
    "largest in the last rows": [[1.0, 2.0], [9.0, 3.0]],
    "two and one equal": [[9.0, 9.0], [9.0, 3.0]],
}


def gradient(function, x):
    x.requires_grad_()
    result = function(x)
    getattr(result, "full_tensor", lambda: result)().backward()
    return getattr(x.grad, "full_tensor", lambda: x.grad)()


def work(rank, meeting):
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    seen = {}
    for case, rows in INPUTS.items():
        x = torch.tensor(rows)
        for name, function in FUNCTIONS.items():
            plain = gradient(function, x.clone())
            sharded = gradient(function, distribute_tensor(x.clone(), mesh, [Shard(0)]))
            seen[case, name] = sharded
            right = torch.equal(plain, sharded)
            if rank == 0:
                print(f"{case:>26}, {name:>14}: {'right' if right else sharded.tolist()}")
    if rank == 0:
        for name in ("amax()", "infinity norm"):
            lost = seen["largest in the last rows", name]
            assert lost[0].isnan().all()
            assert lost[1, 0].isinf()
            assert seen["two and one equal", name][1, 0] == 0.5
        for name in ("amax((0, 1))", "max()"):
            assert seen["largest in the last rows", name].tolist() == [[0, 0], [1, 0]]
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (sys.argv[1],), 2)
    print("as seen")
END
"$python" "$work/script.py" "$work/meeting"
