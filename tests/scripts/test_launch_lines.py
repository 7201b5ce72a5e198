"""Launch lines in pages and examples are what Accelerate's own parser, and that of the Hub's jobs, read."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("scripts/examples/*.py")])
LINES = [
    pytest.param(page, line, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, line in enumerate(
        re.findall(r"(?m)^ +.*?\b(accelerate launch --.*?)['\"]?$", page.read_text())
    )
]
SHELL = {
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "JOB_COMPLETION_INDEX": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "MAIN": "node-a",
}


@pytest.mark.parametrize(("page", "line"), LINES)
def test_accelerate_understands(page: Path, line: str) -> None:
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {line}"],
        capture_output=True,
        text=True,
        check=True,
        env=SHELL,
    ).stdout.splitlines()
    read = launch_command_parser().parse_args(words[2:])
    assert read.training_script.endswith((".py", "hfscale", "...")) or read.module
    if read.num_machines is not None and read.num_machines > 1:
        assert (
            read.num_machines,
            read.num_processes,
            read.machine_rank,
            read.main_process_port,
        ) == (2, 16, 1, 29500)
        assert read.main_process_ip in ("node-a", "train-0.train")
    if read.num_processes is not None and read.num_processes > 1:
        assert read.multi_gpu  # or accelerate would start one process on machines without GPUs
    if read.config_file:
        assert (ROOT / read.config_file).exists()
        assert (ROOT / read.training_script).exists()


def test_hf_jobs_understands() -> None:
    cli = pytest.importorskip("huggingface_hub.cli.hf")
    (line,) = re.findall(
        r"(?m)^    (hf jobs run .*)$", (ROOT / "docs" / "launching.md").read_text()
    )
    words = shlex.split(line)[1:]
    context = cli.app.make_context("hf", words)
    run = cli.app.get_command(context, "jobs").get_command(context, "run")
    parsed = run.make_context("run", words[2:]).params
    assert (parsed["image"], parsed["command"][:2]) == ("IMAGE", ("bash", "-c"))
