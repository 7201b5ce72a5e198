"""Hosts that each have a directory of a run in their own memory, and transfers of files between hosts."""

import os
import secrets
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...distributed.files.complete import FileSum
from ...distributed.mesh import Mesh

Files = dict[str, FileSum]


class Hosts:
    """Describe the hosts of a run. A host is identified by its first rank; ``first`` maps every rank to its host's
    first rank.
    """

    def __init__(self, mesh: Mesh, directory: Path) -> None:
        """Find out which ranks share a host: those that see each other's files in ``directory``. Call it on
        every rank.
        """
        token = directory / f".{secrets.token_hex(8)}"
        token.touch()
        tokens = mesh.all_gather_object(token.name)
        seen = next(rank for rank, name in enumerate(tokens) if (directory / name).exists())
        self.first = mesh.all_gather_object(seen)
        token.unlink()
        self.here = self.ranks(self.first[mesh.rank])
        # Whether this rank creates the directories of its host.
        self.makes = mesh.rank == self.here[0]

    def ranks(self, first: int) -> list[int]:
        """Return the ranks of the host whose first rank is ``first``."""
        return [rank for rank, its in enumerate(self.first) if its == first]

    def before(self, first: int) -> list[int]:
        """Return the ranks of the previous host, whose files this host copies; none if there is only one host."""
        order = sorted({*self.first})
        return self.ranks(order[order.index(first) - 1]) if len(order) > 1 else []

    def copy_to_next(self, mesh: Mesh, every: list[Files], directory: Path) -> Files:
        """Send the files that each rank has written (``every``) to the next host, which keeps a copy in case this host
        is lost; return all files of this host, copies included.
        """
        own = [
            {name: file for name, file in files.items() if name.startswith("rank-")}
            for files in every
        ]
        lacks = {host: {n: r for r in self.before(host) for n in own[r]} for host in self.first}
        self.send(
            mesh, lacks, {name: file for files in own for name, file in files.items()}, directory
        )
        kept = [
            *(every[rank] for rank in self.here),
            *(own[rank] for rank in self.before(self.here[0])),
        ]
        return {name: file for files in kept for name, file in files.items()}

    def send(
        self,
        mesh: Mesh,
        lacks: dict[int, dict[str, int]],
        files: Files,
        directory: Path,
    ) -> None:
        """Send to each host the ``files`` that it lacks. ``lacks`` maps a host, and the name of a file, to the rank
        that has the file. All ranks get the same arguments.
        """
        transfers: list[tuple[Any, int, int]] = []  # contents, from, to
        for host, sources in sorted(lacks.items()):
            ranks = self.ranks(host)
            for number, (name, source) in enumerate(sorted(sources.items())):
                target = ranks[number % len(ranks)]
                content = None
                if mesh.rank == target:
                    # Reserve the memory: if memory is full, this is an error now instead of a signal later.
                    with (directory / name).open("wb") as file:
                        if files[name].size:
                            os.posix_fallocate(file.fileno(), 0, files[name].size)
                if files[name].size and mesh.rank in (source, target):
                    path = str(directory / name)
                    size = files[name].size
                    content = torch.from_file(path, mesh.rank == target, size, dtype=torch.uint8)
                transfers.append((content, source, target))
        # Wait for all ranks, so that no rank sends to a rank without enough memory.
        mesh.all_gather_object(None)
        moves: list[Any] = []
        for tag, (content, source, target) in enumerate(transfers):
            if content is not None:
                move, other = (dist.isend, target) if mesh.rank == source else (dist.irecv, source)
                moves.append(move(content, other, group=mesh.control, tag=tag))
        for each in moves:
            each.wait()
