"""Where the peers' tests are, and which of them run in which layouts."""

import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import accelerate


@dataclass(frozen=True)
class Suite:
    """The tests of one peer.

    Attributes:
        release: what is downloaded from the package index where no folder is named, if it ships tests.
        files: by how many: one test of so many runs, of each of these files (of ``tests``, without ``test_``).
        layouts: those that its tests run in with ours.
        fraction: over two ranks one test of so many of those that run in one process.
    """

    release: str | None
    files: dict[int, tuple[str, ...]]
    layouts: tuple[str, ...]
    fraction: int = 1


SUITES = {
    "trl": Suite(
        None,
        {1: tuple(f"{name}_trainer" for name in ("sft", "reward", "dpo", "kto", "grpo", "rloo"))},
        ("one", "tp2", "dp_shard2"),
        fraction=2,
    ),
    "peft": Suite(
        "peft==0.21.2",
        {
            8: (
                "adaption_prompt",
                "auto",
                "cpt",
                "helpers",
                "initialization",
                "integrations",
                "lora_conversion",
                "lora_intruders",
                "lora_variants",
                "lorafa",
                "loraplus",
                "low_level_api",
                "mixed",
                "other",
                "xlora",
                "multitask_prompt_tuning",
                "poly",
                "token_classification_qa",
                "trainable_tokens",
                "tuners_utils",
            ),
            61: (
                "decoder_models",
                "encoder_decoder_models",
                "feature_extraction_models",
                "seq_classifier",
                "target_parameters",
            ),
        },
        ("one", "tp2"),
    ),
    "accelerate": Suite(
        "accelerate==1.15.0",
        {
            1: (
                "accelerator",
                "data_loader",
                "grad_sync",
                "metrics",
                "optimizer",
                "scheduler",
                "state_checkpointing",
            )
        },
        ("one",),
    ),
    "scripts": Suite(
        None,  # installed with accelerate itself
        {1: ("script", "sync", "ops", "distributed_data_loop", "metrics")},
        ("dp_replicate2",),
    ),
    "transformers": Suite(
        None,
        {
            1: (
                "trainer",
                "trainer_callback",
                "trainer_checkpointing",
                "trainer_data",
                "trainer_evaluation",
                "trainer_hyperparameter",
                "trainer_optimizers",
                "trainer_seq2seq",
                "trainer_accelerator",
            )
        },
        ("one", "tp2", "dp_shard2"),
    ),
}


def folder_of(name: str, build: Path) -> Path | None:
    """Return the folder around a suite's tests: the named one (PEERS_TRL, ...), or a release that ships them."""
    if named := os.environ.get(f"PEERS_{name.upper()}"):
        return Path(named).expanduser().resolve()  # its tests run from there
    release = SUITES[name].release
    if name == "scripts":
        return Path(accelerate.__file__).parents[1]
    if release is None:
        return None
    folder = build / release.replace("==", "-")
    if not folder.exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
        ]
        subprocess.run(
            [*command, "--no-binary", ":all:", "--dest", str(build), release], check=True
        )
        with tarfile.open(build / f"{folder.name}.tar.gz") as archive:
            archive.extractall(build, filter="data")
        (folder / "tests" / "__init__.py").touch()  # their tests import each other as a package's
    return folder


def paths_of(name: str, folder: Path) -> dict[int, list[Path]]:
    """Return the suite's files that are there, by how many: one test of so many runs."""
    below = folder / "accelerate/test_utils/scripts" if name == "scripts" else folder / "tests"
    found: dict[int, list[Path]] = {}
    for every, files in SUITES[name].files.items():
        listed = [path for file in files for path in sorted(below.rglob(f"test_{file}.py"))]
        found[every] = listed
    return found
