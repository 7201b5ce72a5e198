"""Rename a private name in the libraries that are installed, as their next release may do: a plugin of pytest.

    HFSCALE_RENAMED=torch.nn.Module._call_impl python -m pytest -p tests._compat.renaming tests/_compat

Python sources of the libraries are read with the name changed wherever it stands; what is written in C is deleted.
"""

import importlib
import importlib.abc
import importlib.machinery
import os
import re
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType

LIBRARIES = ("torch", "transformers", "accelerate", "peft", "trl", "bitsandbytes", "liger_kernel")
NAME = os.environ.get("HFSCALE_RENAMED", "")
LAST = re.split(r"[.:]", NAME)[-1]
IN_C = ("torch._C", "torch.Tensor", "torch.UntypedStorage", "torch.ops", "torch.ScriptObject")


class _Renaming(importlib.machinery.SourceFileLoader):
    """Load a module with the name changed in its source."""

    def get_code(self, fullname: str) -> CodeType | None:
        source = self.get_data(self.path).decode()
        if not re.search(rf"\b{LAST}\b", source):
            return super().get_code(fullname)
        changed = re.sub(rf"\b{LAST}\b", f"{LAST}_as_it_is_called_now", source)
        return compile(changed, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Find the libraries' modules, to be loaded so."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in LIBRARIES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Renaming(spec.loader.name, spec.loader.path)
        return spec


def _delete() -> None:
    """Delete the name where it is; a class of C's own keeps it."""
    owner, _, last = NAME.rpartition(".")
    parts = owner.split(".")
    reached = importlib.import_module(parts[0])
    for part in parts[1:]:
        reached = getattr(reached, part)
    delattr(reached, last)


if NAME.startswith(IN_C) or NAME.startswith("sys."):
    _delete()
elif NAME:
    sys.meta_path.insert(0, _Finder())
