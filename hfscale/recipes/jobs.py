"""Write cluster job files that run a recipe: one launch line per node, with the node's rank."""

import re
import shlex
from collections.abc import Sequence
from functools import partial

from .launch import launch_options
from .schema import RecipeError
from .templates import environment

KINDS = {"slurm": "slurm.sh", "kubernetes": "kubernetes.yaml"}
"""Kind of cluster -> template of its job file."""
_PORT = 29500


def job_file(kind: str, name: str, processes: int, gpus_per_node: int, arguments: Sequence[str]) -> str:
    """Return a job script, one of :data:`KINDS`, that runs ``hfscale train`` with ``arguments``, a process per GPU."""
    if gpus_per_node < 1 or (processes > gpus_per_node and processes % gpus_per_node):
        raise RecipeError(
            f"the layout needs {processes} processes, which do not fill nodes of {gpus_per_node} GPUs: use another "
            "--gpus-per-node, or a layout of a multiple of it"
        )
    gpus, label = min(processes, gpus_per_node), re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "train"
    nodes = processes // gpus
    line = partial(_line, launch_options(processes, arguments), nodes)
    return environment().get_template(KINDS[kind]).render(name=label, nodes=nodes, gpus=gpus, line=line)


def _line(options: Sequence[str], nodes: int, rank: str, address: str) -> str:
    """Return the launch line, in which the shell fills in ``rank`` and ``address``."""
    if nodes == 1:
        return f"accelerate launch {shlex.join(options)}"
    own = options.index("-m")
    given = [text for text in options[:own] if text != "--main_process_port"]
    given.remove("0")
    given[given.index("--num_machines") + 1] = str(nodes)
    place = f"--machine_rank {rank} --main_process_ip {address} --main_process_port {_PORT}"
    return f"accelerate launch {shlex.join(given)} {place} {shlex.join(options[own:])}"
