"""The built package, installed where nothing else of the repository is: it has what it needs, and its command works."""

import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from hfscale.recipes import LIBRARY
from tests.tiny_models import tiny

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
TOY = {
    "name": "toy",
    "parallel.tp_size": 1,
    "data.include": "[json/*]",
    "data.validation_fraction": 0.4,
    "data.sequence_length": 16,
    "data.validation_sequences": 4,
    "model.vocab_size": 300,
    "model.hidden_size": 32,
    "model.intermediate_size": 64,
    "model.num_hidden_layers": 2,
    "model.num_attention_heads": 4,
    "model.num_key_value_heads": 2,
    "training.steps": 2,
    "training.batch_size": 2,
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A build leaves files behind, and would ship those of an earlier one.
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "hfscale", source / "hfscale", ignore=shutil.ignore_patterns("__pycache__")
    )
    command = [
        *PIP,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        str(source),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (built,) = source.glob("*.whl")
    return built


def test_the_wheel_has_all_files_and_says_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {file for file in archive.namelist() if ".dist-info/" not in file}
        (metadata_file,) = (
            file for file in archive.namelist() if file.endswith(".dist-info/METADATA")
        )
        metadata = Parser().parsestr(archive.read(metadata_file).decode())
        assert any(file.endswith("dist-info/licenses/LICENSE") for file in archive.namelist())
    kept = {".py", ".pyi", ".yaml", ".json", ".typed", ".md", ".jinja", ".sh"}
    expected = {
        path.relative_to(ROOT) for path in (ROOT / "hfscale").rglob("*") if path.suffix in kept
    }
    assert files == {path.as_posix() for path in expected}
    recipes = [file for file in files if "/library/" in file and file.endswith(".yaml")]
    assert len(recipes) == len(list(LIBRARY.glob("*.yaml"))) > 10
    assert metadata["License-Expression"] == "Apache-2.0"
    needed = [line.partition(";") for line in metadata.get_all("Requires-Dist", [])]
    always = {name.strip() for name, _, condition in needed if not condition}
    assert not [
        name
        for name in always
        if name.startswith(("datasets", "omegaconf", "matplotlib", "PyYAML"))
    ]
    assert {"torch>=2.13", "transformers>=5.17"} <= always
    tested = {name.strip() for name, _, condition in needed if 'extra == "tested"' in condition}
    assert {"torch<2.16", "transformers<5.25"} <= tested
    extra = {
        name.partition(">")[0] for name, _, condition in needed if 'extra == "recipes"' in condition
    }
    assert extra == {"datasets", "matplotlib", "omegaconf", "pillow", "PyYAML"}


@pytest.mark.slow
@pytest.mark.timeout(900)  # three processes that import everything, where many others run
def test_what_is_installed_trains_a_shipped_recipe_and_plans(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    elsewhere = tmp_path / "elsewhere"
    subprocess.run(
        [*PIP, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)], check=True
    )
    tiny("llama").save_pretrained(elsewhere)
    launched = ("RANK", "WORLD_SIZE", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in launched}
    environment |= {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = str(site / "bin" / "hfscale")

    def start(*line: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            line, cwd=elsewhere, env=environment, stdout=-1, stderr=-1, text=True
        )

    asked = [f"{key}={value}" for key, value in TOY.items()]
    started = {
        "where": start(sys.executable, "-c", "import hfscale; print(hfscale.__file__)"),
        "list": start(command, "train", "--list"),
        "plan": start(command, "plan", "config.json", "--tp", "2"),
        "train": start(command, "train", "demo_pretrain", *asked),
    }
    said = {name: process.communicate() for name, process in started.items()}
    for name, process in started.items():
        assert process.returncode == 0, (name, *said[name])
    assert said["where"][0].strip() == str(site / "hfscale" / "__init__.py")
    assert "demo_lora" in said["list"][0]
    assert "on tp2 = 2 ranks" in said["plan"][0]
    assert "toy: one process" in said["train"][0]
    assert (elsewhere / "runs" / "toy" / "checkpoint" / "model.safetensors").is_file()
