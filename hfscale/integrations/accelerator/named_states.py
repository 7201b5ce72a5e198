"""Find directories of states that Accelerate names: ``ProjectConfiguration(automatic_checkpoint_naming=True)``.

States are ``checkpoints/checkpoint_N`` below the project's directory; ``N`` counts saves, and at most ``total_limit``
states are kept. Every rank computes the same directory; the first rank removes states that are too old.
"""

import re
import shutil
from pathlib import Path
from typing import Any

from ...distributed.mesh import Mesh
from ...errors import ConfigError


def directory_to_save(accelerator: Any, given: Any, mesh: Mesh) -> Path:
    """Return the directory in which to save a state. With ``automatic_checkpoint_naming=True``, this is the project's
    next numbered directory, and the call is collective; otherwise it is ``given``.
    """
    project = accelerator.project_configuration
    if not project.automatic_checkpoint_naming:
        return _told(given)
    folder = _folder_of(accelerator)
    states = mesh.all_gather_object(_states_in(folder))[0]
    target = folder / f"checkpoint_{project.iteration}"
    if target in states:
        raise ConfigError(
            f"{target} exists already: set project_configuration.iteration to the number of the next save, or give "
            "another project_dir"
        )
    if project.total_limit is not None and mesh.rank == 0:
        for old in states[: max(0, len(states) + 1 - project.total_limit)]:
            shutil.rmtree(old)
    return target


def directory_to_load(accelerator: Any, given: Any) -> Path:
    """Return the state to load: ``given``, or otherwise the newest state that the project has named."""
    if given is not None or not accelerator.project_configuration.automatic_checkpoint_naming:
        return _told(given)
    states = _states_in(_folder_of(accelerator))
    if not states:
        raise ConfigError(
            f"load_state without a directory found no saved state in {_folder_of(accelerator)}: save one first "
            "(save_state), or pass the directory of a state"
        )
    return states[-1]


def _folder_of(accelerator: Any) -> Path:
    return Path(accelerator.project_dir or ".") / "checkpoints"


def _states_in(folder: Path) -> list[Path]:
    """Return the named states of a folder, oldest first."""
    found = (path for path in folder.glob("checkpoint_*") if re.search(r"_\d+$", path.name))
    return sorted(found, key=lambda path: int(path.name.rpartition("_")[2]))


def _told(given: Any) -> Path:
    if given is None:
        raise ConfigError(
            "a directory is needed: call save_state(directory) or load_state(directory), or let Accelerate name the "
            "states with ProjectConfiguration(automatic_checkpoint_naming=True)"
        )
    return Path(given).expanduser()
