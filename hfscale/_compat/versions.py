"""Compare the installed libraries with the versions that hfscale was tested with: those of its extra ``tested``."""

import importlib
import os
import pkgutil
import warnings
from contextlib import suppress
from functools import cache
from importlib import metadata

from packaging.requirements import Requirement

from ..config.environment import is_first_of_job

_ALWAYS = ("torch", "transformers")  # of libraries whose private names every use of hfscale needs
_WARNED = "HFSCALE_VERSIONS_WARNED"  # for the processes that this one starts, which inherit its environment


def untested() -> dict[str, str]:
    """Map each installed library outside of the tested range to both in words: ``torch 2.15.0 (tested: <2.14)``."""
    by_name: dict[str, str] = {}
    with suppress(metadata.PackageNotFoundError):  # run from its sources
        for asked in map(Requirement, metadata.requires("hfscale") or []):
            if (
                "tested" in str(asked.marker)
                and asked.marker
                and asked.marker.evaluate({"extra": "tested"})
            ):
                with suppress(metadata.PackageNotFoundError):
                    version = metadata.version(asked.name)
                    if not asked.specifier.contains(version, prereleases=True):
                        by_name[asked.name] = f"{asked.name} {version} (tested: {asked.specifier})"
    return by_name


def _missing_names() -> list[str]:
    """Return what importing all that adapts torch and transformers says of names that these no longer have."""
    errors = []
    for module in pkgutil.walk_packages(
        importlib.import_module(__package__).__path__, f"{__package__}."
    ):
        if module.name.removeprefix(f"{__package__}.").startswith(_ALWAYS):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of what is imported only to be looked at
                    importlib.import_module(module.name)
            except (ImportError, AttributeError) as error:
                errors.append(str(error))
    return list(dict.fromkeys(errors))


def _speaks_for_its_job() -> bool:
    """Return whether this process is the first of its job, and none that started it has warned."""
    return _WARNED not in os.environ and is_first_of_job()


@cache
def check_versions() -> None:
    """Warn, once per job, of a library outside of the tested range.

    Raises:
        ImportError: it lacks a name that is used.
    """
    others = ", ".join(untested().values())
    if not others:
        return
    advice = "pip install 'hfscale[tested]' installs the newest tested versions"
    if missing := _missing_names():
        raise ImportError(f"hfscale does not run with {others}: {'; '.join(missing)}. {advice}")
    if _speaks_for_its_job():
        os.environ[_WARNED] = "1"
        warnings.warn(
            f"hfscale was not tested with {others}, which has the names that it imports. {advice}",
            stacklevel=3,
        )
