"""The recipes that come with hfscale, by name."""

import difflib
import re
from itertools import takewhile
from pathlib import Path

from .schema import RecipeError

LIBRARY = Path(__file__).parent / "library"


def shipped_recipes() -> dict[str, str]:
    """Name -> what it is, as its file begins."""
    return {path.stem: _summary(path) for path in sorted(LIBRARY.glob("*.yaml"))}


def locate(recipe: str | Path) -> Path:
    """Return the file of a recipe, given its path or the name of a shipped one.

    Raises:
        RecipeError: there is none; says which there are.
    """
    path = Path(recipe)
    if path.is_file():
        return path
    if path.suffix or len(path.parts) > 1:
        found = ", ".join(sorted(p.name for p in path.parent.glob("*.yaml"))) or "no recipe"
        raise RecipeError(f"{recipe}: there is no such file; {path.parent} has {found}")
    names = [p.stem for p in LIBRARY.glob("*.yaml")]
    if path.name not in names:
        close = difflib.get_close_matches(path.name, names, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise RecipeError(
            f"{recipe} is neither a file nor a recipe that comes with hfscale: {hint}give the path of a YAML file, or "
            f"one of {', '.join(sorted(names))}"
        )
    return LIBRARY / f"{path.name}.yaml"


def _summary(path: Path) -> str:
    lines = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    text = " ".join(line.removeprefix("#").strip() for line in lines)
    return re.split(r"[.:;](?:\s|$)", text, maxsplit=1)[0]
