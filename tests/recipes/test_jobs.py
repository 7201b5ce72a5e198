"""Job files of clusters: read as the cluster, the shell and Accelerate read them."""

import re
import shlex
import subprocess

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser

from hfscale.cli import main
from hfscale.recipes.launch import job_file
from hfscale.recipes.schema import RecipeError

ARGUMENTS = ["my recipe.yaml", "training.steps=3", "name=It's 1"]


def _parsed(line: str, **variables: str) -> object:
    """The launch line, as the shell hands it on and Accelerate reads it."""
    said = subprocess.run(["bash", "-c", f"printf '%s\\n' {line}"], capture_output=True, text=True, check=True,
                          env=variables)  # fmt: skip
    words = said.stdout.splitlines()
    assert words[:2] == ["accelerate", "launch"]
    return launch_command_parser().parse_args(words[2:])


@pytest.mark.parametrize(("processes", "nodes", "gpus"), [(16, 2, 8), (4, 1, 4), (8, 1, 8)])
def test_slurm(processes: int, nodes: int, gpus: int) -> None:
    text = job_file("slurm", "It's 1", processes, 8, ARGUMENTS)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    asked = dict(re.findall(r"(?m)^#SBATCH --([\w-]+)=(.*)$", text))
    assert (asked["nodes"], asked["gpus-per-node"], asked["ntasks-per-node"]) == (
        str(nodes),
        str(gpus),
        "1",
    )
    assert asked["job-name"] == "it-s-1"
    bash, flag, line = shlex.split(text.splitlines()[-1])[1:]
    assert (bash, flag) == ("bash", "-c")
    read = _parsed(line, SLURM_NODEID="1", MAIN="node-a")
    assert (read.num_processes, read.num_machines, read.multi_gpu) == (processes, nodes, True)
    assert (read.training_script, read.training_script_args) == ("hfscale", ["train", *ARGUMENTS])
    if nodes > 1:
        assert (read.machine_rank, read.main_process_ip, read.main_process_port) == (
            1,
            "node-a",
            29500,
        )


def test_kubernetes() -> None:
    service, job = yaml.safe_load_all(job_file("kubernetes", "It's 1", 16, 8, ARGUMENTS))
    spec = job["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    pod, (container,) = spec["template"]["spec"], spec["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert service["spec"]["selector"] == spec["template"]["metadata"]["labels"]
    assert service["spec"]["clusterIP"] == "None"
    read = _parsed(container["command"][2], JOB_COMPLETION_INDEX="1")
    assert (read.num_processes, read.num_machines, read.machine_rank) == (16, 2, 1)
    # Of pod 0, by the service.
    assert read.main_process_ip == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert service["metadata"]["name"] == pod["subdomain"]
    assert read.training_script_args == ["train", *ARGUMENTS]


def test_processes_that_fill_no_nodes() -> None:
    with pytest.raises(RecipeError, match="12 processes, which do not fill nodes of 8 GPUs"):
        job_file("slurm", "x", 12, 8, [])


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("RANK", raising=False)
    line = [
        "train",
        "llama8b_tp8",
        "base=m/n",
        "parallel.dp_replicate_size=2",
        "training.batch_size=64",
    ]
    assert main([*line, "--print-job", "slurm"]) == 0
    assert "#SBATCH --nodes=2" in capsys.readouterr().out
