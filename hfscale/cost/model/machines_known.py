"""Look up the rates of machines, and the constants with which times are estimated, such as the fraction of the peak
FLOPs that matrix products reach; both are in hfscale's data files, or in a file that ``hfscale calibrate`` wrote.

``scripts/bench/fit_planner.py`` writes ``constants.json``, from the runs of 1B and 3B models of the Ultra-Scale
Playbook's sweep (Tazi et al. 2025; nanotron on H100). The entry ``own`` of this file has priority:
``scripts/bench/fit_measured.py`` writes it, from steps of hfscale on one H100 and one H200. Fractions are relative to
the peak rates in a machine's data file, so that they apply to other machines, too. Constants in seconds depend on the
CPU that launches kernels; ``hfscale calibrate`` measures them.
"""

import json
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from ...errors import ConfigError

_FITTED = (
    "seconds: estimated, with constants fitted on steps of hfscale on one H100 and one H200 (torch 2.11, transformers "
    "5.23); what ranks exchange as in runs of other code on H100s, since hfscale was not measured on several GPUs"
)
FITS = "fits"
TIGHT = "tight"
DOES_NOT_FIT = "does not fit"
CONSTANTS = Path(__file__).parent / "constants.json"
_FOLDER = Path(__file__).parent / "machines"
# Fraction of the memory that a run may use; all public runs above this fraction were 2.7 to 9.3 times slower.
_BUDGET = 0.875
_LEAST = ("flops", "memory_bandwidth", "memory", "link_bandwidth", "nic_bandwidth")


@dataclass(frozen=True)
class Machine:
    """Describe one kind of GPU and its links: FLOPs, memory, bandwidths. Bandwidths are bytes per second in one
    direction.
    """

    name: str  # name for hardware=
    flops: float  # dense 16-bit FLOPs per second
    memory_bandwidth: float
    memory: float  # bytes that a process can use
    link_bandwidth: float  # to other ranks of the node
    nic_bandwidth: float  # per rank, to other nodes
    ranks_per_node: int = 8
    host_bandwidth: float = 32e9  # to the memory of the machine's CPU
    flops_8: float | None = None  # dense 8-bit FLOPs per second, if supported
    # Fraction of ``flops`` that large products reach, if runs measured it; else the constants' fraction.
    products: float | None = None
    # Whether the constants were fitted on steps of hfscale on this machine, among others.
    measured: bool = False
    title: str = ""  # title to print
    sources: tuple[str, ...] = ()  # sources of the numbers

    @property
    def label(self) -> str:
        """The machine's name as it is printed: its title, or without one its name for ``hardware=``."""
        return self.title or self.name

    @property
    def budget(self) -> float:
        """Bytes that a run may use without being slowed down: above this, the allocator is short of memory."""
        return _BUDGET * self.memory

    @property
    def rates(self) -> str:
        """The machine's FLOPs and bandwidths, on which estimates are based, as a text."""
        peaks = [f"{self.flops / 1e12:g} TFLOP/s in 16 bits"]
        if self.flops_8:
            peaks.append(f"{self.flops_8 / 1e12:g} in 8")
        links = f"{self.link_bandwidth / 1e9:g} GB/s within a node of {self.ranks_per_node}"
        return (
            f"{self.label}: {', '.join(peaks)}; memory {self.memory_bandwidth / 1e9:g} GB/s; "
            f"{links}, {self.nic_bandwidth / 1e9:g} beyond"
        )

    def verdict(self, needed: float, likely: float, budget: float | None = None) -> str:
        """Return ``does not fit`` if a run needs more bytes (``needed``) than the machine has; ``tight`` if it is
        likely to reserve more (``likely``) than the ``budget``, so that the allocator is short of memory, and slow;
        otherwise ``fits``.
        """
        if needed > self.memory:
            return DOES_NOT_FIT
        return TIGHT if likely > (self.budget if budget is None else budget) else FITS


def machine_names() -> tuple[str, ...]:
    """Return the names of the machines that have a data file."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def find_machine(hardware: str | Machine) -> Machine:
    """Return the machine with the name ``hardware``, or the one that the JSON file ``hardware`` describes; return a
    :class:`Machine` unchanged.
    """
    if isinstance(hardware, Machine):
        return hardware
    if not isinstance(hardware, str):
        raise ConfigError(
            f"hardware={hardware!r} is unknown: use one of {', '.join(machine_names())}"
        )
    name = (
        hardware.lower().removesuffix(".json") if hardware.lower() in machine_names() else hardware
    )
    path = _FOLDER / f"{name}.json" if name in machine_names() else Path(hardware)
    if not path.is_file():
        near = get_close_matches(hardware.lower(), machine_names(), n=1, cutoff=0.0)
        raise ConfigError(
            f"hardware={hardware!r} is unknown: known are {', '.join(machine_names())} (nearest by name: {near[0]!r}), "
            "or give a JSON file as `hfscale calibrate --out FILE` writes it"
        )
    try:
        contents = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(
            f"{path} is no JSON file as `hfscale calibrate --out FILE` writes it: {error}: write the file again with "
            "that command"
        ) from None
    data: dict[str, Any] = contents if isinstance(contents, dict) else {}
    wrong = [key for key in _LEAST if not isinstance(data.get(key), int | float) or data[key] <= 0]
    if wrong:
        raise ConfigError(
            f"{path} does not describe a machine, because {', '.join(wrong)} must be positive numbers: write it again "
            "with hfscale calibrate --out FILE"
        )
    given = {field.name: data[field.name] for field in fields(Machine) if field.name in data}
    given |= {
        "sources": tuple(data.get("sources", ())),
        "name": str(data.get("name", path.stem)),
    }
    return Machine(**given)


@dataclass(frozen=True)
class Constants:
    """Hold the constants with which the times of a machine are estimated, such as the fraction of the peak FLOPs that
    matrix products reach.
    """

    products: float  # fraction of the peak that matrix products reach
    attention: float  # fraction of the peak that the attention kernel reaches
    memory: float  # fraction of the memory bandwidth that elementwise kernels reach
    elementwise: float  # bytes that elementwise kernels really move / bytes in the time model
    loss_bytes: float  # bytes moved per logit, forward and backward
    link: float  # fraction of the link's bandwidth for a layer's exposed collectives
    # Fraction of the network's bandwidth for these collectives, if tensor-parallel ranks are on several nodes.
    far_nic: float
    far_latency: float  # extra seconds per tensor-parallel rank and layer in that case
    # Fraction of the link's bandwidth that gradient collectives reach within a node.
    data_link: float
    nic: float  # fraction of the network's bandwidth for gradient collectives
    # Relative increase of a gradient collective's time per doubling of the nodes.
    spread: float
    hidden: float  # seconds of gradient all-reduce hidden per second of backward pass
    hidden_shards: float  # the same for reduce-scatter and all-gather (ZeRO)
    latency: float  # seconds per data-parallel rank of a step's all-reduces
    latency_shards: float  # the same for reduce-scatters and all-gathers
    layer_host: float  # seconds of the CPU to launch a layer, forward and backward
    ends_host: float  # the same for embedding, head and loss
    hop: float  # seconds of a transfer between two stages, forward and backward
    step: float  # other seconds of a step: reading a batch, clipping, logging
    update_bytes: float  # bytes that the optimizer moves per weight
    sharpness: float  # of the soft maximum of CPU and device time; larger is sharper


@cache
def fitted() -> Constants:
    """Return the timing constants in ``constants.json``: fitted on steps of hfscale, and for communication on public
    runs of other code.
    """
    return replace(read_constants(CONSTANTS), **json.loads(CONSTANTS.read_text())["own"])


def constants_of(hardware: str | Machine) -> Constants:
    """Return the timing constants that ``hfscale calibrate`` measured, if ``hardware`` is its file; otherwise
    :func:`fitted` ones.
    """
    path = Path(hardware) if isinstance(hardware, str) else None
    if path is not None and path.is_file() and '"time"' in path.read_text():
        return read_constants(path)
    return fitted()


def evidence(hardware: str | Machine) -> tuple[str, str]:
    """Return two texts that tell what an estimate is based on: the machine's rates with their source, and the
    measurements from which seconds were derived.
    """
    machine = find_machine(hardware)
    if machine.name not in machine_names():
        source = "as its file says"
    elif machine.measured:
        source = "as its vendor says; steps of hfscale were measured on one"
    else:
        source = "as its vendor says; nothing was measured on it (hfscale calibrate does)"
    rates = f"{machine.rates}; {source}"
    calibrated = constants_of(hardware) != fitted()
    return (
        rates,
        "seconds: estimated, with the constants of its calibration" if calibrated else _FITTED,
    )


def read_constants(path: Path) -> Constants:
    """Read timing constants from the entry ``"time"`` of a JSON file; raise :class:`ConfigError` if one is missing."""
    constants = json.loads(path.read_text()).get("time", {})
    names = [field.name for field in fields(Constants)]
    missing = [name for name in names if name not in constants]
    if missing:
        raise ConfigError(
            f"{path} lacks the constants {', '.join(missing)} of the time estimates: write the file again with hfscale "
            "calibrate --out FILE"
        )
    return Constants(**{name: float(constants[name]) for name in names})
