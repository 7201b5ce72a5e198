"""Read what the launcher tells this process in environment variables, and where a machine keeps things in memory."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEMORY = "/dev/shm"  # a file system in memory on every Linux
# What launchers call it, torchrun's first.
RANKS = (
    "RANK",
    "PMI_RANK",
    "OMPI_COMM_WORLD_RANK",
    "SLURM_PROCID",
)
RUN = "_hfscale_run"  # the file, in a directory of states, with the name of the run whose memory counts


def started_processes() -> int:
    """Return the number of processes that the launcher says it started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Return the index of this process on its machine, as the launcher gave it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def cache_directory() -> Path | None:
    """Return where hfscale may keep what is costly to find out again; ``None`` if ``HFSCALE_CACHE=off``."""
    from huggingface_hub.constants import HF_HOME

    given = os.environ.get("HFSCALE_CACHE", "")
    if given == "off":
        return None
    return Path(given) if given else Path(HF_HOME) / "hfscale"


def is_first_of_job() -> bool:
    """Return whether this process is the first of its job, by the rank that its launcher gave it, if any did."""
    given = (os.environ[name] for name in RANKS if name in os.environ)
    return next(given, "0") == "0"


def cpu_requested() -> bool:
    """Return whether Accelerate is configured to stay on the CPU."""
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")


def guards_are_on() -> bool:
    """Return whether code of other libraries may be changed for the rest of the process, as it is by default."""
    return os.environ.get("HFSCALE_GUARDS", "1") != "0"


@contextmanager
def without_launcher_switches() -> Iterator[None]:
    """Switch off, in the ``with`` block, sharding by Accelerate and transformers: hfscale applies the data axes."""
    names = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG")
    hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def memory_of(directory: Path, memory: str | Path = MEMORY) -> Path:
    """Return the directory in memory of a run whose states on disk are in ``directory``."""
    path = os.path.realpath(directory)
    digest = hashlib.blake2b(path.encode(), digest_size=6).hexdigest()
    return Path(memory) / f"hfscale-{os.getuid()}-{os.path.basename(path)}-{digest}"
