"""Wrong uses of the planner's commands: one screen, no traceback, and the nearest that works."""

from pathlib import Path

import pytest

from hfscale.cli import main

from ..tiny_models import tiny

SEARCH = "search MODEL"
STEP = "--gpus 8 --tokens-per-step 256K"
WRONG = {
    "estimate MODEL --hardware h10": "nearest by name: 'h100'",
    "estimate MODEL --hardware v100": "known are a100-40",
    "estimate MODEL --hardware FOLDER/none.json": "hfscale calibrate --out FILE",
    "estimate MODEL --hardware FOLDER/empty.json": "must be positive numbers",
    "estimate MODEL --hardware FOLDER/broken.json": "hfscale calibrate --out FILE",
    "estimate MODEL --tp 3": "tp_size",
    "estimate MODEL --tp 0": "tp_size",
    "estimate MODEL --pp 3": "pp_size",
    "estimate MODEL --ep 2": "ep_size",
    "estimate MODEL --batch-size 0": "at least 1",
    "estimate MODEL --sequence-length 0": "at least 1",
    "estimate MODEL --accumulate 0": "at least 1",
    "estimate MODEL --optimizer adamx": "adamw",
    "estimate MODEL --recompute most": "full",
    "estimate MODEL --recompute 0": "recompute",
    "estimate MODEL --offload weights": "activations, parameters or optimizer",
    "estimate MODEL --offload parameters": "dp_shard_size=2",
    "estimate MODEL --lora nothing": "nothing",
    "estimate MODEL --rank 4": "--lora",
    "estimate MODEL --lora --rank 0": "at least 1",
    "estimate MODEL --dtype float8": "float",
    "estimate MODEL --html FOLDER/no/page.html": "is not a folder",
    "estimate FOLDER/nowhere": "nowhere",
    f"{SEARCH} --gpus 0 --tokens-per-step 256K": "at least 1",
    f"{SEARCH} --gpus 11 --tokens-per-step 32K": "Nearest: 8 GPUs",
    f"{SEARCH} --gpus 8 --tokens-per-step much": "4M",
    f"{SEARCH} --gpus 8 --tokens-per-step 1000": "less than one sequence",
    f"{SEARCH} {STEP} --max-memory much": "60GiB",
    f"{SEARCH} {STEP} --max-memory 200GiB": "at most the machine's 79.6 GiB",
    f"{SEARCH} {STEP} --max-memory 1MiB": "Nearest that works",
    f"{SEARCH} {STEP} --max-memory 0GiB": "no size",
    f"{SEARCH} {STEP} --quantize nf4": "give --lora as well",
    f"{SEARCH} {STEP} --quantize nf5": "nf4",
    f"{SEARCH} {STEP} --hardware h1000": "nearest by name: 'h100'",
    f"{SEARCH} {STEP} --learning-rate 1e-4": "--its-tokens-per-step",
    f"{SEARCH} {STEP} --sequence-length 0": "at least 1",
    f"{SEARCH} {STEP} --out FOLDER/no/recipe.yaml": "is not a folder",
    f"{SEARCH} {STEP} --recompute selective": "none, elementwise, full",
    f"{SEARCH} {STEP} --recompute full --tile-tokens 1048576": "no layout of 8 GPUs, recompute=full, tile_tokens",
    f"{SEARCH} {STEP} --tile-tokens 2048": "recompute='full' or 'elementwise'",
    f"{SEARCH} {STEP} --offload weights": "activations, parameters or optimizer",
    f"{SEARCH} --tokens-per-step 256K": "--gpus",
    "plan MODEL --tile-tokens 64": "recompute='full' or 'elementwise'",
    "plan MODEL --dry-run --tokens 0": "at least 1",
    "plan MODEL --dry-run --quantize nf4": "leave --quantize out",
    "plan MODEL --dry-run --tp 3": "tp_size",
    "calibrate --seconds 0": "at most 5",
    "calibrate --like v100": "known are a100-40",
    "calibrate --out FOLDER/no/mine.json": "is not a folder",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("wrong")
    tiny("llama").save_pretrained(found / "model")
    (found / "empty.json").write_text("{}")
    (found / "broken.json").write_text("{'name'")
    return found


@pytest.mark.parametrize("line", WRONG)
def test_wrong_use_is_answered(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = line.replace("MODEL", str(folder / "model")).replace("FOLDER", str(folder)).split()
    try:
        code = main(argv)
    except SystemExit as refused:  # argparse's own
        code = int(refused.code or 0)
    said = capsys.readouterr()
    assert code != 0, said.out
    assert "Traceback" not in said.err
    assert len(said.err.splitlines()) < 25
    assert WRONG[line] in said.err


def test_flags_of_training_and_memory_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    shared = (
        "quantize",
        "lora",
        "rank",
        "optimizer",
        "mixed-precision",
        "recompute",
        "tile-tokens",
        "offload",
    )
    for command in ("plan", "estimate", "search"):
        assert main([command, "--help"]) == 0
        said = capsys.readouterr().out
        assert [name for name in shared if f"--{name}" not in said] == [], command
