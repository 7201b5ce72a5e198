"""Coordinate the ranks of a save: wait until all ranks have called it, fail on all ranks if one fails, and write either
all files or none.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...distributed.files.directories import target_of
from ...distributed.files.replace import NewFiles
from ...distributed.mesh import Mesh
from ...errors import CheckpointError, ConfigError, HFScaleError, RankFailedError, in_words

_log = logging.getLogger(__name__)
_saves: list[None] = []  # one entry per running save of this process
# A function that calls another function and returns its result, or stores its exception and returns ``None``.
Attempt = Callable[..., Any]
_Result = TypeVar("_Result")


def everyone_arrives(mesh: Mesh, timeout: timedelta, call: str) -> None:
    """Wait until every rank has made the same ``call``, such as a save; raise :class:`CheckpointError` if a rank has
    not made it within ``timeout``.
    """
    if mesh.control is None:
        return
    try:
        dist.monitored_barrier(mesh.control, timeout=timeout)
    except RuntimeError as error:
        raise CheckpointError(
            f"{call} is a collective call, and not every rank made it within {timeout.total_seconds():.0f} s: call it "
            f"on all {mesh.layout.total_size} ranks (not only on the main process). Nothing was written. {error}"
        ) from error


@contextmanager
def saving() -> Iterator[None]:
    """Mark that a save is running inside the ``with`` block, for :func:`is_saving`."""
    _saves.append(None)
    try:
        yield
    finally:
        _saves.pop()


def is_saving() -> bool:
    """Return whether a save is running in any thread of this process. Code that would end the process waits until none
    is.
    """
    return bool(_saves)


@contextmanager
def all_or_none(mesh: Mesh | None, what: str) -> Iterator[None]:
    """Make the ``with`` block fail on every rank of ``mesh`` (``None``: only this process) if it fails on one rank.

    The failed rank reports its exception in its next :meth:`Mesh.all_gather_object`, and the other ranks receive it in
    the same call, at the latest at the end of the block. So ranks must not wait for each other in any other way inside
    the block. Every rank raises a :class:`CheckpointError` that begins with ``what`` and names the failed ranks and the
    reasons. If all ranks fail with the same hfscale error, each rank raises that error.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    if (
        isinstance(failure, HFScaleError)
        and failure.everywhere
        and not isinstance(failure, RankFailedError)
    ):
        raise failure  # from a nested block, so all ranks already have the failure
    told, alike = (
        (str(failure), False)
        if isinstance(failure, RankFailedError)
        else _share_failure(mesh, in_words(failure))
    )
    if told:
        own = (
            failure
            if alike and isinstance(failure, HFScaleError)
            else CheckpointError(f"{what}: {told}")
        )
        own.everywhere = True
        raise own from (failure.__cause__ if failure is own else failure)


def sum_or_raise(
    numbers: Sequence[int],
    group: dist.ProcessGroup | None,
    refused: Exception | None,
    elsewhere: str,
) -> list[int]:
    """Sum each of ``numbers`` over the ranks of ``group``, in one all-reduce over gloo; collective. A rank can report
    an error with it: a rank that passes an error as ``refused`` raises it afterwards. All other ranks then raise
    :class:`ConfigError` with the text ``elsewhere``, in which ``{}`` is replaced by the number of ranks with an error.
    """
    refusing, *counts = int(refused is not None), *numbers
    if group is not None:
        sums = torch.tensor([refusing, *counts])
        dist.all_reduce(sums, group=group)
        refusing, *counts = sums.tolist()
    if refused is not None:
        raise refused
    if refusing:
        raise ConfigError(elsewhere.format(refusing))
    return counts


def _share_failure(mesh: Mesh | None, failure: str) -> tuple[str, bool]:
    """Exchange failures: send this rank's ``failure`` (a text; empty if there is none) to all ranks. Return the
    failures as one text, and whether all ranks have the same failure.
    """
    if mesh is None or mesh.control is None:
        return failure, True
    try:
        mesh.all_gather_object(None, failure)
    except RankFailedError as heard:
        alike = list(heard.failures.values()) == [failure] * mesh.layout.total_size
        return (failure if alike else str(heard)), alike
    except Exception as lost:  # for example, a lost connection to a rank
        return failure or in_words(lost), False
    return "", True


def plainly(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``work(*arguments)`` and let exceptions through. It is the default of functions that take an ``attempt``
    to handle exceptions of single operations.
    """
    return work(*arguments)


def not_finite(tensors: Mapping[str, Tensor]) -> str:
    """Return the name of the first tensor that contains NaN or infinity, or ``""``. Each tensor is read once, without
    extra memory.
    """
    finite: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel():
            ends = torch.stack(tensor.detach().aminmax())
            finite.setdefault(tensor.device, {})[name] = ends.isfinite().all()
    for checked in finite.values():
        if not torch.stack(list(checked.values())).all():  # one sync per device
            return next(name for name, right in checked.items() if not right)
    return ""


def warn_of_not_finite(mesh: Mesh, name: str, where: str) -> None:
    """Warn that a tensor in ``where`` contains NaN or infinity. ``name`` is the tensor that this rank has found, or
    ``""``; the warning names the first one found on any rank. Collective.
    """
    unreadable = next(filter(None, mesh.all_gather_object(name)), None)
    if unreadable and mesh.is_first:
        _log.warning(
            "%s has NaN or infinity in %s: every loss computed from this tensor is NaN, so resume from an earlier "
            "save",
            where,
            unreadable,
        )


class Staging:
    """Hold the temporary directory of a save while its files are written, and the first exception of this rank."""

    def __init__(self, path: Path) -> None:
        self.path = path  # the directory for the files; it exists for every rank
        self.failure: Exception | None = None  # the first exception on this rank

    def attempt(self, work: Callable[..., _Result], *arguments: object) -> _Result | None:
        """Return ``work(*arguments)``. If it fails, remember the exception and return ``None``, so that this rank still
        takes part in the following collectives; the save fails at its end. After a failure, return ``None`` without
        calling ``work``.
        """
        if self.failure is None:
            try:
                return work(*arguments)
            except Exception as error:
                self.failure = error
        return None


@contextmanager
def atomic_directory(
    directory: Any, mesh: Mesh | None = None, *, stale: Sequence[str] = ()
) -> Iterator[Staging]:
    """Write files to a temporary directory inside the ``with`` block, and move them to ``directory`` if no rank failed.

    Collective over ``mesh`` (``None``: this process alone), whose first rank creates the directory and moves it
    (:mod:`hfscale.distributed.files.replace`). A rank may raise in the block only if no other rank waits for it in the
    block; otherwise it must use :meth:`Staging.attempt`. Existing files that match ``stale`` are deleted, and all other
    files stay. After a failure, every rank raises, and the directory is unchanged.
    """
    target = target_of(directory)
    staging = Staging(target)
    new = None
    with all_or_none(mesh, f"{target} could not be written"):
        try:
            if mesh is None or mesh.is_first:
                new = NewFiles(target)
                staging.path = new.path
            if mesh is not None:
                staging.path = mesh.all_gather_object(staging.path)[0]
            yield staging
            if staging.failure is not None:
                raise staging.failure
            if mesh is not None:
                mesh.all_gather_object(None)  # wait until every rank is done
            if new is not None:
                new.commit(stale)
        finally:
            if new is not None:
                new.close()
