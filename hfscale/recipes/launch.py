"""Choose the layout of a run, and start its processes on this machine or write the job file of a cluster."""

import logging
import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from functools import partial

import hfscale

from .schema import Recipe, RecipeError
from .templates import environment

# Kind of cluster -> template of its job file.
KINDS = {
    "slurm": "slurm.sh",
    "kubernetes": "kubernetes.yaml",
}
_PORT = 29500


def is_launched() -> bool:
    """Return whether a launcher (``accelerate launch``, ``torchrun``) has started this process as one rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def layout_of(recipe: Recipe) -> "hfscale.ParallelConfig":  # quoted, because the name imports torch
    """Return the parallel layout that the recipe sets. If the recipe has ``fallbacks`` and a launcher started the
    processes, return the first of all these layouts that fits the number of processes.
    """
    first, *others = (
        hfscale.ParallelConfig(**fields) for fields in (recipe.parallel, *recipe.fallbacks)
    )
    return hfscale.fitting_layout([first, *others]) if others and is_launched() else first


def launch_options(processes: int, arguments: Sequence[str], nodes: int = 1) -> list[str]:
    """Return the command-line arguments with which ``accelerate launch`` runs ``hfscale train``. On several nodes, the
    arguments that tell nodes apart are left out.

    On one node, the main process's port is 0, which means any free port. Options are given even if they have default
    values, because Accelerate prints a list of the options that are left out.
    """
    ranks = ["--multi_gpu"] if processes > 1 else []
    if processes > 1 and nodes == 1:
        ranks += ["--main_process_port", "0"]
    options = [*ranks, "--num_processes", str(processes), "--num_machines", str(nodes)]
    return [
        *options,
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "-m",
        "hfscale",
        "train",
        *arguments,
    ]


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Run ``hfscale train`` in ``processes`` processes by ``accelerate launch``, and return the exit code. The
    launcher's report of a failed process is suppressed, because the process prints its own error.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    prepare_launch(processes)
    line = launch_command_parser().parse_args(launch_options(processes, arguments))
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        launch_command(line)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return int(failure.exitcode)
        name = signal.Signals(-failure.exitcode).name  # a rank that could not print its error
        why = " (often: out of memory)" if name == "SIGKILL" else ""
        print(f"hfscale train: rank {rank} was ended by {name}{why}", file=sys.stderr)
        return int(128 - failure.exitcode)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


def prepare_launch(processes: int) -> None:
    """Set the environment variables of processes that will be started on this machine; raise :class:`RecipeError` if
    there are GPUs, but fewer than ``processes``.
    """
    from .._compat.torch_device import accelerators

    gpus = accelerators().device_count()
    if not accelerators().is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "1")
    os.environ.setdefault(
        "OMP_NUM_THREADS",
        str(max(1, (os.cpu_count() or 1) // processes)),
    )
    if 0 < gpus < processes:
        raise RecipeError(
            f"the layout needs {processes} processes, but this machine has {gpus} GPU(s): use a smaller layout, or "
            "several machines. For these, --print-launch prints the command, to which Accelerate's --num_machines, "
            "--machine_rank, --main_process_ip and --main_process_port must be added"
        )


def job_file(
    kind: str, name: str, processes: int, gpus_per_node: int, arguments: Sequence[str]
) -> str:
    """Return the text of a job file for a cluster (``kind`` is one of :data:`KINDS`) that runs ``hfscale train`` with
    ``arguments``, one process per GPU.
    """
    if gpus_per_node < 1 or (processes > gpus_per_node and processes % gpus_per_node):
        raise RecipeError(
            f"the layout needs {processes} processes, which do not fill nodes of {gpus_per_node} GPUs: use another "
            "--gpus-per-node, or a layout whose size is a multiple of it"
        )
    gpus = min(processes, gpus_per_node)
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "train"
    nodes = processes // gpus
    line = partial(_line, launch_options(processes, arguments, nodes), nodes)
    return (
        environment()
        .get_template(KINDS[kind])
        .render(name=label, nodes=nodes, gpus=gpus, line=line)
    )


def _line(options: Sequence[str], nodes: int, rank: str, address: str) -> str:
    """Return the shell command that launches a run on one of ``nodes`` nodes. ``rank`` and ``address`` are shell
    expressions for the node's rank and for the address of the first node.
    """
    place = f"--machine_rank {rank} --main_process_ip {address} --main_process_port {_PORT} "
    return f"accelerate launch {place if nodes > 1 else ''}{shlex.join(options)}"
