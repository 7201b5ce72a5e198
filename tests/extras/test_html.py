"""The page with pictures: well-formed, with a mark for everything that it shows, as large as that is."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import hfscale
from hfscale import ParallelConfig
from hfscale.cli import main
from hfscale.cost.tools.search import search
from hfscale.extras.html_report.page import page_of

from ..cost.test_search import SMALL, facts
from ..tiny_models import tiny


def tree_of(page: str) -> ElementTree.Element:
    """The page without what XML has no words for."""
    return ElementTree.fromstring(
        page.removeprefix("<!DOCTYPE html>").replace('<meta charset="utf-8">', "")
    )


def test_an_estimate_through_stages() -> None:
    found = hfscale.estimate(
        tiny("llama", num_hidden_layers=4), ParallelConfig(pp_size=2), num_microbatches=4
    )
    tree = tree_of(page_of(found, "a < b"))
    assert tree.findtext("body/h1") == "a < b"
    memory, seconds, schedule = tree.iter("svg")
    kinds = {
        f"rank {s.rank}: {kind}": size
        for s in found.stages
        for kind, size in s.memory.kinds.items()
        if size
    }
    shown = [re.match(r"rank \d+: \w+", rect.findtext("title", "")) for rect in memory.iter("rect")]
    assert {match.group() for match in shown if match} >= set(kinds)
    for rect in memory.iter("rect"):
        name = re.match(r"rank \d+: \w+", rect.findtext("title", ""))
        size = kinds.get(name.group() if name else "", 0)
        assert float(rect.get("width", 0)) == pytest.approx(
            880 * size / found.hardware.memory, abs=0.01
        )
    assert sum(float(rect.get("width", 0)) for rect in seconds.iter("rect")) == pytest.approx(
        880, rel=0.01
    )
    assert len(list(schedule.iter("rect"))) == 2 * 2 * 4
    assert found.layout in tree.findtext("body/pre", "")


def test_a_search_and_the_commands(tmp_path: Path) -> None:
    found = search(facts(), 8, tokens_per_step=2**18)
    (picture,) = tree_of(page_of(found, "search")).iter("svg")
    titles = [circle.findtext("title", "") for circle in picture.iter("circle")]
    assert any(title.startswith(found.winner.candidate.describe()) for title in titles)
    assert len(titles) == len({*found.best, *found.frontier})
    SMALL.save_pretrained(tmp_path)
    page = tmp_path / "page.html"
    assert main(["estimate", str(tmp_path), "--tp", "2", "--html", str(page)]) == 0
    assert "tp2" in tree_of(page.read_text()).findtext("body/h1", "")
    assert (
        main(
            [
                "search",
                str(tmp_path),
                "--gpus",
                "2",
                "--tokens-per-step",
                "64K",
                "--html",
                str(page),
            ]
        )
        == 0
    )
    assert "2 x h100" in tree_of(page.read_text()).findtext("body/h1", "")
