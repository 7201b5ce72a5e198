"""``hfscale doctor``: what it finds wrong, and what it lets pass."""

import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hfscale.cli import main
from hfscale.cli.doctor_checks import Finding, recipe_check as recipe, this_machine as machine
from hfscale.cli.ranks import MeasurementError
from hfscale.recipes.read import read_recipe
from hfscale.testing import RankPool

from ...tiny_models import tiny

Pools = Callable[[int], RankPool]


def test_versions_outside_of_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.13.0+cpu", "transformers": "5.30.0", "trl": "1.16.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    asked = ["torch>=2.14", "transformers>=5.17", "peft>=0.21", 'bitsandbytes>=0.5; extra == "bnb"']
    asked += [
        'trl>=1.15; extra == "trl"',
        'ruff; extra == "dev"',
        'transformers<5.24; extra == "tested"',
    ]
    monkeypatch.setattr(metadata, "requires", lambda _: asked)
    monkeypatch.setattr(metadata, "version", version)
    found = {each.about: each for each in machine.versions()}
    assert {name: each.verdict for name, each in found.items()} == {
        "torch": "problem",
        "transformers": "note",
        "peft": "problem",
        "bitsandbytes": "note",
        "trl": "ok",
    }
    assert "2.13.0+cpu, but hfscale is made for >=2.14" in found["torch"].text
    assert found["transformers"].text.endswith(
        "not tested with: transformers 5.30.0 (tested: <5.24)"
    )
    assert "pip install 'peft>=0.21'" in found["peft"].text


@pytest.mark.parametrize(
    ("text", "verdict", "said"),
    [
        (
            "distributed_type: MULTI_CPU\nnum_processes: 2\n",
            "problem",
            "starts one, silently: write --multi_gpu",
        ),
        (
            "distributed_type: 'NO'\nuse_cpu: true\nnum_processes: 4\n",
            "problem",
            "--num_processes 4",
        ),
        ("distributed_type: MULTI_GPU\nnum_processes: 8\n", "ok", "MULTI_GPU, 8 process(es)"),
        (
            "distributed_type: FSDP\nnum_processes: 8\n",
            "note",
            "asks for FSDP, which hfscale does not use",
        ),
        ("distributed_type: MULTI_GPU\nmixed_precision: bf16\n", "note", "mixed_precision='bf16'"),
        ("distributed_type: [\n", "problem", "cannot be read"),
        (None, "ok", "no config file"),
    ],
)
def test_what_accelerate_was_told(
    tmp_path: Path, text: str | None, verdict: str, said: str
) -> None:
    file = tmp_path / "config.yaml"
    if text is not None:
        file.write_text(text)
    found = machine.accelerate_config(file)
    assert found.verdict == verdict
    assert said in found.text


def test_gaps_in_a_gpus_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="H100", total_memory=80e9)
    one = SimpleNamespace(device_count=lambda: 1, get_device_properties=lambda _: gpu)
    monkeypatch.setattr(machine, "accelerators", lambda: one)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert any(
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in each.text
        for each in machine.devices()
    )
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert not any("expandable" in each.text for each in machine.devices())


def test_a_step_in_8_bits_and_ranks_that_talk(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.eight_bit_step() == Finding(
        "8-bit step", "ok", "AdamW on cpu, its state in uint8"
    )
    assert pools(2).run(machine.sum_of_ranks, torch.device("cpu")) == [1.0, 1.0]

    def silent(*_: Any, **__: Any) -> float:
        raise MeasurementError("2 processes could not communicate: no answer within 120 s")

    for answer, verdict, said in (
        (lambda *_, **__: 1.0, "ok", "communicate over gloo"),
        (silent, "problem", "no answer"),
    ):
        monkeypatch.setattr(machine, "run_ranks", answer)
        found = machine.collectives()
        assert found.verdict == verdict
        assert said in found.text
    monkeypatch.setattr(machine, "run_ranks", lambda *_, **__: 0.0)
    assert "summed up their numbers to 0.0" in machine.collectives().text


@pytest.mark.parametrize(
    ("change", "about", "said"),
    [
        ("parallel.tp_size=3", "plan", "tp_size=3 does not divide the 8 attention heads"),
        ("parallel.tp=2", "layout", "did you mean 'tp_size'"),
        ("parallel.dp_shard_size=3", "batches", "does not divide over the 3 distinct batches"),
        ("model.hidden_size=250", "plan", "is not a multiple of the number of attention heads"),
        ("training.optimizer=adamm", "memory", "adamm"),
    ],
)
def test_problems_of_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, about: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    problems = {each.about: each.text for each in recipe.examine(read_recipe("demo_pretrain", [change]))
                if each.verdict == "problem"}  # fmt: skip
    assert said in problems[about]


def test_a_recipe_with_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny("llama").save_pretrained(tmp_path / "base")
    line = [
        "doctor",
        "--recipe-only",
        "demo_lora",
        f"base={tmp_path / 'base'}",
        "parallel.dp_shard_size=2",
    ]
    assert main(line) == 0
    out = capsys.readouterr().out
    assert "4 process(es): dp_shard 2, tp 2" in out
    assert (
        "2 distinct in a step, each of 1 microbatch(es) of 4 sequence(s): effective batch 8 sequences, 2,048"
        in out
    )
    assert "100.0% of parameters of the layers have adapters" in out
    assert "predicted peak of the rank with most:" in out
    assert out.endswith("\nno problems\n")
    assert main(["doctor", "--recipe-only", "demo_lora", "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out).values()
    assert "does not exist: pretrain first" in next(
        each["text"] for each in found if each["about"] == "places"
    )


def test_findings_are_printed_as_they_are_made(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[str]()

    def talk() -> Finding:
        seen.append(capsys.readouterr().out)
        return Finding("collectives", "ok", "talked")

    monkeypatch.setattr(machine, "eight_bit_step", lambda: Finding("8-bit step", "ok", "stepped"))
    monkeypatch.setattr(machine, "collectives", talk)
    main(["doctor"])
    assert "stepped" in seen[0]
    assert "talked" in capsys.readouterr().out
