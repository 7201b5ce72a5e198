"""A save over a directory leaves the old checkpoint or the new one wherever it is killed, and the files of others."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import CheckpointError
from hfscale.distributed.files import replace

from ..sweeps import cases
from ..tiny_models import tiny
from .kills import contents, killed_at_each_event

OTHERS = {
    "notes.txt": "mine",
    "tokenizer.json": "{}",
    "checkpoint-500/model.safetensors": "x",
    "runs/a/events": "log",
}
SIZES = {
    "1 to 1": ("5GB", "5GB"),
    "8 to 8": ("3KB", "3KB"),
    "8 to 1": ("3KB", "5GB"),
    "1 to 8": ("5GB", "3KB"),
}


def model_of(value: float, **changes: Any) -> Any:
    """A model of which every weight is ``value``."""
    return fill(
        hfscale.from_config(tiny("llama", num_hidden_layers=1, hidden_size=16, **changes)), value
    )


def fill(model: Any, value: float) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def directory_with(others: dict[str, str], directory: Path) -> Path:
    for name, text in others.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    (directory / "link").symlink_to("/etc/hostname")
    return directory


def values(model: Any) -> set[float]:
    return {value for p in model.parameters() for value in p.detach().unique().tolist()}


def cannot(*_: object) -> None:
    raise OSError("not on this file system")


def stock_model(directory: Path) -> set[float]:
    return values(AutoModelForCausalLM.from_pretrained(directory))


def own_model(directory: Path) -> set[float]:
    return values(hfscale.from_pretrained(directory))


def check_kills(
    root: Path, model: Any, readers: Sequence[Callable[[Path], set[float]]], **options: Any
) -> int:
    """Save ``model``, of twos, over a copy of ``root/old``, of ones, with files of others beside, and kill that.

    Returns:
        how often.
    """
    target, seen, kills = root / "work" / "target", dict[str, set[float]](), 0
    directory_with(OTHERS, root / "old")

    def prepare() -> None:
        shutil.rmtree(target.parent, ignore_errors=True)
        shutil.copytree(root / "old", target, symlinks=True)

    for number in killed_at_each_event(
        lambda: hfscale.save_pretrained(model, target, **options), prepare
    ):
        kills += number > 0
        if (target / ".complete").exists():
            readers[-1](target)  # finishes it, unless nothing has been moved yet
        if (found := str(contents(target))) not in seen:
            one, *more = [reader(target) for reader in readers]
            assert all(each == one for each in more)
            seen[found] = one
        assert {name: (target / name).read_text() for name in OTHERS} == OTHERS, number
        assert (target / "link").readlink() == Path("/etc/hostname")
    assert list(seen.values()) == [{1.0}, {2.0}]
    assert [path.name for path in target.parent.iterdir()] == ["target"]
    return kills


@pytest.mark.parametrize("sizes", cases(SIZES, daily=["8 to 1"]))
def test_a_killed_save(tmp_path: Path, sizes: str) -> None:
    """Whether transformers reads it then, or hfscale."""
    first, second = SIZES[sizes]
    hfscale.save_pretrained(model_of(1.0), tmp_path / "old", max_shard_size=first)
    assert (
        check_kills(tmp_path, model_of(2.0), [stock_model, own_model], max_shard_size=second) > 50
    )


@pytest.mark.slow
def test_a_killed_save_where_directories_cannot_be_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hfscale finishes it, and may be killed in that too."""
    monkeypatch.setattr(replace, "_trade_names", cannot)
    hfscale.save_pretrained(model_of(1.0), tmp_path / "old", max_shard_size="5GB")
    assert check_kills(tmp_path, model_of(2.0), [own_model], max_shard_size="3KB") > 50
    ends = []
    for number in killed_at_each_event(
        lambda: hfscale.save_pretrained(model_of(3.0), tmp_path / "old"), int
    ):
        ends += [own_model(tmp_path / "old")] if number % 9 == 0 else []
    assert ends[-1] == {3.0}
    assert ends.index({3.0}) == ends.count({1.0}) > 0


def test_what_was_saved_after_a_killed_save_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By transformers, say, of which nobody finishes the move."""
    target = tmp_path / "target"
    hfscale.save_pretrained(model_of(1.0), target)
    monkeypatch.setattr(replace, "_trade_names", cannot)
    later = AutoModelForCausalLM.from_pretrained(target)
    kills = killed_at_each_event(lambda: hfscale.save_pretrained(model_of(2.0), target), int)
    while (target / "config.json").exists():
        next(kills)
    assert (target / ".complete").is_dir()
    fill(later, 3.0).save_pretrained(target)
    assert own_model(target) == stock_model(target) == {3.0}
    monkeypatch.undo()
    hfscale.save_pretrained(model_of(4.0), target)
    assert own_model(target) == {4.0}
    assert not (target / ".complete").exists()


def test_a_killed_save_of_an_adapter(tmp_path: Path) -> None:
    """Of another rank than the one before, so that half of each could not be loaded."""
    base = tmp_path / "base"
    hfscale.save_pretrained(model_of(0.0), base)

    def adapted(rank: int, value: float) -> Any:
        config = LoraConfig(r=rank, target_modules=["q_proj"])
        return fill(hfscale.from_pretrained(base, peft_config=config), value)

    def stock(directory: Path) -> set[float]:
        return values(
            PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), directory)
        ) - {0.0}

    def own(directory: Path) -> set[float]:
        return values(hfscale.from_pretrained(base, peft_config=str(directory))) - {0.0}

    hfscale.save_pretrained(adapted(2, 1.0), tmp_path / "old")
    assert check_kills(tmp_path, adapted(4, 2.0), [stock, own]) > 50


@pytest.mark.parametrize("name", ["../evil.safetensors", "/evil.safetensors", "", 3])
def test_an_index_names_files_of_its_own_directory_alone(tmp_path: Path, name: Any) -> None:
    target = tmp_path / "target"
    hfscale.save_pretrained(model_of(1.0), target, max_shard_size="3KB")
    first = sorted(target.glob("*.safetensors"))[0]
    shutil.copyfile(first, tmp_path / "evil.safetensors")
    index = target / "model.safetensors.index.json"
    name = f"{tmp_path}{name}" if str(name).startswith("/") else name
    index.write_text(index.read_text().replace(json.dumps(first.name), json.dumps(name)))
    for read in (hfscale.from_pretrained, hfscale.upcycle):
        with pytest.raises(CheckpointError, match="which is not in its directory"):
            read(target)
