"""What the documentation names is there: files, modules, links, commands, code; and generated parts are current."""

import re
from functools import cache
from pathlib import Path

import api_table
import architecture
import papers
import pytest
import support_table
import tested_versions
from notes import note

from hfscale.cli import _parser
from hfscale.train.runtime import Part

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("model_cards/*.md")])
SOURCES = sorted(
    path for folder in ("hfscale", "scripts") for path in ROOT.glob(f"{folder}/**/*.py")
)
# What scripts write where they are run, and nobody keeps.
UNKEPT = (
    "docs/fuzz.md",
    "scripts/bench/results/one_gpu.json",
    "scripts/bench/results/finetune_gpu.json",
)
_FILE = re.compile(
    r"(?<![\w./-])((?:hfscale|scripts|tests|docs|model_cards)/[\w./-]*\w\.(?:py|sh|md|yaml|json|png))\b"
)
_NAME = re.compile(r"(?<![\w./-])hfscale((?:\.[A-Za-z_]\w*)+)")
_ROLE = re.compile(r":(?:mod|func|class|data|meth|attr|exc):`~?(\.[\w.]+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    missing = [link for link in links if "://" not in link and not _leads(page, link)]
    assert not missing


def _leads(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return target.exists() and (not anchor or anchor in _anchors(target))


@cache
def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_files_and_modules_that_exist(page: Path) -> None:
    assert not _strange(page.read_text())


def test_sources_name_files_and_modules_that_exist() -> None:
    found = {str(path.relative_to(ROOT)): _strange(path.read_text(), path) for path in SOURCES}
    assert not {path: names for path, names in found.items() if names}


def _strange(text: str, source: Path | None = None) -> list[str]:
    files = [
        name for name in _FILE.findall(text) if name not in UNKEPT and not (ROOT / name).exists()
    ]
    names = [
        f"hfscale{dotted}"
        for dotted in set(_NAME.findall(text))
        if not _is_known(dotted[1:].split("."))
    ]
    if source is not None and source.is_relative_to(ROOT / "hfscale"):
        package = list(source.relative_to(ROOT / "hfscale").parts[:-1])
        for name in _ROLE.findall(text):
            rest = name.lstrip(".")
            above = len(name) - len(rest) - 1
            if not _is_known([*package[: len(package) - above], *rest.split(".")]):
                names.append(name)
    return sorted({*files, *names})


def _is_known(parts: list[str]) -> bool:
    """Whether ``hfscale`` followed by ``parts`` is a module, something a module names, or a public name."""
    place = ROOT / "hfscale"
    for depth, part in enumerate(parts):
        if (place / part).is_dir():
            place = place / part
        elif (place / f"{part}.py").exists():
            rest = parts[depth + 1 :]
            return not rest or rest[0] in _words(place / f"{part}.py")
        else:
            return part in _words(place / "__init__.py") | _words(
                place / "__init__.pyi"
            ) or part.startswith("__")
    return True


@cache
def _words(path: Path) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", path.read_text())) if path.exists() else frozenset()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_definitions_that_exist(page: Path) -> None:
    """As in ``build.py::build``, relative to the package; the flows of docs/architecture.md consist of these."""
    for file, name in re.findall(r"`([\w/]+\.py)::(\w+)`", page.read_text()):
        path = ROOT / "hfscale" / file
        found = path.exists() and re.search(rf"(?m)^ *(def|class) {name}\b", path.read_text())
        assert found, f"{file}::{name}"
    for file in re.findall(r"`((?:[a-z_]+/)+\w+\.py)`", page.read_text()):
        assert (ROOT / file).exists() or (ROOT / "hfscale" / file).exists(), file


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python" in page.read_text()], ids=lambda page: page.name
)
def test_python_in_pages_compiles(page: Path) -> None:
    for block in re.findall(r"(?ms)^```python\n(.*?)^```", page.read_text()):
        compile(block, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_pages_are_understood(page: Path) -> None:
    for line in re.findall(r"(?m)^    (?:\$ )?hfscale (.*)$", page.read_text()):
        words = re.split(r" #| > |; ", line)[0].rstrip("\\ ").split()
        if "--help" not in words and "--version" not in words:
            _parser().parse_args(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_in_pages_exist(page: Path) -> None:
    targets = set(re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text()))
    assert set(re.findall(r"(?m)(?:^    |`)make ([a-z][\w-]*)", page.read_text())) <= targets


def test_every_hook_of_a_part_is_in_the_guide() -> None:
    guide = (ROOT / "docs" / "add-an-axis.md").read_text()
    hooks = [name for name in vars(Part) if not name.startswith("_")]
    assert [name for name in hooks if f"`{name}`" not in guide] == []


def test_readme_fits_on_a_few_screens() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 120


def test_generated_parts_are_current() -> None:
    readme = (ROOT / "README.md").read_text()
    assert support_table.filled(readme) == readme, "run make docs"
    assert (ROOT / "docs" / "api.md").read_text() == api_table.page(), "run make docs"
    assert (ROOT / "docs" / "reference.md").read_text() == api_table.reference(), "run make docs"
    assert (ROOT / "docs" / "papers.md").read_text() == papers.page(), "run make docs"
    assert (ROOT / "docs" / "tested-versions.md").read_text() == tested_versions.page(), (
        "run make docs"
    )
    listed = re.findall(r"(?m)^\| \[(\S+)\]", (ROOT / "docs" / "architecture.md").read_text())
    assert listed == [room.name for room in architecture.find_rooms()], "run make docs"


def test_imports_point_down() -> None:
    """Counted here once more, type-checking and in-function imports included, without import-linter."""
    rooms = architecture.find_rooms()
    layer = {room.name: room.layer for room in rooms}
    imports = architecture.count_imports(rooms)
    assert len(imports) > 100
    assert [pair for pair in imports if layer[pair[0]] <= layer[pair[1]]] == []


def test_decisions_are_numbered_and_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text()
    every: list[int] = []
    for page in sorted(folder.glob("*.md")):
        text = page.read_text()
        found = re.findall(r'(?m)^- <a id="d(\d+)"></a>\*\*D\1\*\*, \d{4}-\d\d-\d\d\. ', text)
        assert len(found) == len(re.findall(r"(?m)^- ", text)), (
            f"{page.name}: a decision begins like the others: number, date, words"
        )
        assert page.name == "README.md" or f"]({page.name}) | {len(found)} |" in index, (
            f"{page.name}: python scripts/decisions.py writes the index"
        )
        every += map(int, found)
    assert len(every) == len(set(every)) > 400


def test_notes_in_tables_end_with_a_whole_word() -> None:
    assert note("one\n  line | of a cell") == "one line / of a cell"
    text = "BartForCausalLM takes a cross entropy"
    assert note(text, len(text)) == text
    assert {note(text, most) for most in range(28, 37)} == {
        "BartForCausalLM takes a ...",
        "BartForCausalLM takes a cross ...",
    }
    assert all(len(note(text, most)) <= most for most in range(8, 40))
    assert note("x" * 50, 10) == "xxxxxx ..."
