"""What is known of a machine: data files with sources, or what ``hfscale calibrate`` measured."""

import json
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ...errors import ConfigError

_FOLDER = Path(__file__).parent / "machines"
_BUDGET = 0.875  # of the memory: all public runs that were measured above it were 2.7 to 9.3 times slow
_LEAST = ("flops", "memory_bandwidth", "memory", "link_bandwidth", "nic_bandwidth")


@dataclass(frozen=True)
class Machine:
    """One accelerator, and how it reaches the others.

    Attributes:
        name: as in ``hardware=``.
        flops: products and sums of dense 16-bit matrix products, per second.
        memory_bandwidth: bytes per second of its memory.
        memory: bytes that a process can have.
        link_bandwidth: bytes per second in one direction to the others of its node.
        nic_bandwidth: bytes per second in one direction to other nodes, for each rank.
        ranks_per_node: how many share a node.
        host_bandwidth: bytes per second in one direction to the host's memory.
        products: fraction of ``flops`` that large matrix products reach, where runs told; else the constants' own.
        title: for people.
        sources: where the numbers are from.
    """

    name: str
    flops: float
    memory_bandwidth: float
    memory: float
    link_bandwidth: float
    nic_bandwidth: float
    ranks_per_node: int = 8
    host_bandwidth: float = 32e9
    products: float | None = None
    title: str = ""
    sources: tuple[str, ...] = ()

    @property
    def budget(self) -> float:
        """Bytes up to which a run is not slowed down by an allocator that is short of memory."""
        return _BUDGET * self.memory

    def to_json(self) -> str:
        """The text of a data file."""
        return json.dumps(asdict(self), indent=2)


def machine_names() -> tuple[str, ...]:
    """Names of the machines that have a data file."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def find_machine(hardware: "str | Machine") -> Machine:
    """The machine of a name, of a JSON file, or the machine itself.

    Raises:
        ConfigError: the name is unknown, or a file lacks what is needed.
    """
    if isinstance(hardware, Machine):
        return hardware
    if not isinstance(hardware, str):
        raise ConfigError(f"hardware={hardware!r} is unknown: use one of {', '.join(machine_names())}")
    name = hardware.lower().removesuffix(".json") if hardware.lower() in machine_names() else hardware
    path = _FOLDER / f"{name}.json" if name in machine_names() else Path(hardware)
    if not path.is_file():
        near = get_close_matches(hardware.lower(), machine_names(), n=1, cutoff=0.0)
        raise ConfigError(
            f"hardware={hardware!r} is unknown: known are {', '.join(machine_names())} (nearest by name: {near[0]!r}), "
            "or give a JSON file as `hfscale calibrate --out FILE` writes it"
        )
    return machine_of(_read(path), str(path))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON file as `hfscale calibrate --out FILE` writes it: {error}") from None
    return found if isinstance(found, dict) else {}


def machine_of(data: dict[str, Any], source: str = "the data") -> Machine:
    """A machine from what its data file says.

    Raises:
        ConfigError: something is missing or not a positive number.
    """
    wrong = [key for key in _LEAST if not isinstance(data.get(key), int | float) or data[key] <= 0]
    if wrong:
        raise ConfigError(f"{source} describes no machine: {', '.join(wrong)} must be positive numbers")
    known = {field.name for field in fields(Machine)}
    given = {key: value for key, value in data.items() if key in known}
    given |= {"sources": tuple(data.get("sources", ())), "name": str(data.get("name", Path(source).stem))}
    return Machine(**given)
