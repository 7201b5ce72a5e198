"""The documented launch line starts the number of ranks asked for, on a machine without GPUs too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, torch
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
sys.stdout.write(f"RANK {accelerator.process_index} OF {accelerator.num_processes} LOSS {loss.item():.6f}\\n")
sys.stdout.flush()
accelerator.end_training()
"""


def launch(tmp_path: Path, options: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, str(script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        (["--multi_gpu", "--num_processes", "2"], []),
        (["--multi_gpu", "--num_processes", "2"], ["stages"]),
        # people who come with an FSDP launch line get hfscale's data axes, not a second wrapper
        (["--use_fsdp", "--fsdp_version", "2", "--num_processes", "2"], ["accelerator-first"]),
    ],
)
def test_two_ranks_start(tmp_path: Path, options: list[str], arguments: list[str]) -> None:
    done = launch(tmp_path, ["--main_process_port", "0", *options], *arguments)
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("RANK"))
    assert [line.split(" LOSS ")[0] for line in lines] == ["RANK 0 OF 2", "RANK 1 OF 2"], done.stdout + done.stderr
    assert len({line.split(" LOSS ")[1] for line in lines}) == 1


def test_the_wrong_number_is_refused(tmp_path: Path) -> None:
    """`--cpu --num_processes 2` starts one process, silently: the message gives the line that starts two."""
    done = launch(tmp_path, ["--cpu", "--num_processes", "2"])
    assert done.returncode != 0
    assert "tp2 needs 2 process(es) and 1 were started" in done.stdout
    assert "accelerate launch --multi_gpu --num_processes 2" in done.stdout
