"""A save over a directory leaves the old checkpoint or the new one wherever it is killed, and the files of others."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hfscale

from ..models import tiny
from .kills import contents, killed_at_each_event

OTHERS = {"notes.txt": "mine", "tokenizer.json": "{}", "checkpoint-500/model.safetensors": "x", "runs/a/events": "log"}
SIZES = {"1 to 1": ("5GB", "5GB"), "8 to 8": ("9KB", "9KB"), "8 to 1": ("9KB", "5GB"), "1 to 8": ("5GB", "9KB")}


def model_of(value: float, **changes: Any) -> Any:
    """A model of which every weight is ``value``."""
    return fill(hfscale.from_config(tiny("llama", num_hidden_layers=1, hidden_size=16, **changes)), value)


def fill(model: Any, value: float) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def others_of(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): path.read_text() for path in map(directory.__truediv__, OTHERS)}


def directory_with(others: dict[str, str], directory: Path) -> Path:
    for name, text in others.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    (directory / "link").symlink_to("/etc/hostname")
    return directory


def values(model: Any) -> set[float]:
    return {value for p in model.parameters() for value in p.detach().unique().tolist()}


def loaded(directory: Path, of: Callable[[Path], Any]) -> set[float]:
    """The values of all weights."""
    return values(of(directory))


@pytest.mark.parametrize("sizes", SIZES)
def test_a_killed_save(tmp_path: Path, sizes: str) -> None:
    first, second = SIZES[sizes]
    old = directory_with(OTHERS, tmp_path / "old")
    hfscale.save_pretrained(model_of(1.0), old, max_shard_size=first)
    check_kills(tmp_path, model_of(2.0), {"max_shard_size": second})


def check_kills(tmp_path: Path, model: Any, options: dict[str, Any], readers: Any = None) -> int:
    """Save ``model``, of twos, over a copy of ``old``, of ones; returns how often it was killed."""
    target, seen, kills = tmp_path / "work" / "target", dict[str, set[float]](), 0

    def prepare() -> None:
        shutil.rmtree(target.parent, ignore_errors=True)
        shutil.copytree(tmp_path / "old", target, symlinks=True)

    readers = readers or (AutoModelForCausalLM.from_pretrained, hfscale.from_pretrained)
    for number in killed_at_each_event(lambda: hfscale.save_pretrained(model, target, **options), tmp_path, prepare):
        kills += number > 0
        found = contents(target)
        if str(found) not in seen:
            one, two = (loaded(target, reader) for reader in readers)
            assert one == two
            seen[str(found)] = one
        assert others_of(target) == OTHERS, number
        assert os.readlink(target / "link") == "/etc/hostname"
    assert list(seen.values()) == [{1.0}, {2.0}]
    assert [path.name for path in target.parent.iterdir()] == ["target"]
    return kills
