"""A state becomes the checkpoint, or the adapter, that ``save_pretrained`` would have written."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hfscale
from hfscale import ParallelConfig
from hfscale.cli import main
from hfscale.testing import RankPool

from ..tiny_models import tiny
from .state_runs import LAYOUTS, build

Pools = Callable[[int], RankPool]


def both(kind: str, layout: str, directory: str) -> None:
    model = build(kind, layout, 0, torch.float32)
    hfscale.save_state(model, f"{directory}/states/step-1", step=1)
    hfscale.save_pretrained(model, f"{directory}/saved", max_shard_size="40KB")


@pytest.mark.daily("lora-tp2", "mixture-ep2-cut")
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("tied", "zbv"), ("ragged", "tp2-shard2"), ("mixture", "ep2-cut"), ("lora", "tp2")],
)
def test_converted(
    pools: Pools, tmp_path: Path, kind: str, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pools(ParallelConfig(**LAYOUTS[layout]).total_size).run(both, kind, layout, str(tmp_path))
    assert (
        main(["convert", f"{tmp_path}/states", f"{tmp_path}/out", "--max-shard-size", "40KB"]) == 0
    )
    assert f"a{'n adapter' if kind == 'lora' else ' model'} of step 1" in capsys.readouterr().out
    (tmp_path / "out" / ".incomplete").mkdir()  # of a command that was killed
    for flags, code in {(): 2, ("--overwrite",): 0}.items():
        assert (
            main(
                [
                    "convert",
                    f"{tmp_path}/states",
                    f"{tmp_path}/out",
                    "--max-shard-size",
                    "40KB",
                    *flags,
                ]
            )
            == code
        )
    assert "out has files already (" in capsys.readouterr().err
    saved = tmp_path / "saved"
    out = tmp_path / "out"
    names = {path.name for path in saved.iterdir()}
    assert {path.name for path in out.iterdir()} >= names - {"README.md"}
    for name in names:
        if name.endswith(".safetensors"):
            one = load_file(saved / name)
            other = load_file(out / name)
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)
        else:
            assert (saved / name).read_bytes() == (out / name).read_bytes(), name


def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(tmp_path / "nothing"), str(tmp_path / "out")]) == 2
    assert "is not a state" in capsys.readouterr().err


def large(directory: str) -> None:
    config = tiny("llama", vocab_size=1 << 17, hidden_size=256, num_hidden_layers=1)
    hfscale.save_state(hfscale.from_config(config, parallel=ParallelConfig(tp_size=2)), directory)


@pytest.mark.slow
def test_memory(pools: Pools, tmp_path: Path) -> None:
    """At most twice the largest tensor (128 MiB, of two), and 500 MiB for the process itself."""
    pools(2).run(large, str(tmp_path / "state"))
    script = (
        "import re, sys; from hfscale.cli import main; assert main(sys.argv[1:]) == 0; "
        # not ru_maxrss, which begins with what the process that started this one had
        "print(int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) >> 10)"
    )
    argv = [sys.executable, "-c", script, "convert", str(tmp_path / "state"), str(tmp_path / "out")]
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    assert int(done.stdout.split()[-1]) <= 2 * 128 + 500
