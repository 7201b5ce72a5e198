"""Undo the installation of features into a model, but keep the model's modules, and wrappers that other code has added
since.

A model computes together with other ranks by hooks, replaced ``forward`` functions, replaced classes, and attributes
with local values. These changes are recorded as the difference between two snapshots of the model's modules, before and
after the installation, so features need no code to undo their changes. Later changes by other code stay.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..._compat.torch import CONTENTS, HOOKS, forget_composed

_Look = list[tuple[nn.Module, type, dict[str, Any], dict[str, set[Any]]]]


class _Missing:
    """Stand for the value of an attribute that did not exist. It is used as a class, not an instance, because a deep
    copy keeps classes identical.
    """


@dataclass
class Undo:
    """Revert recorded changes to modules when called. If a model that holds this object is deep-copied, the copied
    object reverts the changes to the copied modules.
    """

    changes: _Look  # per module: the module, its original class and attributes, and the added hooks

    def __call__(self) -> None:
        """Restore the classes and attributes that modules had before, and remove the hooks that were added."""
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
        """Return whether one of ``modules`` was changed otherwise than by the attributes that FSDP2 sets."""
        from ..._compat.torch_fsdp import MARKS

        return any(
            module in modules
            and (type(module) is not kind or changed.keys() - MARKS or any(added.values()))
            for module, kind, changed, added in self.changes
        )


def watch(model: nn.Module) -> Callable[[], Undo]:
    """Record how the modules of ``model`` look now. The returned function, called after changes, returns an
    :class:`Undo` that reverts them.
    """
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
        # Parameters, buffers and submodules are restored by the code that undoes the sharding (``take_apart``).
        attributes = {name: value for name, value in vars(module).items() if name not in left_out}
        hooks = {name: set(module.__dict__[name]) for name in HOOKS if module.__dict__.get(name)}
        looks.append((module, type(module), attributes, hooks))
    return looks
