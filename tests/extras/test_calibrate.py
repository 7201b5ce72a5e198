"""A machine that is measured: the document is one that estimates take. What it says of a busy machine is not tested."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hfscale
from hfscale.cli import main
from hfscale.cost.model.machines_known import find_machine
from hfscale.extras.calibrate.calibrate import Sizes, calibrate

from ..tiny_models import tiny

SMALL = Sizes(hidden=64, ffn=128, heads=4, sequence=32, batch=2, vocabulary=101, seconds=1e-3)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return calibrate("mine", torch.device("cpu"), (1e9, 1e-4), SMALL)


def test_estimates_take_what_is_measured(document: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(document))
    machine = find_machine(str(path))
    assert (machine.name, machine.link_bandwidth) == ("mine", 1e9)
    assert machine.memory > 2**30
    found = hfscale.estimate(tiny("llama"), hfscale.ParallelConfig(tp_size=2), str(path))
    assert found.time.exchange > 0
    assert found.seconds == pytest.approx(sum(found.time.terms.values()))
    assert all(value >= 0 for value in document["time"].values())


def test_links_of_a_known_machine(document: dict[str, Any]) -> None:
    h100 = find_machine("h100")
    found = calibrate("mine", torch.device("cpu"), None, SMALL, h100)
    assert (found["link_bandwidth"], found["nic_bandwidth"]) == (
        h100.link_bandwidth,
        h100.nic_bandwidth,
    )
    assert found.keys() == document.keys()


def test_impossible_times_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--seconds", "9"]) == 2
    assert "--seconds 9 is invalid" in capsys.readouterr().err
