"""Hosts that each have a directory of one run in their own memory, and files that go from one to another."""

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..distributed.files.complete import FileSum
from ..distributed.mesh import Mesh

Wanted = dict[int, dict[str, tuple[int, int]]]
"""First rank of a host -> file that the host lacks -> a rank whose host has it, and its bytes."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run, each known by its first rank; ``first``: for each rank, the first one of its host."""

    first: list[int]

    @classmethod
    def of(cls, mesh: Mesh, directory: Path) -> "Hosts":
        """Find out which ranks see each other's files in ``directory``; collective."""
        token = directory / f".{secrets.token_hex(8)}"
        token.touch()
        try:
            tokens = mesh.all_gather_object(token.name)
            return cls(
                mesh.all_gather_object(next(rank for rank, each in enumerate(tokens) if (directory / each).exists()))
            )
        finally:
            token.unlink()

    def ranks(self, first: int) -> list[int]:
        """Return the ranks of a host."""
        return [rank for rank, its in enumerate(self.first) if its == first]

    def before(self, first: int) -> list[int]:
        """Return the ranks of the host before, of which this one keeps a copy; none if it is the only one."""
        order = sorted({*self.first})
        return self.ranks(order[order.index(first) - 1]) if len(order) > 1 else []

    def copy_to_next(
        self, mesh: Mesh, every: Sequence[dict[str, FileSum]], directory: Path
    ) -> list[dict[str, FileSum]]:
        """Send what each rank has written (``every``) to the next host; return the files of this host. Collective."""
        own = [{name: file for name, file in files.items() if name.startswith("rank-")} for files in every]
        wanted: Wanted = {
            first: {name: (rank, file.size) for rank in self.before(first) for name, file in own[rank].items()}
            for first in {*self.first}
        }
        self.send(mesh, wanted, directory)
        first = self.first[mesh.rank]
        return [*(every[rank] for rank in self.ranks(first)), *(own[rank] for rank in self.before(first))]

    def send(self, mesh: Mesh, wanted: Wanted, directory: Path) -> None:
        """Send files between the hosts' directories; collective, with the same ``wanted`` on every rank."""
        transfers: list[tuple[Any, int, int]] = []  # contents, from, to
        for first, files in sorted(wanted.items()):
            ranks = self.ranks(first)
            for number, (name, (source, size)) in enumerate(sorted(files.items())):
                target, content = ranks[number % len(ranks)], None
                if mesh.rank == target:
                    with (directory / name).open("wb") as file:
                        os.posix_fallocate(file.fileno(), 0, size)  # an error now, and no signal later, if it is full
                if mesh.rank in (source, target):
                    content = torch.from_file(str(directory / name), mesh.rank == target, size, dtype=torch.uint8)
                transfers.append((content, source, target))
        mesh.all_gather_object(None)  # nobody sends to a rank without room
        under_way: list[Any] = []
        for tag, (content, source, target) in enumerate(transfers):
            if content is not None:
                move, other = (dist.isend, target) if mesh.rank == source else (dist.irecv, source)
                under_way.append(move(content, other, group=mesh.control, tag=tag))
        for work in under_way:
            work.wait()
