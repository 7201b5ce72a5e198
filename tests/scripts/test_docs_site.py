"""The site has every page of docs/, and no link that leads nowhere; ``make site`` builds it. The tutorial runs."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docs_site
import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from hfscale.testing import RankPool

ROOT = Path(__file__).parents[2]


def _pages(entries: list[Any]) -> list[str]:
    values = [value for entry in entries for value in entry.values()]
    return [
        page for value in values for page in ([value] if isinstance(value, str) else _pages(value))
    ]


def test_every_page_is_in_the_navigation_once() -> None:
    listed = _pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(listed) == sorted(
        [
            "index.md",
            *(page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/**/*.md")),
        ]
    )


def test_no_page_asks_a_third_party_for_scripts() -> None:
    """The plugin offline would take its shim for workers from the network, and search from a folder would need that."""
    config = (ROOT / "mkdocs.yml").read_text()
    (shim,) = yaml.safe_load(config)["extra"]["polyfills"]
    assert "iframe-worker" in shim
    assert (ROOT / "docs" / shim).exists()
    assert "https://" not in config


def test_links_of_the_readme_lead_on_from_the_first_page() -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text())
    seen = [docs_site.seen_from_docs(link) for link in links]
    assert "tutorial.md" in seen
    assert all(
        docs_site.leads_out(link) or (ROOT / "docs" / link.partition("#")[0]).exists()
        for link in seen
    )


def test_links_out_of_the_site_become_words() -> None:
    text = "see [the schema](../hfscale/recipes/schema.py), [memory](memory.md#x) and ![a picture](../a.svg)"
    found = docs_site.on_page_markdown(text, None, None, None)
    assert found == "see the schema, [memory](memory.md#x) and ![a picture](../a.svg)"
    role = docs_site.on_page_content("<p>:func:<code>~.train_step</code>::</p>", None, None, None)
    assert role == "<p><code>train_step</code>:</p>"


def _run_tutorial(directory: str, layout: dict[str, str]) -> None:
    """Its script as it is, with fewer steps."""
    page = (ROOT / "docs" / "tutorial.md").read_text()
    (script,) = (
        block for block in re.findall(r"(?ms)^```python\n(.*?)^```", page) if "STEPS" in block
    )
    assert "STEPS, BATCH, LENGTH = 60," in script
    assert "% 20 == 0" in script
    short = script.replace("STEPS, BATCH, LENGTH = 60,", "STEPS, BATCH, LENGTH = 2,").replace(
        "% 20 == 0", "% 1 == 0"
    )
    before = Path.cwd()
    os.environ.update(layout)
    os.chdir(directory)
    try:
        exec(compile(short, "train.py", "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(before)
        for name in layout:
            del os.environ[name]


def test_the_tutorial_does_what_it_says(
    pools: Callable[[int], RankPool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """One process; two tensor ranks; and two stages that go on from a state of theirs: the same losses and weights."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    _run_tutorial(str(tmp_path / "one"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 1", "step 2"]
    pools(2).run(_run_tutorial, str(tmp_path / "two"), {"PARALLELISM_CONFIG_TP_SIZE": "2"})
    expected = load_file(tmp_path / "one" / "out" / "model.safetensors")
    _assert_equal(load_file(tmp_path / "two" / "out" / "model.safetensors"), expected)
    shutil.rmtree(tmp_path / "two" / "states" / "step-2")
    shutil.rmtree(tmp_path / "two" / "out")
    pools(2).run(_run_tutorial, str(tmp_path / "two"), {"PARALLELISM_CONFIG_PP_SIZE": "2"})
    _assert_equal(load_file(tmp_path / "two" / "out" / "model.safetensors"), expected)


def _run_quickstart(directory: str, stock: bool) -> list[dict[str, float]]:
    """The page's script with fewer steps, or the stock one that the page's diff says it was."""
    page = (ROOT / "docs" / "quickstart.md").read_text()
    (script,) = (
        block
        for block in re.findall(r"(?ms)^```python\n(.*?)^```", page)
        if "trainer.train()" in block
    )
    before, after = re.findall(r"(?m)^[-+](trainer = .*)$", page)
    assert (
        script.count(after)
        == script.count("import hfscale\n")
        == script.count("max_steps=30, ")
        == 1
    )
    if stock:
        script = script.replace(after, "from transformers import Trainer\n" + before)
    short = script.replace("max_steps=30, ", "max_steps=2, ").replace(
        "logging_steps=10", "logging_steps=1, use_cpu=True"
    )
    known: dict[str, Any] = {"__name__": "__main__"}
    here = Path.cwd()
    AcceleratorState._reset_state(reset_partial_state=True)
    os.chdir(directory)
    try:
        exec(compile(short, "train.py", "exec"), known)
    finally:
        os.chdir(here)
    return [row for row in known["trainer"].state.log_history if "loss" in row]


@pytest.mark.filterwarnings("ignore")
def test_the_quickstart_does_what_it_says(
    pools: Callable[[int], RankPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    expected = _run_quickstart(str(tmp_path / "one"), True)
    for found in pools(2).run(_run_quickstart, str(tmp_path / "two"), False):
        assert len(found) == 2
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
    one, two = (load_file(tmp_path / name / "out" / "model.safetensors") for name in ("one", "two"))
    _assert_equal(two, one)


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-5, msg=name)
