"""Stop all ranks after the same step when a signal announces that a machine will be preempted.

The signal reaches processes at different moments, and some processes never (Slurm signals one process per node). So at
the end of every step, an all-reduce of one number on the CPU tells all ranks whether any rank got the signal. A rank
that waits for a dead rank never reaches this all-reduce, so a thread ends its process after a time limit.
"""

import os
import signal
import socket
import sys
import threading
import time
from types import FrameType

from torch import nn

from ..distributed.failures import CODE
from ..errors import ConfigError, check_number
from .runtime import runtime_of
from .runtime.writing import is_saving

_LOOK = 0.5  # seconds between two checks whether a save is running
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_listener: "list[_Listener]" = []


class Preempted(SystemExit):
    """End a process after a stop signal, with exit code 75 ("try again"). Raise it after the state was saved; see
    :func:`preempted`.
    """

    def __init__(self) -> None:
        super().__init__(CODE)


def preempted(model: nn.Module, *, patience: float = 20.0) -> bool:
    """Return whether any rank received SIGTERM or SIGUSR1, with the same answer on every rank; call it after each step.

    The first call installs signal handlers, so make it before the first step. A process that waits for a dead rank
    cannot call this function. If a process got the signal and does not call it within ``patience`` seconds, it ends
    with exit code 75. A running save is not interrupted: the seconds then count from the save's end::

        for step in range(start, steps):
            if hfscale.preempted(model):
                hfscale.save_state(model, f"states/step-{step}", ...)
                raise hfscale.Preempted

    Raises:
        ConfigError: the first call is not made by the main thread; Python handles signals only there.
    """
    mesh = runtime_of(model).mesh
    check_number("patience", patience, above=0)
    if not _listener:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "the first call of preempted must be in the main thread, because only the main thread can handle "
                "signals: call it before threads start"
            )
        _listener.append(_Listener(patience))
    listener = _listener[0]
    listener.patience = patience
    told = bool(mesh.largest(int(listener.told))[0])
    if told:
        listener.answered.set()
    return told


class _Listener:
    """Listen for stop signals, and end the process by a thread if the training loop does not react to one in time."""

    def __init__(self, patience: float) -> None:
        # told: whether a signal was received
        self.told = False
        self.patience = patience
        # Set when the training loop has read the signal, or when the listener is closed.
        self.answered = threading.Event()
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        # Python runs signal handlers between two Python instructions, so not while the main thread waits for another
        # rank.
        self._woken = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        self._thread = threading.Thread(target=self._watch, name="hfscale-preemption", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and restore the previous signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._woken)
        self._write.close()
        self.answered.set()
        self._thread.join()
        self._read.close()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.told = True

    def _watch(self) -> None:
        while (number := self._read.recv(1)) and number[0] not in SIGNALS:
            pass
        if not number:  # closed
            return
        self.told = True
        came = time.monotonic()
        idle_since = time.monotonic()
        while not self.answered.wait(min(_LOOK, self.patience)):
            if is_saving():
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since >= self.patience:
                break
        else:
            return
        print(
            f"hfscale: {signal.Signals(number[0]).name} came {time.monotonic() - came:.0f} s ago, and the step has "
            "not ended: this process waits for a process that is gone, or its steps take longer than patience "
            "(preempted(model, patience=...)). Ending this process",
            file=sys.stderr,
            flush=True,
        )
        os._exit(CODE)


def stop_listening() -> None:
    """Restore the signal handlers that :func:`preempted` replaced. Call it at the end of a training loop if the process
    continues.
    """
    while _listener:
        _listener.pop().close()
