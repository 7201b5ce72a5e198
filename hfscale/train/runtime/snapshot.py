"""Undo the installation of parts into a model, keeping its modules and wrappers that others have added since.

A model computes with other ranks by means of hooks, replaced ``forward`` functions, replaced classes and attributes
with local values. They are recorded as the difference between two snapshots of the model, so the installing code need
not know how to undo itself. Changes that others made in the meantime stay.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..._compat.torch import CONTENTS, HOOKS, forget_composed
from ..._compat.torch_fsdp import MARKS

_Look = list[tuple[nn.Module, type, dict[str, Any], dict[str, set[Any]]]]


class _Missing:
    """Mark an attribute that did not exist; a class, since a deep copy keeps classes as they are."""


@dataclass
class Undo:
    """Revert changes to modules when called. A deep copy of a model takes its copy with it."""

    changes: _Look  # per module: the module, its class, attributes as they were, and hooks that were added

    def __call__(self) -> None:
        """Put classes and attributes back, and remove hooks."""
        for module, kind, changed, added in self.changes:
            if type(module) is not kind:
                forget_composed(module)
                module.__class__ = kind
            for name, value in changed.items():
                if value is _Missing:
                    module.__dict__.pop(name, None)
                else:
                    module.__dict__[name] = value
            for name, keys in added.items():
                held = module.__dict__.get(name) or {}
                for key in keys:
                    held.pop(key, None)

    def touches(self, modules: Collection[nn.Module]) -> bool:
        """Return whether anything but FSDP2's marks was changed in one of ``modules``."""
        return any(
            module in modules
            and (type(module) is not kind or changed.keys() - MARKS or any(added.values()))
            for module, kind, changed, added in self.changes
        )


def watch(model: nn.Module) -> Callable[[], Undo]:
    """Take a snapshot of ``model``; the returned function takes another, and returns the difference's :class:`Undo`."""
    before = _look(model)

    def stop() -> Undo:
        after = {module: (attributes, hooks) for module, _, attributes, hooks in _look(model)}
        changes = []
        for module, kind, attributes, hooks in before:
            if module not in after:
                continue
            new_attributes, new_hooks = after[module]
            changed = {
                name: attributes.get(name, _Missing)
                for name in attributes.keys() | new_attributes.keys()
                if attributes.get(name, _Missing) is not new_attributes.get(name, _Missing)
            }
            added = {name: new_hooks[name] - hooks.get(name, set()) for name in new_hooks}
            changes.append((module, kind, changed, added))
        return Undo(changes)

    return stop


def _look(model: nn.Module) -> _Look:
    looks = []
    left_out = {*HOOKS, *CONTENTS}
    for module in model.modules():
        # Parameters, buffers and submodules are put back by the code that takes the model apart.
        attributes = {name: value for name, value in vars(module).items() if name not in left_out}
        hooks = {name: set(module.__dict__[name]) for name in HOOKS if module.__dict__.get(name)}
        looks.append((module, type(module), attributes, hooks))
    return looks
