"""A cache of the hub in which the ids that a suite names are found offline, each made here."""

import hashlib
import re
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from .models_made import make_model
from .tokenizers_made import make_tokenizer

_ID = re.compile(r"""["']([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]+)["']""")


def named_in(files: Iterable[Path]) -> list[str]:
    """Return what may be ids of the hub in a suite's files and the helpers beside them."""
    helpers = {path for file in files for path in file.parent.glob("*.py")}
    found = (name for path in sorted(helpers) for name in _ID.findall(path.read_text()))
    return sorted(set(found))


def fill(cache: Path, names: Iterable[str]) -> list[str]:
    """Make the models and tokenizers of ``names`` in the hub's ``cache``; return those of which no model is known."""
    unknown: list[str] = []
    for name in names:
        commit = hashlib.sha1(name.encode()).hexdigest()
        repository = cache / f"models--{name.replace('/', '--')}"
        if (repository / "refs" / "main").exists():
            continue
        try:
            tokenizer = make_tokenizer(name)
            model = make_model(name, tokenizer)
        except Exception:
            # Whatever a family wants that nobody foresaw: its tests fail with stock classes too.
            print(f"{name}: {traceback.format_exc(limit=-1).strip()}", file=sys.stderr)
            model = None
        if model is None:
            unknown.append(name)
            continue
        snapshot = repository / "snapshots" / commit
        model.save_pretrained(snapshot)
        tokenizer.save_pretrained(snapshot)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
    return unknown
