"""Keep the newest state of a run in the memory of its machines (hosts), where it survives the processes.

::

    /dev/shm/hfscale-UID-NAME-DIGEST/RUN/step-40-of-4-ID/    a directory of hfscale.save_state
    DIRECTORY/_hfscale_run                                       RUN, drawn when the run begins

A host has the files of its own ranks and those of the previous host's ranks, so a run can continue from memory even if
one host is lost. A new state replaces the old one once it is complete on all hosts. ``ID`` is drawn when the ranks
start, so files of two attempts at a step never mix. If a run's directory on disk is removed, a new run has another
``RUN``.
"""

import logging
import os
import re
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...checkpoint.state import (
    load_state,
    refuse_under_way,
    save_runs,
    taken_now,
    wait_for_saves,
    write_behind,
)
from ...checkpoint.state_directory import (
    age,
    candidates,
    find_whole,
    mark_of,
    none_there,
    problems_of,
)
from ...checkpoint.state_format import rest_name
from ...checkpoint.state_load import Resumed
from ...checkpoint.state_save import TakenState, write_state
from ...config.environment import MEMORY, RUN, memory_of
from ...distributed.files.complete import Mark, mark_complete
from ...distributed.files.directories import target_of
from ...errors import CheckpointError, check_count
from ...train.runtime import runtime_of
from ...train.runtime.writing import all_or_none
from .hosts import Hosts

_log = logging.getLogger(__name__)


class StatesInMemory:
    """Save a run to its hosts' memory every few steps, and resume from memory in any layout; create it on every rank::

        memory = hfscale.StatesInMemory(model, "states", every=10, optimizer=optimizer, scheduler=scheduler)
        for step in range(memory.load().step, steps):
            ...
            memory.save(step + 1)  # every tenth step; save_state(model, f"states/step-{step + 1}", ...) now and then
        memory.remove()

    Args:
        directory: directory of the run's states on disk; it need not exist. Removing it also discards the memory.
        every: steps between states, and so the maximum number of lost steps.
        optimizer: the optimizer to save with the model.
        memory: a directory on a file system in memory.
        others: further objects with a state, such as ``scheduler=``, as for :func:`hfscale.save_state`.

    Raises:
        CheckpointError: the memory cannot be used, or (from the first :meth:`save`) has no room for two states.
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
        self.every = every
        self.optimizer = optimizer
        self.others = others
        # for the latest saved state: its bytes on this host, and the seconds that training steps waited for the save
        self.bytes = 0
        self.seconds = 0.0
        self._model, self._disk = model, target_of(directory)
        mesh = self._mesh = runtime_of(model).mesh
        whole = memory_of(self._disk, memory)
        with all_or_none(mesh, f"{whole} cannot be used"):
            wait_for_saves()
            whole.mkdir(mode=0o700, exist_ok=True)
            if whole.is_symlink() or whole.stat().st_uid != os.getuid():
                raise CheckpointError(
                    f"{whole} belongs to another user, or is a link: remove it, or give another directory as memory="
                )
            self.directory = whole / self._name_of_run()
            self.directory.mkdir(exist_ok=True)
            self._hosts = Hosts(mesh, self.directory)
            self._start = mesh.all_gather_object(secrets.token_hex(4))[0]
            if self._hosts.makes:
                self._disk.mkdir(parents=True, exist_ok=True)
                self._name_it()
                for left in (
                    *self.directory.glob(".step-*.incomplete"),
                    *self.directory.glob(".step-*.discarded"),
                ):
                    shutil.rmtree(left, ignore_errors=True)  # left by a killed process
                _remove_others(
                    whole, self.directory, "belongs to a run whose directory has been removed"
                )

    def save(self, step: int, beside: dict[str, bytes] | None = None) -> bool:
        """Save the state in the background if ``every`` divides ``step``, the number of steps done; return whether a
        save has begun. Call it on every rank. ``beside``: further files to save, by name, given on the first rank.
        """
        if step % self.every:
            if not save_runs():
                wait_for_saves()  # report a failed save before another step is done
            return False
        begun = time.perf_counter()
        mesh = self._mesh
        hosts = self._hosts
        runtime = runtime_of(self._model)
        refuse_under_way(runtime, "StatesInMemory.save")
        target = self.directory / f"step-{step}-of-{mesh.layout.total_size}-{self._start}"
        taken = taken_now(runtime, target, self.optimizer, step, self.others)
        with all_or_none(mesh, f"{target} could not be written"):
            taken.beside, runtime.run = mesh.all_gather_object(
                (taken.beside | (beside or {}), runtime.run)
            )[0]
            sizes = mesh.all_gather_object(
                sum(tensor.nbytes for tensor in taken.held.values()) + len(taken.rest)
            )
            here, before = (
                sum(sizes[rank] for rank in ranks)
                for ranks in (hosts.here, hosts.before(hosts.here[0]))
            )
            if not self.bytes:
                self._check_room(here, before)
            self.bytes = here + before
        write_behind(taken, target, lambda: self._write(taken, target))
        self.seconds = time.perf_counter() - begun
        return True

    def load(self) -> Resumed:
        """Resume from the newest state, in memory or on disk; without any state, begin at step 0. Call it on every
        rank.
        """
        given = {"optimizer": self.optimizer, **self.others}
        try:
            if (newest := self.newest()) is not None:
                return load_state(self._model, newest, **given)
        except CheckpointError as error:
            # Raise if the disk has no state either: a run from step 0 would replace the state in memory.
            if none_there(self._disk, self._mesh):
                raise
            _log.warning(
                "the state in memory cannot be loaded (%s): loading the newest state of %s instead",
                error,
                self._disk,
            )
        return load_state(self._model, self._disk, missing_ok=True, **given)

    def newest(self, disk: Path | None = None) -> Path | None:
        """Return the newest state in memory, fetched to every host; ``None`` if ``disk`` has a newer one. Call it on
        every rank.
        """
        mesh = self._mesh
        with all_or_none(mesh, f"{self.directory} could not be read"):
            wait_for_saves()
            own = {
                path.name: mark_of(path)
                for path in self.directory.glob("step-*")
                if not problems_of(path)
            }
            every: list[dict[str, Mark]] = mesh.all_gather_object(own)
            marks = {name: mark for state in every for name, mark in state.items()}
            held = {
                name: {file for state in every if name in state for file in state[name].files}
                for name in marks
            }
            ranks = {name: range(int(name.split("-")[3])) for name in marks}  # its writers
            whole = [
                name for name in marks if all(rest_name(rank) in held[name] for rank in ranks[name])
            ]
            name = max(
                whole,
                key=lambda each: age(marks[each], *marks.values()),
                default="",
            )
            if not name or self._outdated(marks[name], disk or self._disk):
                return None
            self._fetch(name, every)
        return self.directory / name

    def remove(self) -> None:
        """Remove the run's states from memory at the end of the run. Call it on every rank."""
        with all_or_none(self._mesh, f"{self.directory} could not be removed"):
            wait_for_saves()
            self._mesh.all_gather_object(None)
            shutil.rmtree(self.directory.parent, ignore_errors=True)

    def _name_of_run(self) -> str:
        """Return the run's name, a random one that is stored in its directory on disk; draw a new name if none is
        stored. Call it on every rank.
        """
        self._mesh.all_gather_object(None)  # the first rank may have removed an earlier run
        path = self._disk / RUN
        own = path.read_text() if path.exists() else ""
        drawn = secrets.token_hex(8)
        names = self._mesh.all_gather_object((own if own.isalnum() else "", drawn))
        return next((name for name, _ in names if name), names[0][1])

    def _name_it(self) -> None:
        """Write the run's name into its directory on disk, unless it is there already; atomically."""
        path = self._disk / RUN
        aside = self._disk / f".{RUN}.{self._mesh.rank}"
        if not path.exists() or path.read_text() != self.directory.name:
            aside.write_text(self.directory.name)
            aside.replace(path)

    def _write(self, taken: TakenState, target: Path) -> None:
        """Write a state; once it is complete on all hosts, remove the states that it replaces."""
        write_state(taken, target, None, None, self._hosts)
        if self._hosts.makes:
            _remove_others(self.directory, target, "belongs to another run", taken.runtime.run)

    def _fetch(self, name: str, every: list[dict[str, Mark]]) -> None:
        """Fetch the files of the state ``name`` that this host lacks, and mark the state as complete. ``every`` has,
        for each rank, the states that the rank sees, by name.
        """
        mesh = self._mesh
        hosts = self._hosts
        directory = self.directory / name
        of = [each[name].files if name in each else {} for each in every]
        files = {file: contents for each in of for file, contents in each.items()}
        sources = {file: rank for rank, each in enumerate(of) for file in each}
        lacks = {
            host: {f: rank for f, rank in sources.items() if f not in of[host]}
            for host in hosts.first
        }
        directory.mkdir(exist_ok=True)
        hosts.send(mesh, lacks, files, directory)
        mesh.all_gather_object(None)
        if hosts.makes and lacks[mesh.rank]:
            mark = next(each[name] for each in every if name in each)
            mark_complete(directory, files, mark.step, mark.run)

    def _outdated(self, mark: Mark, disk: Path) -> bool:
        """Return whether the disk has a complete state that is newer than the one with ``mark`` in memory (or, of
        another run, written later). Collective.
        """
        mesh = self._mesh

        def newer(directory: Path) -> bool:
            there = mark_of(directory)
            by_time = there.step is None and there.run == mark.run
            return (
                there.written > mark.written
                if by_time
                else age(there, there, mark) > age(mark, there, mark)
            )

        if (
            none_there(disk, mesh)
            or not mesh.all_gather_object(mesh.is_first and newer(candidates(disk)[0]))[0]
        ):
            return False
        try:
            on_disk = find_whole(disk, mesh, verify=True)
        except CheckpointError as error:  # the same error on all ranks
            _log.warning("%s: going on from memory", error)
            return False
        return bool(mesh.all_gather_object(newer(on_disk))[0])

    def _check_room(self, here: int, before: int) -> None:
        """Raise if this host's memory has no room for two states, of which one may exist already, and for the new state
        while it is written. A host keeps the state of its own ranks (``here`` bytes), and a copy of the state of the
        ranks of the previous host (``before`` bytes); hosts form a ring.
        """
        there = sum(path.stat().st_size for path in self.directory.rglob("*"))
        needed = max(there, here + before) + 2 * here + before
        match = re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())
        free = (
            min(
                shutil.disk_usage(self.directory).free,
                int(match[1]) << 10 if match else needed,
            )
            + there
        )
        if needed > free:
            raise CheckpointError(
                f"states in memory need {needed:,} bytes of this host, but {self.directory.parent} has only {free:,} "
                "bytes free: save to the disk (hfscale.save_state), or free some memory"
            )


def _remove_others(
    directory: Path,
    kept: Path,
    why: str,
    run: str | None = None,
) -> None:
    """Remove everything in a directory except ``kept``. Log the reason ``why`` for each removed entry; if ``run`` is
    given, only for complete states of other runs.
    """
    for path in directory.iterdir():
        if path != kept:
            if run is None or (not problems_of(path) and mark_of(path).run != run):
                _log.warning(
                    "the state %s %s, and %s replaces it, so it is removed from memory",
                    path,
                    why,
                    kept,
                )
            shutil.rmtree(path, ignore_errors=True)
