"""Job files of clusters that run a recipe: the launch line once per node, told which node it is on."""

import re
import shlex
from collections.abc import Sequence

import yaml

from .launch import launch_options
from .schema import RecipeError

KINDS = ("slurm", "kubernetes")
_PORT = 29500
_IMAGE = "hfscale:latest"  # of yours, with hfscale[recipes] installed


def job_file(kind: str, name: str, processes: int, gpus_per_node: int, arguments: Sequence[str]) -> str:
    """Return the text of a job that runs ``hfscale train`` with ``arguments``.

    Args:
        kind: one of :data:`KINDS`.
        name: of the run.
        processes: that the layout needs, one for each GPU.

    Raises:
        RecipeError: the processes do not fill nodes.
    """
    if gpus_per_node < 1 or (processes > gpus_per_node and processes % gpus_per_node):
        raise RecipeError(
            f"the layout needs {processes} processes, which do not fill nodes of {gpus_per_node} GPUs: use another "
            "--gpus-per-node, or a layout of a multiple of it"
        )
    gpus, label = min(processes, gpus_per_node), re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "train"
    make = _slurm if kind == "slurm" else _kubernetes
    return make(label, processes, processes // gpus, gpus, arguments)


def _line(processes: int, nodes: int, rank: str, address: str, arguments: Sequence[str]) -> str:
    """Return the launch line; ``rank`` and ``address`` are left for the shell."""
    options = launch_options(processes, arguments)
    if nodes == 1:
        return f"accelerate launch {shlex.join(options)}"
    own = options.index("-m")
    given = [text for text in options[:own] if text != "--main_process_port"]
    given.remove("0")
    given[given.index("--num_machines") + 1] = str(nodes)
    place = f"--machine_rank {rank} --main_process_ip {address} --main_process_port {_PORT}"
    return f"accelerate launch {shlex.join(given)} {place} {shlex.join(options[own:])}"


def _slurm(name: str, processes: int, nodes: int, gpus: int, arguments: Sequence[str]) -> str:
    line = _line(processes, nodes, "$SLURM_NODEID", "$MAIN", arguments)
    return f"""#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --cpus-per-task={8 * gpus}
#SBATCH --output=%x-%j.log
# sbatch FILE. The network between nodes, where they have several: export NCCL_SOCKET_IFNAME=... GLOO_SOCKET_IFNAME=...
export OMP_NUM_THREADS=8
export MAIN=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun bash -c {shlex.quote(line)}
"""


def _kubernetes(name: str, processes: int, nodes: int, gpus: int, arguments: Sequence[str]) -> str:
    line = _line(processes, nodes, "$JOB_COMPLETION_INDEX", f"{name}-0.{name}", arguments)
    container = {
        "name": "train",
        "image": _IMAGE,
        "command": ["bash", "-c", line],
        "env": [{"name": "OMP_NUM_THREADS", "value": "8"}],
        "resources": {"limits": {"nvidia.com/gpu": gpus}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    shared = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    pod = {"subdomain": name, "restartPolicy": "Never", "containers": [container], "volumes": [shared]}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completions": nodes,
            "parallelism": nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": {"metadata": {"labels": {"run": name}}, "spec": pod},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"clusterIP": "None", "selector": {"run": name}, "publishNotReadyAddresses": True},
    }
    return str(yaml.safe_dump_all([service, job], sort_keys=False, width=1000))
