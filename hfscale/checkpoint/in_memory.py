"""Keep the newest state of a run in the memory of its hosts, where it survives the processes.

::

    /dev/shm/hfscale-UID-NAME-DIGEST/step-40-of-4-ID/    a directory of hfscale.save_state

It is written behind the steps. A host has the files of its own ranks and of those of the host before it, so a run goes
on from memory though a host is lost. A state replaces the one before once it is complete on all hosts. ``ID`` is drawn
as the ranks start: files of two attempts at a step are never mixed.
"""

import logging
import os
import re
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._compat.accelerate import stock_optimizer
from ..config.environment import MEMORY, memory_of
from ..distributed.files.complete import Mark, mark_complete
from ..distributed.files.directories import target_of
from ..errors import CheckpointError, check_count
from ..parallel.data import reshard
from ..train.runtime import runtime_of
from ..train.runtime.writing import all_or_none, is_writer
from .hosts import Hosts, Wanted
from .state import load_state, refuse_under_way, taken_now, wait_for_saves, with_state, write_behind
from .state_directory import candidates, changed, mark_of, problems_of
from .state_format import rest_name
from .state_load import Resumed, load_from
from .state_save import write_state

_log = logging.getLogger(__name__)


class StatesInMemory:
    """Save a run to its hosts' memory every few steps, and go on from there in any layout; make it on every rank::

        memory = hfscale.StatesInMemory(model, "states", every=10, optimizer=optimizer, scheduler=scheduler)
        for step in range(memory.load().step, steps):
            ...
            memory.save(step + 1)  # every tenth step; save_state(model, f"states/step-{step + 1}", ...) now and then
        memory.remove()

    Args:
        directory: of the run's states on disk, which need not exist.
        every: steps from one state to the next: at most that many are lost.
        optimizer: as for :func:`hfscale.save_state`, as are ``others``.
        memory: a file system in memory. Attribute ``directory`` is the run's in it, for this user alone.

    Raises:
        CheckpointError: the memory cannot be used, or two states do not fit into it (from the first :meth:`save`).
    """

    def __init__(
        self,
        model: nn.Module,
        directory: str | Path,
        *,
        every: int,
        optimizer: torch.optim.Optimizer | None = None,
        memory: str | Path = MEMORY,
        **others: Any,
    ) -> None:
        check_count("every", every, 1)
        self.every, self.optimizer, self.others = every, optimizer, others
        self.bytes, self.seconds = 0, 0.0  # of the latest state: on this host, and that the steps waited for it
        self._runtime, self._disk, self._looked = runtime_of(model), target_of(directory), False
        mesh = self._mesh = self._runtime.mesh
        self.directory = memory_of(self._disk, memory)
        with all_or_none(mesh, f"{self.directory} cannot be used"):
            self.directory.mkdir(mode=0o700, exist_ok=True)
            if self.directory.is_symlink() or self.directory.stat().st_uid != os.getuid():
                raise CheckpointError(f"{self.directory} belongs to somebody else: remove it, or give another memory=")
            self._hosts = Hosts.of(mesh, self.directory)
            self._start = mesh.all_gather_object(secrets.token_hex(4))[0]
        self._first = self._hosts.first[mesh.rank]

    def save(self, step: int, beside: dict[str, bytes] | None = None) -> bool:
        """Save behind the steps if ``every`` divides ``step``, the steps done; return whether it does. Collective.
        ``beside``: more files, the first rank's.
        """
        if step % self.every:
            return False
        begun, mesh, runtime = time.perf_counter(), self._mesh, self._runtime
        refuse_under_way(runtime, "StatesInMemory.save")
        target = self.directory / f"step-{step}-of-{mesh.layout.total_size}-{self._start}"
        taken = taken_now(runtime, target, self.optimizer, step, self.others)
        with all_or_none(mesh, f"{target} could not be written"):
            taken.beside, runtime.run = mesh.all_gather_object((taken.beside | (beside or {}), runtime.run))[0]
            own = len(taken.rest) + sum(tensor.numel() * tensor.element_size() for tensor in taken.held.values())
            sizes = mesh.all_gather_object(own)
            if not self._looked:  # a run that begins anew
                self._keep_only("")
            here, before = (sum(sizes[r] for r in of(self._first)) for of in (self._hosts.ranks, self._hosts.before))
            if not self.bytes:
                self._check_room(3 * here + 2 * before)  # two states, and a copy that is being written
            self.bytes = here + before
        write_behind(taken, target, lambda: write_state(taken, target, 1, None, self._hosts))
        self.seconds = time.perf_counter() - begun
        return True

    def load(self) -> Resumed:
        """Go on from the newest state, in memory or on disk; of step 0 if there is none. Collective."""
        found = self.newest()
        if found is not None:
            try:
                return self._load(*found)
            except CheckpointError as error:
                _log.warning("%s: taking the newest state of %s instead", error, self._disk)
        return load_state(self._runtime.model, self._disk, optimizer=self.optimizer, missing_ok=True, **self.others)

    def newest(self, disk: Path | None = None) -> tuple[Path, Mark] | None:
        """Return the newest state that the hosts have together, with all of its files on each, or ``None`` if there is
        none or ``disk`` is newer, by default the newest state on disk; remove the others. Collective.
        """
        mesh, self._looked = self._mesh, True
        with all_or_none(mesh, f"{self.directory} could not be read"):
            wait_for_saves()
            own = {path.name: mark_of(path) for path in self.directory.glob("step-*") if not problems_of(path)}
            every: list[dict[str, Mark]] = mesh.all_gather_object(own)
            marks = {name: mark for each in every for name, mark in each.items()}
            held = {name: {file for each in every if name in each for file in each[name].files} for name in marks}
            whole = [n for n in marks if all(rest_name(rank) in held[n] for rank in range(int(n.split("-")[3])))]
            name = max(whole, key=lambda each: _age(marks[each], marks.values()), default="")
            if name and mesh.all_gather_object(is_writer(mesh) and self._outdated(marks[name], disk))[0]:
                name = ""
            if name:
                self._fetch(name, every)
            self._keep_only(name)
        return (self.directory / name, marks[name]) if name else None

    def remove(self) -> None:
        """Free the memory, at the end of a run. Collective."""
        with all_or_none(self._mesh, f"{self.directory} could not be removed"):
            wait_for_saves()
            self._mesh.all_gather_object(None)
            shutil.rmtree(self.directory, ignore_errors=True)

    def _load(self, directory: Path, mark: Mark) -> Resumed:
        mesh, runtime = self._mesh, self._runtime
        with all_or_none(mesh, f"{directory} could not be loaded"):
            if problems := [each for told in mesh.all_gather_object(changed(directory, mesh)) for each in told]:
                raise CheckpointError("; ".join(problems))
            reshard(runtime.model)
            found = load_from(runtime, directory, stock_optimizer(self.optimizer), with_state(self.others))
            runtime.run = mark.run or ""
        return found

    def _fetch(self, name: str, every: list[dict[str, Mark]]) -> None:
        """Fetch the files that this host lacks of a state, and mark it complete."""
        mesh, directory = self._mesh, self.directory / name
        of = [each[name].files if name in each else {} for each in every]
        places = {file: (rank, found.size) for rank, files in enumerate(of) for file, found in files.items()}
        wanted: Wanted = {
            first: {file: place for file, place in places.items() if file not in of[first]}
            for first in {*self._hosts.first}
        }
        directory.mkdir(exist_ok=True)
        self._hosts.send(mesh, wanted, directory)
        mesh.all_gather_object(None)
        if mesh.rank == self._first and wanted[self._first]:
            mark = next(each[name] for each in every if name in each)
            mark_complete(directory, {file: of[rank][file] for file, (rank, _) in places.items()}, mark.step, mark.run)

    def _outdated(self, mark: Mark, disk: Path | None) -> bool:
        """Return whether the newest state on disk is newer; of another run, whether that wrote last."""
        with suppress(CheckpointError):
            there = mark_of(disk or candidates(self._disk)[0])
            return _age(there, (there, mark)) > _age(mark, (there, mark))
        return False

    def _keep_only(self, name: str) -> None:
        """Remove all other states from this host."""
        for path in self.directory.iterdir():
            if path.name != name and self._first == self._mesh.rank:
                shutil.rmtree(path, ignore_errors=True)

    def _check_room(self, needed: int) -> None:
        inside = sum(path.stat().st_size for path in self.directory.rglob("*") if path.is_file())
        found = re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())
        free = min(shutil.disk_usage(self.directory).free, int(found[1]) << 10 if found else needed)
        if needed > free + inside:
            raise CheckpointError(
                f"states in memory take {needed:,} bytes of this host, and {self.directory.parent} has {free:,} free: "
                "save to the disk (hfscale.save_state), or make room"
            )


def _age(mark: Mark, among: Any) -> tuple[bool, int, float]:
    """Return a sort key: the run that wrote last comes last, and then the step."""
    last = max(among, key=lambda each: each.written).run
    return mark.run == last, -1 if mark.step is None else mark.step, mark.written
