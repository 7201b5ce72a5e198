"""Check this machine: versions, devices, an 8-bit optimizer step, collectives, and Accelerate's settings."""

import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from packaging.requirements import Requirement

from ..._compat.torch_device import ACCELERATOR, accelerators
from ..._compat.versions import untested
from ...errors import ConfigError
from ...optim.eight_bit import try_step
from ..ranks import MeasurementError, run_ranks
from . import Finding

_ALSO = ("bitsandbytes", "trl", "datasets")
_TOLD = (
    "ACCELERATE_USE_CPU",
    "ACCELERATE_MIXED_PRECISION",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
)
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_LAYOUT = "PARALLELISM_CONFIG_"
_ONE_PROCESS = ("NO", "MULTI_CPU")


def versions() -> list[Finding]:
    """Return findings about the installed versions of torch and the other libraries: whether hfscale supports them, and
    whether it was tested with them.
    """
    try:
        asked = [Requirement(text) for text in metadata.requires("hfscale") or ()]
    except metadata.PackageNotFoundError:  # run from its sources
        asked = []
    needed = [
        requirement
        for requirement in asked
        if "tested" not in str(requirement.marker)
        and (not requirement.marker or requirement.name in _ALSO)
    ]
    known = {requirement.name: requirement for requirement in needed or [Requirement("torch")]}
    newer = untested()
    return [_version(requirement, newer.get(requirement.name)) for requirement in known.values()]


def _version(asked: Requirement, newer: str | None) -> Finding:
    """Return a finding about the installed version of the library ``asked``; ``newer`` is a note if hfscale was not
    tested with this version.
    """
    optional = asked.name in _ALSO
    try:
        version = metadata.version(asked.name)
    except metadata.PackageNotFoundError:
        missing = "is not installed" + (" (optional)" if optional else f": pip install '{asked}'")
        return Finding(asked.name, "note" if optional else "problem", missing)
    if not asked.specifier.contains(version, prereleases=True):
        text = (
            f"{version}, but hfscale is made for {asked.specifier}: install one of those versions"
        )
        return Finding(asked.name, "problem", text)
    if newer:
        return Finding(asked.name, "note", f"{version}, which hfscale was not tested with: {newer}")
    return Finding(asked.name, "ok", version + (f" ({asked.specifier})" if asked.specifier else ""))


def devices() -> list[Finding]:
    """Return findings about the GPUs (without GPUs, the number of CPU cores) and torch's backends for collectives."""
    carried = [name for name in ("nccl", "gloo", "mpi") if getattr(dist, f"is_{name}_available")()]
    findings = [
        Finding(
            "backends",
            "ok" if "gloo" in carried else "problem",
            ", ".join(carried) or "none: install another build of torch",
        )
    ]
    gpus = accelerators().device_count()
    if not gpus:
        text = f"none: ranks are processes over gloo, on {os.cpu_count()} cores; set OMP_NUM_THREADS=1 for several"
        return [Finding("GPUs", "note", text), *findings]
    one = accelerators().get_device_properties(0)
    text = f"{gpus} x {one.name}, {one.total_memory / 1e9:.0f} GB each"
    if "nccl" not in carried:
        findings.append(
            Finding(
                "GPUs", "problem", "torch has no NCCL: install a build of torch for CUDA on Linux"
            )
        )
    if not any("expandable_segments" in os.environ.get(name, "") for name in _ALLOCATOR):
        text = f"MoE models and batches of varying length fragment memory: set {_ALLOCATOR[0]}=expandable_segments:True"
        findings.append(Finding("GPU memory", "note", text))
    return [Finding("GPUs", "ok", text), *findings]


def eight_bit_step() -> Finding:
    """Check that a step of bitsandbytes' 8-bit AdamW runs on this machine."""
    device = torch.device(ACCELERATOR, 0) if accelerators().is_available() else torch.device("cpu")
    try:
        text = try_step(device)
    except ConfigError as error:
        return Finding("8-bit step", "note", str(error))
    except (RuntimeError, OSError, AttributeError) as error:  # a library built for another platform
        return Finding("8-bit step", "problem", f"bitsandbytes cannot step on {device}: {error}")
    return Finding("8-bit step", "ok", text)


def collectives() -> Finding:
    """Check that an all-reduce between processes gives the right sum: one process per GPU, and at least two
    processes.
    """
    world = max(2, accelerators().device_count())
    try:
        total = run_ranks(world, sum_of_ranks, timeout=300)
    except MeasurementError as error:
        return Finding("collectives", "problem", f"{error}; NCCL_DEBUG=INFO tells more about GPUs")
    if total != world * (world - 1) / 2:
        return Finding(
            "collectives",
            "problem",
            f"{world} ranks summed up their numbers to {total}: check the network",
        )
    over = "NCCL" if world <= accelerators().device_count() else "gloo"
    return Finding(
        "collectives",
        "ok",
        f"{world} ranks communicate over {over}; hfscale bench collectives measures how fast",
    )


def sum_of_ranks(device: torch.device) -> float:
    """Return the sum of the rank numbers of all processes, by an all-reduce in torch's default process group."""
    own = torch.tensor([float(dist.get_rank())], device=device)
    dist.all_reduce(own)
    return float(own)


def accelerate_config(path: Path | None = None) -> Finding:
    """Check Accelerate's config file, at ``path`` or at its default path: whether ``accelerate launch`` would start
    only one process, and which of its settings do not affect hfscale.
    """
    from accelerate.commands.config.config_args import default_config_file

    file = Path(default_config_file) if path is None else path
    about = "accelerate"
    if not file.is_file():
        return Finding(about, "ok", "no config file: launch commands set everything")
    try:
        told: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        return Finding(about, "problem", f"{file} cannot be read: {str(error).splitlines()[0]}")
    told = told if isinstance(told, Mapping) else {}
    kind = str(told.get("distributed_type", "NO"))
    count = int(told.get("num_processes") or 1)
    if (kind in _ONE_PROCESS or told.get("use_cpu")) and count > 1:
        return Finding(
            about,
            "problem",
            f"{file} sets {kind} with {count} processes, but accelerate launch starts one, silently: write "
            f"--multi_gpu --num_processes {count} on the command line (as hfscale train does), also on machines "
            "without GPUs",
        )
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "TP"):
        text = f"{file} asks for {kind}, which hfscale does not use: set the layout by hfscale.ParallelConfig"
        return Finding(about, "note", text)
    precision = str(told.get("mixed_precision") or "no")
    if precision != "no":
        text = f"{file} asks for {precision}, which does not affect an hfscale model: build it with"
        return Finding(about, "note", f"{text} mixed_precision={precision!r}")
    return Finding(about, "ok", f"{file}: {kind}, {count} process(es)")


def environment() -> list[Finding]:
    """Return a note for each environment variable that changes what a launch command or a layout does."""
    names = [name for name in sorted(os.environ) if name in _TOLD or name.startswith(_LAYOUT)]
    return [Finding("environment", "note", f"{name}={os.environ[name]}") for name in names]
