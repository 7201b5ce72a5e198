"""Keep what was proved about model classes in the user's cache, so that a proof runs once, not in every process."""

import hashlib
import json
import os
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

from ..config.environment import is_first_of_job
from ..extensions import added

Answers = dict[str, Any]  # question -> answer


class KeptFacts:
    """Read and write what was proved about model classes: one file of answers for each class and digest of its config.

    Files are kept separately for each combination of versions of torch and transformers, and code of the proofs. If the
    directory cannot be read or written, nothing is kept, without an error.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    @property
    def place(self) -> str:
        """The place where answers about model classes are kept, in words."""
        return "in this process" if self._directory is None else f"in {self._directory}"

    def read(self, kind: str, digest: str) -> Answers:
        """Return what is kept about a model class and a digest of its config: question -> answer. The dict is empty if
        there is no file, or if the file is damaged.
        """
        path = self._path(kind, digest)
        try:
            answers = json.loads(path.read_text()) if path is not None else {}
        except (OSError, ValueError):
            return {}
        return answers if isinstance(answers, dict) else {}

    def add(self, kind: str, digest: str, question: str, answer: Any) -> None:
        """Add the answer to a question about a model class to the file of the class and digest; do nothing if the
        directory cannot be written.
        """
        path = self._path(kind, digest)
        if path is None or not is_first_of_job():
            return
        text = json.dumps(
            {**self.read(kind, digest), question: answer},
            indent=1,
        )
        aside = path.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(text)
            # Atomic: a reader sees the old or the new file; of two concurrent writers the later one wins.
            aside.replace(path)

    def _path(self, kind: str, digest: str) -> Path | None:
        if self._directory is None:
            return None
        return self._directory / "facts" / _situation() / f"{kind}-{digest}.json"


@cache
def _situation() -> str:
    """Return a folder name that is different for each combination of versions of torch and transformers, and code of
    the proofs that run on models.
    """
    modules = {place.partition(":")[0] for place in added("proofs").values()}
    origins = [getattr(find_spec(module), "origin", None) for module in sorted(modules)]
    folders = sorted({Path(origin).parent for origin in origins if origin})
    files = sorted({path for folder in folders for path in folder.rglob("*.py")})
    code = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]
    return f"transformers-{transformers.__version__}-torch-{torch.__version__}-{code}"
