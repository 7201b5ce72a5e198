"""Compare installed libraries with the versions that hfscale was tested with, which its extra ``tested`` lists."""

import importlib
import os
import pkgutil
import warnings
from contextlib import suppress
from functools import cache
from importlib import metadata

from packaging.requirements import Requirement

from ..config.environment import is_first_of_job

_ALWAYS = ("torch", "transformers")  # every use of hfscale needs private names of these libraries
_WARNED = "HFSCALE_VERSIONS_WARNED"  # set for child processes, which inherit the environment


def untested() -> dict[str, str]:
    """Map each installed library outside the tested range to a phrase with both: ``torch 2.15.0 (tested: <2.14)``."""
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
    """Import all files of hfscale that use private names of torch and transformers, and return the errors: each tells
    of a name that the installed version no longer has.
    """
    errors = []
    for module in pkgutil.walk_packages(
        importlib.import_module(__package__).__path__, f"{__package__}."
    ):
        if module.name.removeprefix(f"{__package__}.").startswith(_ALWAYS):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # warnings of imports that only test for names
                    importlib.import_module(module.name)
            except (ImportError, AttributeError) as error:
                errors.append(str(error))
    return list(dict.fromkeys(errors))


def _speaks_for_its_job() -> bool:
    """Return whether this process should print the warning: it is the first process of its job, and no parent process
    has warned already.
    """
    return _WARNED not in os.environ and is_first_of_job()


@cache
def check_versions() -> None:
    """Warn, once per job, about a library outside the tested range.

    Raises:
        ImportError: the library lacks a name that hfscale uses.
    """
    others = ", ".join(untested().values())
    if not others:
        return
    advice = "pip install 'hfscale[tested]' installs the newest tested versions"
    if missing := _missing_names():
        raise ImportError(
            f"hfscale does not run with {others}, because imports from them fail: {'; '.join(missing)}. {advice}"
        )
    if _speaks_for_its_job():
        os.environ[_WARNED] = "1"
        warnings.warn(
            f"hfscale was not tested with {others}, but finds everything there that it imports. {advice}",
            stacklevel=3,
        )
