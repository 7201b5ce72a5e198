"""A state that was damaged in any way is refused in words on every rank, with the run unchanged, or loaded right."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import CheckpointError, HFScaleError
from hfscale.distributed.files.complete import MARK, FileSum, mark_complete
from hfscale.testing import RankPool

from ..tiny_models import tiny
from .test_faults import Run

Pools = Callable[[int], RankPool]
Damage = Callable[[Path], Any]
INDEX = "state.json"
WEIGHTS = "rank-00001.safetensors"
REST = "rank-00001.pt"
SHARDS = "model.safetensors.index.json"
SHARD = "model-00001-of-00003.safetensors"
NORM = "model.norm.weight"


def edited(name: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda directory: (directory / name).write_bytes(change((directory / name).read_bytes()))


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 16]) + content[middle + 1 :]


def replaced(name: str, make: Callable[[Path], Any]) -> Damage:
    def damage(directory: Path) -> None:
        (directory / name).unlink()
        make(directory / name)

    return damage


def files() -> Iterator[tuple[str, Damage]]:
    for name in (INDEX, MARK, WEIGHTS, REST, "config.json"):
        yield f"{name}: deleted", lambda d, name=name: (d / name).unlink()
        yield f"{name}: empty", edited(name, lambda _: b"")
        yield f"{name}: cut", edited(name, lambda content: content[: len(content) // 2])
        yield f"{name}: longer", edited(name, lambda content: content + b"more")
        yield f"{name}: one bit", edited(name, flipped)
        yield f"{name}: garbage", edited(name, lambda content: os.urandom(len(content)))
        yield f"{name}: a directory", replaced(name, Path.mkdir)
        yield f"{name}: a loop", replaced(name, lambda path: path.symlink_to(path))
        yield f"{name}: nowhere", replaced(name, lambda path: path.symlink_to("/nowhere/at/all"))
    yield "shards swapped", swapped


def swapped(directory: Path) -> None:
    first = directory / "rank-00000.safetensors"
    second = directory / WEIGHTS
    aside = directory / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def told(name: str, change: Callable[[Any], Any]) -> Damage:
    """Valid JSON of other contents."""

    def damage(directory: Path) -> None:
        content = json.loads((directory / name).read_text())
        change(content)
        (directory / name).write_text(json.dumps(content))

    return damage


def saved(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """A valid file of other contents."""

    def damage(directory: Path) -> None:
        content = torch.load(directory / REST, weights_only=True)
        change(content)
        torch.save(content, directory / REST)

    return damage


def first(tensors: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(each for key, each in tensors.items() if key.startswith(kind) and each.get("cuts"))


MARKS = {
    "null": edited(MARK, lambda _: b"null"),
    "a list": edited(MARK, lambda _: b"[]"),
    "no files": told(MARK, lambda mark: mark.pop("files")),
    "no file": told(MARK, lambda mark: mark.update(files={})),
    "less files": told(MARK, lambda mark: mark["files"].pop(WEIGHTS)),
    "files of text": told(MARK, lambda mark: mark.update(files="all")),
    "sizes of text": told(MARK, lambda mark: mark["files"].update({WEIGHTS: ["many", "sums"]})),
    "one number": told(MARK, lambda mark: mark["files"].update({WEIGHTS: 7})),
    "outside": told(MARK, lambda mark: mark["files"].update({"../x": [1, 1]})),
    "absolute": told(MARK, lambda mark: mark["files"].update({"/etc/passwd": [1, 1]})),
    "text": told(MARK, lambda mark: mark.update(written="yesterday")),
}
INDICES = {
    "a number": edited(INDEX, lambda _: b"7"),
    "a list": edited(INDEX, lambda _: b"[]"),
    "another version": told(INDEX, lambda index: index.update(version=1)),
    "no version": told(INDEX, lambda index: index.pop("version")),
    "no tensors": told(INDEX, lambda index: index.pop("tensors")),
    "empty": told(INDEX, lambda index: index.update(tensors={})),
    "tensors of text": told(INDEX, lambda index: index.update(tensors="all")),
    "another field": told(INDEX, lambda index: index.update(more=1)),
    "no sizes": told(INDEX, lambda index: index.pop("sizes")),
    "sizes of text": told(INDEX, lambda index: index.update(sizes={"tp": "two"})),
    "no axes": told(INDEX, lambda index: index.update(axes=[])),
    "negative axes": told(INDEX, lambda index: index.update(axes=[[["tp", -2]], [["tp", 0]]])),
    "no shape": told(INDEX, lambda index: first(index["tensors"], "weights").pop("shape")),
    "another shape": told(
        INDEX, lambda index: first(index["tensors"], "weights").update(shape=[3, 3])
    ),
    "a shape of text": told(
        INDEX, lambda index: first(index["tensors"], "weights").update(shape="wide")
    ),
    "a huge state": told(
        INDEX, lambda index: first(index["tensors"], "optimizer").update(shape=[10**9, 10**9])
    ),
    "cuts of text": told(INDEX, lambda index: first(index["tensors"], "weights").update(cuts="tp")),
    "uncut": told(INDEX, lambda index: first(index["tensors"], "weights").update(cuts=[])),
    "a home that is no rank": told(
        INDEX, lambda index: first(index["tensors"], "weights").update(home=99)
    ),
    "no weights": told(INDEX, lambda index: index["tensors"].pop("weights/lm_head.weight")),
    "groups of text": told(INDEX, lambda index: index.update(groups="all")),
    "no groups": told(INDEX, lambda index: index.update(groups=[])),
    "numbers of text": told(INDEX, lambda index: index.update(numbers="none")),
    "others of text": told(INDEX, lambda index: index.update(others="none")),
    "no batches": told(INDEX, lambda index: index.update(batch_world=0)),
    "an optimizer of text": told(INDEX, lambda index: index.update(optimizer="fast")),
    "a step of text": told(INDEX, lambda index: index.update(step="three")),
}
RESTS = {
    "nothing": saved(dict.clear),
    "no options": saved(lambda rest: rest.pop("options")),
    "fewer options": saved(lambda rest: rest["options"].clear()),
    "options of text": saved(lambda rest: rest.update(options=["all"])),
    "no streams": saved(lambda rest: rest.update(random={})),
    "streams of text": saved(
        lambda rest: rest.update(random={"torch": "x", "python": "y", "numpy": "z"})
    ),
    "short streams": saved(
        lambda rest: rest["random"].update(torch=torch.zeros(7, dtype=torch.uint8))
    ),
    "no scheduler": saved(lambda rest: rest.update(others={})),
    "a scheduler of text": saved(lambda rest: rest["others"].update(scheduler="linear")),
    "parts of text": saved(lambda rest: rest.update(parts="all")),
    "parts of numbers": saved(lambda rest: rest.update(parts={"LossScale": 7})),
}


def cases() -> Iterator[tuple[str, Damage, dict[str, Any]]]:
    for name, damage in files():
        yield name, damage, {}
        if WEIGHTS in name and "garbage" not in name and "one bit" not in name:
            yield f"{name}, not verified", damage, {"verify": False}
    for kind, changes in (("mark", MARKS), ("index", INDICES), ("rest", RESTS)):
        for name, damage in changes.items():
            yield f"{kind}: {name}", damage if kind == "mark" else marked(damage), {}


def marked(damage: Damage) -> Damage:
    """Damage with sizes and checksums that fit it."""

    def damaged(directory: Path) -> None:
        damage(directory)
        found = [path for path in directory.iterdir() if path.name != MARK]
        mark_complete(directory, {path.name: FileSum.of_file(path) for path in found}, 1)

    return damaged


def loaded(root: str) -> dict[str, str]:
    """What each case says on this rank."""
    run = Run({"tp_size": 2})
    run.step()
    whole = Path(root) / "whole"
    hfscale.save_state(run.model, whole, **run.others, step=1)
    right = run.everything()
    run.step()
    before = run.everything()
    answers = {}
    for name, damage, options in cases():
        target = Path(root) / "state"
        if dist.get_rank() == 0:
            shutil.copytree(whole, target)
            damage(target)
        dist.barrier()
        try:
            hfscale.load_state(run.model, target, **run.others, **options)
            now = run.everything()
            answers[name] = "right" if now == right else "WRONG: taken"
            before = now
        except Exception as error:
            words = isinstance(error, CheckpointError) and str(target) in str(error)
            unchanged = run.everything() == before
            answers[name] = str(error) if words and unchanged else f"WRONG ({unchanged}): {error!r}"
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(target)
    return answers


def test_damaged_states_are_refused_in_words(pools: Pools, tmp_path: Path) -> None:
    every = pools(2).run(loaded, str(tmp_path))
    if "SHOW" in os.environ:
        for name in every[0]:
            print(name, *(each[name].replace(str(tmp_path), "") for each in every), sep="\n    ")
    for each in every:
        assert {name: text for name, text in each.items() if "WRONG" in text} == {}
    assert len(every[0]) > 55


CHECKPOINTS: dict[str, tuple[str, Damage]] = {
    "config garbage": ("config.json", edited("config.json", lambda _: bytes(range(128, 255)))),
    "config empty": ("config.json", edited("config.json", lambda _: b"")),
    "config a number": ("config.json", edited("config.json", lambda _: b"7")),
    "config without type": (
        "config.json",
        told("config.json", lambda config: config.pop("model_type")),
    ),
    "config of text": (
        "config.json",
        told("config.json", lambda config: config.update(hidden_size="wide")),
    ),
    "activation": (
        "strange",
        told("config.json", lambda config: config.update(hidden_act="strange")),
    ),
    "index garbage": (SHARDS, edited(SHARDS, lambda _: bytes(range(128, 255)))),
    "index a list": (SHARDS, edited(SHARDS, lambda _: b"[]")),
    "index without map": (SHARDS, told(SHARDS, lambda index: index.pop("weight_map"))),
    "index of numbers": (SHARDS, told(SHARDS, lambda index: index["weight_map"].update({NORM: 7}))),
    "index outside": (
        SHARDS,
        told(SHARDS, lambda index: index["weight_map"].update({NORM: "../x.safetensors"})),
    ),
    "index nowhere": (
        "x.safetensors",
        told(SHARDS, lambda index: index["weight_map"].update({NORM: "x.safetensors"})),
    ),
    "shard garbage": (SHARD, edited(SHARD, lambda _: bytes(range(256)))),
    "shard cut": (SHARD, edited(SHARD, lambda content: content[:-9])),
    "shard of text": (
        SHARD,
        edited(SHARD, lambda content: content.replace(b'"shape":[67,32]', b'"shape":"67,32"', 1)),
    ),
}


def test_damaged_checkpoints_are_refused_by_the_name_of_the_file(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(
        tmp_path / "whole", max_shard_size="30KB"
    )
    for name, (file, damage) in CHECKPOINTS.items():
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        damage(tmp_path / name)
        with pytest.raises(HFScaleError) as caught:
            hfscale.from_pretrained(tmp_path / name)
        assert file in str(caught.value), name
