"""Read environment variables of launchers and of hfscale, and name the directories for caches and for training states
that are kept in memory.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEMORY = "/dev/shm"  # a file system in memory on every Linux
# Environment variables that contain this process's rank, one per launcher; torchrun's comes first.
RANKS = (
    "RANK",
    "PMI_RANK",
    "OMPI_COMM_WORLD_RANK",
    "SLURM_PROCID",
)
# File in a directory of saved states; contains the name of the run whose states in memory belong to this directory
RUN = "_hfscale_run"


def started_processes() -> int:
    """Return the number of processes that the launcher started (``WORLD_SIZE``); 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Return the index of this process on its machine (``LOCAL_RANK``); 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def cache_directory() -> Path | None:
    """Return the directory in which hfscale caches results that take long to compute; ``None`` if
    ``HFSCALE_CACHE=off``.
    """
    from huggingface_hub.constants import HF_HOME

    given = os.environ.get("HFSCALE_CACHE", "")
    if given == "off":
        return None
    return Path(given) if given else Path(HF_HOME) / "hfscale"


def is_first_of_job() -> bool:
    """Return whether this process has global rank 0; without a launcher, it has."""
    given = (os.environ[name] for name in RANKS if name in os.environ)
    return next(given, "0") == "0"


def cpu_requested() -> bool:
    """Return whether Accelerate is configured to use the CPU only (``ACCELERATE_USE_CPU``)."""
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")


def guards_are_on() -> bool:
    """Return whether hfscale may replace functions of other libraries to detect mistakes in user code, for the rest of
    the process. It may, unless ``HFSCALE_GUARDS=0``.
    """
    return os.environ.get("HFSCALE_GUARDS", "1") != "0"


@contextmanager
def without_launcher_switches() -> Iterator[None]:
    """Hide, inside the ``with`` block, the environment variables that make Accelerate and transformers shard a model,
    because hfscale shards it itself.
    """
    names = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG")
    hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def memory_of(directory: Path, memory: str | Path = MEMORY) -> Path:
    """Return the directory, in a file system in memory, for the training states of the run that saves its states on
    disk in ``directory``.
    """
    path = os.path.realpath(directory)
    digest = hashlib.blake2b(path.encode(), digest_size=6).hexdigest()
    return Path(memory) / f"hfscale-{os.getuid()}-{os.path.basename(path)}-{digest}"
