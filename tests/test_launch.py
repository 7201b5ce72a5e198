"""The documented launch line starts the number of ranks asked for, on a machine without GPUs too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
if "bare" in sys.argv:  # without imports
    sys.stdout.write(f"RANK {os.environ['RANK']} OF {os.environ['WORLD_SIZE']}\\n")
    raise SystemExit
import torch
torch.set_num_threads(1)
import hfscale
from transformers import LlamaConfig

config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, vocab_size=67)
axis = "pp_size" if "stages" in sys.argv else "tp_size"
accelerator = hfscale.Accelerator() if "accelerator-first" in sys.argv else None
try:
    model = hfscale.from_config(config, parallel=hfscale.ParallelConfig(**{axis: 2}))
except hfscale.MeshError as error:
    print("REFUSED", error, flush=True)
    raise SystemExit(3)
accelerator = accelerator or hfscale.Accelerator()
model = accelerator.prepare(model)
ids = torch.arange(12).repeat(2, 1)
loss = hfscale.train_step(model, {"input_ids": ids, "labels": ids})
# one write per line: two ranks share the pipe
state = accelerator.state  # of processes; the accelerator counts distinct batches, of which there is one
place = f"RANK {state.process_index} OF {state.num_processes} MAIN {accelerator.is_main_process}"
assert (accelerator.process_index, accelerator.num_processes) == (0, 1)
sys.stdout.write(f"{place} LOSS {loss.item():.6f}\\n")
sys.stdout.flush()
accelerator.end_training()
"""


ACCELERATE = "accelerate.commands.launch"
TORCHRUN = "torch.distributed.run"
TWO = ["--multi_gpu", "--num_processes", "2"]
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "ACCELERATE_USE_CPU")


def launch(
    tmp_path: Path, options: list[str], *arguments: str, launcher: str = ACCELERATE
) -> subprocess.CompletedProcess[str]:
    """Without ``ACCELERATE_USE_CPU``: a machine that has no GPU need not be told so."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {key: value for key, value in os.environ.items() if key not in _OF_LAUNCHERS}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", launcher, *options, str(script), *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def test_as_many_as_asked_for_start(tmp_path: Path) -> None:
    done = launch(tmp_path, ["--main_process_port", "0", *TWO], "bare")
    assert sorted(done.stdout.splitlines()) == ["RANK 0 OF 2", "RANK 1 OF 2"], (
        done.stdout + done.stderr
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "options", "arguments"),
    [
        (ACCELERATE, TWO, ["stages"]),
        (ACCELERATE, TWO, ["accelerator-first"]),
        # people who come with an FSDP launch line get hfscale's data axes, not a second wrapper
        (
            ACCELERATE,
            ["--use_fsdp", "--fsdp_version", "2", "--num_processes", "2"],
            ["accelerator-first"],
        ),
        (TORCHRUN, ["--nproc_per_node", "2"], []),
        (TORCHRUN, ["--nproc_per_node", "2"], ["accelerator-first"]),
    ],
)
def test_two_ranks_start(
    tmp_path: Path, launcher: str, options: list[str], arguments: list[str]
) -> None:
    free_port = ["--main_process_port", "0"] if launcher == ACCELERATE else ["--standalone"]
    done = launch(tmp_path, [*free_port, *options], *arguments, launcher=launcher)
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("RANK"))
    places = ["RANK 0 OF 2 MAIN True", "RANK 1 OF 2 MAIN False"]
    assert [line.split(" LOSS ")[0] for line in lines] == places, done.stdout + done.stderr
    assert len({line.split(" LOSS ")[1] for line in lines}) == 1


@pytest.mark.slow
def test_the_wrong_number_is_refused(tmp_path: Path) -> None:
    """`--cpu --num_processes 2` starts one process, silently: the message gives the line that starts two."""
    done = launch(tmp_path, ["--cpu", "--num_processes", "2"])
    assert done.returncode != 0
    assert "tp2 needs 2 process(es) and 1 were started" in done.stdout
    assert "accelerate launch --multi_gpu --num_processes 2" in done.stdout
