"""Every example by task trains over two ranks, and writes what stock transformers reads.

They run as they are, with fewer steps and sequences that are shorter; ``accelerate launch`` alone is left out.
"""

import io
import math
import os
import re
import runpy
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import transformers
import yaml
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

import hfscale
from hfscale.testing import RankPool

EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "small")
SLOWER = {"classify", "distill", "dpo", "grpo", "lora", "pretrain", "reward", "vision"}
ADAPTERS = {"lora", "qlora"}


def run_example(name: str, directory: str) -> str:
    """Return what a rank prints."""
    source = (EXAMPLES / f"{name}.py").read_text()
    short, found = re.subn(r"(?m)^STEPS = \d+$", "STEPS = 2", source)
    assert found == 1
    Path(directory, f"{name}-{os.getpid()}.py").write_text(
        short.replace("LENGTH = 4096", "LENGTH = 64")
    )
    before = Path.cwd()
    printed = io.StringIO()
    AcceleratorState._reset_state(reset_partial_state=True)
    sys.path.insert(0, str(EXAMPLES))
    os.chdir(directory)
    try:
        with redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runpy.run_path(f"{name}-{os.getpid()}.py", run_name="__main__")
    finally:
        os.chdir(before)
        sys.path.remove(str(EXAMPLES))
    return printed.getvalue()


@pytest.mark.daily("moe", "embed", "qlora")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOWER else []) for name in NAMES],
)
def test_an_example_trains_over_two_ranks(
    pools: Callable[[int], RankPool], name: str, tmp_path: Path
) -> None:
    first, second = pools(2).run(run_example, name, str(tmp_path))
    losses = [float(number) for number in re.findall(r"loss'?:? '?(-?[\d.]+)", first)]
    assert losses, first
    assert all(map(math.isfinite, losses))
    assert "loss" not in second
    written = tmp_path / "runs" / "examples" / name
    if name in ADAPTERS:
        adapter = load_file(written / "adapter_model.safetensors")
        assert {key.rpartition(".lora_")[2][:1] for key in adapter} == {"A", "B"}
        assert all(value.any() for value in adapter.values())  # each has learned: B begins at zero
        written = written.with_name(f"{name}-merged")
    if written.exists():
        config = transformers.AutoConfig.from_pretrained(written)
        kind = getattr(transformers, config.architectures[0])
        model, info = kind.from_pretrained(written, output_loading_info=True)
        assert not any(info.values())
        assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_an_example_says_how_to_launch_it(name: str) -> None:
    head, code = (EXAMPLES / f"{name}.py").read_text().split('\n"""\n', 1)
    (line,) = re.findall(r"(?m)^    (accelerate launch .*)$", head)
    _, _, _, config, script = line.split()
    root = EXAMPLES.parents[1]
    assert (root / script).name == f"{name}.py"
    for file, text in ((root / config, code), (EXAMPLES / "eight_gpus.yaml", head)):
        (layout,) = re.findall(r"ParallelConfig\(([^)]+)\)", text)
        sizes = {key: int(size) for key, size in re.findall(r"(\w+)=(\d+)", layout)}
        told = yaml.safe_load(file.read_text())
        assert hfscale.ParallelConfig(**sizes).total_size == told["num_processes"]
        assert told["distributed_type"] == "MULTI_GPU"  # MULTI_CPU starts one process


def test_every_example_is_on_the_page_of_tasks() -> None:
    page = (EXAMPLES.parents[1] / "docs" / "tasks.md").read_text()
    assert sorted(set(re.findall(r"two_processes\.yaml scripts/examples/(\w+)\.py", page))) == NAMES


def test_code_on_the_page_is_the_examples_own() -> None:
    pages = [
        (EXAMPLES.parents[1] / "docs" / f"{name}.md").read_text()
        for name in ("tasks", "grpo", "distillation")
    ]
    page = "".join(pages)
    shown = re.findall(
        r"(?ms)^<!-- not run: lines of scripts/examples/(\w+)\.py, [^\n]*\n```python\n(.*?)^```",
        page,
    )
    assert sorted(name for name, _ in shown) == NAMES
    for name, code in shown:
        lines = {line.strip() for line in (EXAMPLES / f"{name}.py").read_text().splitlines()}
        assert [line for line in code.splitlines() if line.strip() not in lines] == []
