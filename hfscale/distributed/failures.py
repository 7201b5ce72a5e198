"""Report to every rank of a run when one rank fails: which rank, where and why.

Every rank keeps a connection to rank 0. A rank that raises an error sends a report to rank 0 before it ends. If a rank
is killed, the system closes its connection; if a machine is lost, TCP keepalive ends its connections within seconds.
Rank 0 sends the first failure to all other ranks. Each of these prints it in one line and ends with an exit code on
which launchers restart::

    rank 2  raises ----> rank 0 ----> ranks 1, 3: "[rank1]: hfscale: rank 2 failed: ValueError: ..., at train.py:31"

The threads only wait for sockets. A rank that loads, compiles, saves or is stopped in a debugger keeps its connection,
so it is never taken for a lost rank. ``HFSCALE_FAILURES=0`` turns these reports off.
"""

import atexit
import json
import math
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .._compat.lasting import at_an_uncaught_error
from .._compat.torch_gloo import is_connection_lost
from ..config.environment import guards_are_on
from ..extensions import provided
from .user_code import user_line_of

CODE = 75  # the exit code EX_TEMPFAIL, which asks a launcher to start the process again
SWITCH = "HFSCALE_FAILURES"
_TRACEBACK = "HFSCALE_TRACEBACK"
_GRACE = 0.3  # seconds in which another rank may turn out to have failed first
_NO_MEMORY = "can't allocate memory"  # words in the error of torch's allocator of host memory
_NO_PARAMETERS = "optimizer got an empty parameter list"  # torch's error
_OF_NO_PARAMETERS = (
    "the layers of this rank may train nothing while those of other ranks do: put the parameters into a group, "
    'AdamW([{"params": [...]}], lr=...), which may be empty, or use hfscale.create_optimizer'
)
_BYE = b"\n"
_KNOWN_TO_LAUNCHER = "its launcher knows how"
_ENDING = 5.0  # seconds that a process may take to end once its connections are closed


@dataclass(frozen=True)
class Failure:
    """Describe how a rank failed: by an error, by the end of its process, or by a lost connection to another rank."""

    rank: int
    # ``"error"``: the rank raised an error; ``"gone"``: its process ended or its machine was lost; ``"echo"``: the rank
    # only lost the connection to another rank, which had failed before
    kind: str
    words: str  # the rest of a sentence whose subject is the rank


class Process(NamedTuple):
    """Identify the process of a rank. A process can look up another one under ``/proc`` if both have the same
    ``machine``.
    """

    machine: str
    pid: int

    @classmethod
    def own(cls) -> "Process":
        """Return the machine and process id of the current process."""
        try:
            return cls(f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}", os.getpid())
        except OSError:  # not on Linux
            return cls("", os.getpid())

    def how_it_ended(self, seconds: float = _ENDING) -> str | None:
        """Return the signal or exit code with which the process ended, ``""`` if it is unknown, ``None`` if the process
        still runs after ``seconds``.
        """
        if not self.machine or self.machine != Process.own().machine:
            return ""
        end = time.monotonic() + seconds
        while time.monotonic() < end:  # the system closes connections before the process has ended
            try:
                state, *_, last = (
                    Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
                )
            except OSError:  # the launcher has already collected the exit status
                return _KNOWN_TO_LAUNCHER
            if state in ("Z", "X"):
                code = os.waitstatus_to_exitcode(int(last))
                return f"signal {-code}" if code < 0 else f"exit code {code}"
            time.sleep(0.01)
        return None


def is_wanted() -> bool:
    """Return whether ranks report failures to each other. By default they do if a launcher started them."""
    return os.environ.get(SWITCH, "1" if "RANK" in os.environ else "0") != "0"


def share_failures(group: dist.ProcessGroup | None) -> "Reporter | None":
    """Let this rank report its failure, and end when another rank fails; collective over ``group`` (all ranks).

    Return the reporter, or ``None`` if reports are off or rank 0 could not be reached.
    """
    rank = dist.get_rank()
    wanted = is_wanted() and guards_are_on()
    listener = _Listener() if wanted and rank == 0 else None
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        every,
        (wanted, Process.own(), listener and listener.place),
        group=group,
    )
    if not all(failure[0] for failure in every):
        return None
    processes, (host, port, token) = [Process(*failure[1]) for failure in every], every[0][2]
    if listener is not None:
        listener.processes = processes
        listener.start()
    try:
        connection = socket.create_connection((host, port), timeout=10)
    except OSError as error:
        print(
            f"[rank{rank}]: hfscale: could not connect to rank 0 to report failures ({error}); the run goes on "
            "without these reports",
            file=sys.stderr,
        )
        return None
    return Reporter(rank, _kept_alive(connection), token, processes, listener)


class Reporter(threading.Thread):
    """Wait in a thread for the first failure of any rank, which ends this process too, and report the error that ends
    this rank.
    """

    def __init__(
        self,
        rank: int,
        connection: socket.socket,
        token: str,
        processes: list[Process],
        listener: "_Listener | None",
    ) -> None:
        super().__init__(name="hfscale-failures", daemon=True)
        self.rank = rank
        self.processes = processes
        self._connection = connection
        self._listener = listener
        self._failing, self._stopped, self._heard = False, False, threading.Event()
        self.first: Failure | None = None  # the first failure of any rank, once it is known
        connection.sendall(_line({"rank": rank, "token": token}))
        at_an_uncaught_error(self.report)
        _connected[:] = [self]
        atexit.register(self.stop)
        # A forked process would keep the connection open after this process has ended.
        os.register_at_fork(after_in_child=connection.close)
        self.start()

    def report(self, error: BaseException) -> bool:
        """Report the error that ends this process to rank 0; return whether this rank failed before all others.

        If the error is only a lost connection to another rank, which has failed, the report may end this process before
        it returns.
        """
        lost = is_connection_lost(error)
        self._failing = not lost
        if not isinstance(error, KeyboardInterrupt):  # launchers send an interrupt to every rank
            words = str(error).strip().partition("\n")[0]
            words += f" ({_OF_NO_PARAMETERS})" if words == _NO_PARAMETERS else ""
            text = (
                f"failed: {type(error).__name__}: {words}, at {user_line_of(error.__traceback__)}"
            )
            with suppress(OSError):
                self._connection.sendall(
                    _line(asdict(Failure(self.rank, "echo" if lost else "error", text)))
                )
                self._heard.wait(
                    _ENDING if lost and not os.environ.get(_TRACEBACK) else _GRACE + 0.5
                )
        return self.first is None or self.first.rank == self.rank

    def run(self) -> None:
        """Wait for the first failure of any rank; if it is another rank's failure, print it and end this process."""
        line = b""
        with suppress(OSError):
            line = _first_line(self._connection)
        if self._stopped:
            return
        first = (
            Failure(**json.loads(line))
            if line.strip()
            else _failure_of_lost_rank(0, self.processes, said_bye=bool(line))
        )
        self.first = first
        if first is not None and first.rank != self.rank and not self._failing:
            text = f"rank {first.rank} {first.words}; this rank ends with it (exit code {CODE})"
            sys.stdout.flush()
            print(f"[rank{self.rank}]: hfscale: {text}", file=sys.stderr, flush=True)
            os._exit(CODE)
        self._heard.set()

    def stop(self) -> None:
        """Tell rank 0 that this rank ends without a failure, unless one was reported; on rank 0, also stop
        listening.
        """
        self._stopped = True
        with suppress(OSError):
            self._connection.sendall(_BYE)
        if self._listener is not None:
            self._listener.send_line(_BYE)
        self._connection.close()


_connected: list[Reporter] = []


def tell_others(error: BaseException) -> bool | None:
    """Report an error to all ranks although the program catches it. Return whether this rank failed first, as
    :meth:`Reporter.report` does; ``None`` if reports are off.
    """
    return _connected[0].report(error) if _connected else None


def explained(error: BaseException) -> str:
    """Return a text that tells what held the memory, if ``error`` is an out-of-memory error and an extension explains
    such errors, or what to do on a rank whose layers train nothing; otherwise ``""``.
    """
    if str(error) == _NO_PARAMETERS:
        return f"hfscale: {_OF_NO_PARAMETERS}"
    if not (isinstance(error, MemoryError | torch.OutOfMemoryError) or _NO_MEMORY in str(error)):
        return ""
    try:
        explain = provided("explanations", "memory")
        return "" if explain is None else str(explain(error))
    except Exception as another:  # the explanation itself may fail, because memory has run out
        return f"the memory in use could not be listed ({another})"


def explain_errors() -> None:
    """Install a hook for errors that end this process: it prints what :func:`explained` returns, after the
    traceback.
    """
    # The explanation is made before other ranks receive the failure, because the launcher then ends this process.
    at_an_uncaught_error(explained, _print_behind)


def _print_behind(text: str) -> None:
    if text:
        print(text, file=sys.stderr, flush=True)


class _Listener(threading.Thread):
    """Receive the failures of all ranks in a thread of rank 0, and send the first failure to every rank. :attr:`place`
    is the host, port and secret token with which ranks connect.

    After one failure is received, wait a moment, because another rank may have failed earlier.
    """

    processes: list[Process]

    def __init__(self) -> None:
        super().__init__(name="hfscale-listener", daemon=True)
        alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
        host = "127.0.0.1" if alone else os.environ.get("MASTER_ADDR", "127.0.0.1")
        self._server = socket.create_server(
            ("127.0.0.1" if host in ("127.0.0.1", "localhost") else "", 0)
        )
        self.place = (host, self._server.getsockname()[1], secrets.token_hex(16))
        self._ranks: dict[socket.socket, int] = {}
        self._left: list[int] = []  # ranks that have said good-bye
        os.register_at_fork(after_in_child=self._close)

    def run(self) -> None:
        """Receive failures until it is known which rank failed first, then send this failure to all ranks."""
        failures: list[Failure] = []
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            until = 0.0
            while not failures or time.monotonic() < until:
                for key, _ in selector.select(_GRACE if failures else None):
                    if key.fileobj is self._server:
                        self._accept(selector)
                    elif (failure := self._read(key, selector)) is not None:
                        # An echo after a rank has said good-bye: the exit code of that rank may be known soon.
                        lost = failure.kind == "echo" and self._left
                        now = time.monotonic()
                        until = min(until or math.inf, now + (_ENDING / 2 if lost else _GRACE))
                        failures.append(failure)
        first = min(
            failures,
            key=lambda each: ("error", "gone", "echo").index(each.kind),
        )
        if first.kind == "echo" and self._left:
            first = Failure(self._left[0], "gone", "ended while other ranks still wait for it")
        self.send_line(_line(asdict(first)))

    def send_line(self, line: bytes) -> None:
        """Send a line of text to all ranks. Rank 0, to which this process belongs, is the last, because the line may
        end the process.
        """
        for connection in sorted(self._ranks, key=self._ranks.__getitem__, reverse=True):
            with suppress(OSError):
                connection.sendall(line)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with suppress(OSError):
            connection = _kept_alive(self._server.accept()[0])
            connection.settimeout(2)
            # the line may be from a program that is no rank
            with suppress(OSError, ValueError, KeyError, TypeError):
                hello = json.loads(_first_line(connection))
                if secrets.compare_digest(hello["token"], self.place[2]):
                    self._ranks[connection] = int(hello["rank"])
                    selector.register(connection, selectors.EVENT_READ)
                    return
            connection.close()

    def _read(self, key: selectors.SelectorKey, selector: selectors.BaseSelector) -> Failure | None:
        selector.unregister(key.fileobj)
        if key.data is not None:  # the process of a rank that had said good-bye has ended
            os.close(key.fd)
            return _failure_of_lost_rank(key.data, self.processes, said_bye=True)
        source: Any = key.fileobj
        rank = self._ranks[source]
        line = b""
        with suppress(OSError):
            line = _first_line(source)
        if line != _BYE:
            return (
                Failure(**json.loads(line)) if line else _failure_of_lost_rank(rank, self.processes)
            )
        self._left.append(rank)
        with suppress(OSError, AttributeError):  # the process has ended, or this is not Linux
            if self.processes[rank].machine == Process.own().machine:
                selector.register(
                    os.pidfd_open(self.processes[rank].pid), selectors.EVENT_READ, rank
                )
        return None

    def _close(self) -> None:
        for connection in (self._server, *self._ranks):
            connection.close()


def _failure_of_lost_rank(
    rank: int, processes: list[Process], said_bye: bool = False
) -> Failure | None:
    """Return the failure of a rank whose connection has ended; ``None`` if its process still runs, or ended with exit
    code 0. ``said_bye`` tells that the rank announced its end; then a process whose exit code is unknown has not failed
    either.
    """
    how = processes[rank].how_it_ended(math.inf if said_bye else _ENDING)
    if (
        how is None
        or how == "exit code 0"
        or (said_bye and how in ("", _KNOWN_TO_LAUNCHER, f"exit code {CODE}"))
    ):
        return None
    return Failure(rank, "gone", f"ended ({how})" if how else "was lost, or its machine was")


def _line(values: dict[str, Any]) -> bytes:
    return json.dumps(values).encode() + b"\n"


def _first_line(connection: socket.socket) -> bytes:
    """Return the first line that a connection sends, and read no byte after it; empty if the connection has ended."""
    line = b""
    # No makefile(), which would keep the connection open in forked processes.
    while not line.endswith(b"\n"):
        if not (more := connection.recv(1)):
            return b""
        line += more
    return line


def _kept_alive(connection: socket.socket) -> socket.socket:
    """Set TCP keepalive options on a connection, so that the system notices within seconds that the other machine is
    gone.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 2),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 5000),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.settimeout(None)
    return connection
