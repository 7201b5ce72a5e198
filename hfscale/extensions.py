"""Find extensions, which add features to hfscale's core: those in ``hfscale/extras``, and those of other packages.

An extension is data, an :class:`Extension`: for each object that it adds, it gives a name and the import path
``"module:name"`` (the object's place), which is imported only when used. The core asks for all objects of one kind (a
slot: a field of :class:`Extension`), and names no extension. There are three ways to add an extension, with the same
effect: a package in ``hfscale/extras`` with a variable ``EXTENSION``, an entry point of the group
``hfscale.extensions`` in an installed package, and :func:`register`.
"""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from .errors import ConfigError

GROUP = "hfscale.extensions"
_OWN = "extras"


@dataclass(frozen=True)
class Extension:
    """List all objects that an extension adds by import paths ``"module:name"``; each is imported only when used."""

    name: str
    exports: Mapping[str, str] = field(default_factory=dict)
    """Public name in ``hfscale`` -> import path of the object."""
    commands: Mapping[str, str] = field(default_factory=dict)
    """Subcommand of ``hfscale`` -> module name; the module has ``HELP``, ``EXAMPLE``, ``add_arguments`` and ``run``."""
    proofs: Mapping[str, str] = field(default_factory=dict)
    """Name of a property of model classes -> import path of its proof, a function that determines the property for a
    model; for :func:`hfscale.models.facts.ask`.
    """
    optimizer_options: Mapping[str, str] = field(default_factory=dict)
    """Option of :func:`hfscale.create_optimizer` -> import path of an
    :class:`~hfscale.optim.added_options.AddedOption`.
    """
    reports: Mapping[str, str] = field(default_factory=dict)
    """Format -> import path of a function that takes an estimate or a search and a title, and returns a page's text;
    commands that estimate get a flag ``--FORMAT FILE``.
    """
    parity_cases: Mapping[str, str] = field(default_factory=dict)
    """Auto class -> import path of its :class:`~hfscale.testing.verify.ParityCases`, for ``hfscale verify``."""
    explanations: Mapping[str, str] = field(default_factory=dict)
    """Kind of failure, such as ``"memory"`` -> import path of a function: exception -> lines for the log."""
    plan_parts: Mapping[str, str] = field(default_factory=dict)
    """Feature -> import path of the function that adds the feature to a plan, called after the functions in
    ``hfscale/api/assemble.py``.
    """
    schedules: Mapping[str, str] = field(default_factory=dict)
    """Pipeline schedule -> import path of its :class:`~hfscale.config.schedules.Schedule`."""
    executors: Mapping[str, str] = field(default_factory=dict)
    """Pipeline schedule -> import path of its :class:`~hfscale.train.runtime.Executor`, if
    :class:`~hfscale.parallel.pipeline.run.Pipeline` cannot run the schedule.
    """
    gradient_compressions: Mapping[str, str] = field(default_factory=dict)
    """Value of ``gradient_compression`` -> import path of its
    :class:`~hfscale.parallel.data.gradient_compression.Compressor`.
    """
    sources: Mapping[str, str] = field(default_factory=dict)
    """Format -> import path of an :class:`~hfscale.distributed.files.sources.AddedSource`, which finds and reads
    weights of another program.
    """
    quantizations: Mapping[str, str] = field(default_factory=dict)
    """Value of ``quantization_config`` -> import path of a function: plan, full model, and the checkpoint's
    :class:`~hfscale.checkpoint.stored_forms.scheme.StoredForm` -> plan in which weights stay quantized in memory.

    Their plan is a subclass of :class:`~hfscale.plan.quantized.QuantizedPlan` whose ``by_bitsandbytes`` is false. The
    loader calls its method ``keep(plan, mesh, model, stored, targets)``, which returns the plan with the weights that
    the files do store quantized, and this rank's weights by name. Each weight has the ``shape`` of its bytes, ``[...]``
    reads them, and ``hold(model, name)`` lets the loaded model compute with them.
    """
    written_forms: Mapping[str, str] = field(default_factory=dict)
    """Value of ``quantization`` of a save -> import path of a subclass of
    :class:`~hfscale.checkpoint.written_form.PlainForm`, which is called with a checkpoint's directory and
    :class:`~hfscale.checkpoint.stored_forms.scheme.StoredForm`, and quantizes tensors like that checkpoint; commands
    that write a checkpoint get a flag of the same name.
    """
    parts: Mapping[str, str] = field(default_factory=dict)
    """Feature -> import path of its :class:`~hfscale.train.runtime.Part`, the object that installs the feature into a
    model; it comes after the features of the core, and before the checks of user code.
    """

    def __post_init__(self) -> None:
        for slot in SLOTS:
            for name, place in getattr(self, slot).items():
                if slot != "commands" and ":" not in place:
                    raise ConfigError(
                        f"{slot} of the extension {self.name!r} must be import paths, as 'package.module:name', got "
                        f"{place!r} for {name!r}: correct the extension"
                    )


SLOTS = tuple(each.name for each in fields(Extension) if each.name != "name")
_registered: dict[str, Extension] = {}


def register(extension: Extension) -> None:
    """Add an extension to this process before it builds a model; replace an earlier extension of the same name."""
    _registered[extension.name] = extension
    _found.cache_clear()


def added(slot: str) -> dict[str, str]:
    """Return all objects of one kind (``slot``, a field of :class:`Extension`) that extensions add: name -> import
    path. Raise :class:`ConfigError` for a name that two extensions add.
    """
    return _found()[slot]


def provided(slot: str, name: str) -> Any:
    """Import and return the object ``name`` of one kind (``slot``, a field of :class:`Extension`); ``None`` if no
    extension adds it.
    """
    place = added(slot).get(name)
    return None if place is None else imported(place)


def all_provided(slot: str) -> list[Any]:
    """Import and return all objects of one kind (``slot``, a field of :class:`Extension`) that extensions add, sorted
    by their names.
    """
    return [imported(place) for _, place in sorted(added(slot).items())]


def imported(place: str) -> Any:
    """Import and return the object at the import path ``"module:name"``; without a name, the module."""
    module, _, name = place.partition(":")
    imported = importlib.import_module(module)
    return getattr(imported, name) if name else imported


@cache
def _found() -> dict[str, dict[str, str]]:
    by_slot: dict[str, dict[str, str]] = {slot: {} for slot in SLOTS}
    owners: dict[tuple[str, str], str] = {}
    for extension in _extensions():
        for slot, places in by_slot.items():
            for name, place in getattr(extension, slot).items():
                owner = owners.setdefault((slot, name), extension.name)
                if owner != extension.name:
                    raise ConfigError(
                        f"{name!r} must be added to {slot} by one extension only, got it from {owner!r} and "
                        f"{extension.name!r}: leave one of these extensions out"
                    )
                places[name] = place
    return by_slot


def _extensions() -> Iterator[Extension]:
    """Yield every extension once: registered ones first, then hfscale's own, then those of installed packages."""
    by_name = dict(_registered)
    folder = str(Path(__file__).with_name(_OWN))
    for module in sorted(each.name for each in pkgutil.iter_modules([folder])):
        own = imported(f"{__package__}.{_OWN}.{module}:EXTENSION")
        by_name.setdefault(own.name, own)
    for entry in entry_points(group=GROUP):
        other = entry.load()
        by_name.setdefault(other.name, other)
    yield from by_name.values()
