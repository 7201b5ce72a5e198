"""Exchange shape and type of the activations between two stages, once.

Samples and tokens are known from the batch. The rest, trailing dims and type (which mixed precision decides), is sent
over the control group with the first activations of each stage; later only the activations travel.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...distributed.mesh import Mesh
from ...distributed.ops.collectives import waiting
from ...errors import ConfigError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LENGTH = 6
_Kind = tuple[tuple[int, ...], torch.dtype]


class ActivationTypes:
    """Hold trailing dims and type of the activations that each stage receives, for training and for evaluation."""

    def __init__(self, mesh: Mesh) -> None:
        self._control = mesh.control
        self._known: dict[tuple[int, bool], _Kind] = {}
        self._told: dict[tuple[int, bool], _Kind] = {}
        self._sending: list[tuple[Tensor, Any]] = []
        self._expected: _Kind | None = None

    def expect(self, trailing: tuple[int, ...], dtype: torch.dtype) -> None:
        """Assume this kind for all hidden states received, without waiting for the sender to announce it."""
        self._expected = trailing, dtype

    def announce(self, stage: int, stream: Tensor, leading: tuple[int, ...], peer: int, training: bool) -> None:
        """Send ``stage`` on rank ``peer`` the kind of hidden states that it will get, the first time. Raise
        :class:`ConfigError` if the stream is not of that kind any more, or does not begin with ``leading``.
        """
        kind = tuple(stream.shape[len(leading) :]), stream.dtype
        if tuple(stream.shape[: len(leading)]) != leading or kind[1] not in _DTYPES:
            raise ConfigError(
                f"the hidden states between stages have the shape {tuple(stream.shape)} and type {stream.dtype} for "
                f"{leading[0]} samples of {leading[1]} tokens, which stages cannot exchange: use pp_size=1"
            )
        told = self._told.setdefault((stage, training), kind)
        if told is not kind:
            if told != kind:
                raise ConfigError(
                    f"the hidden states between stages were {told} and are {kind} now: change precision before the "
                    "first step"
                )
            return
        header = torch.zeros(_LENGTH, dtype=torch.int64)
        header[0], header[1] = _DTYPES.index(kind[1]), len(kind[0])
        header[2 : 2 + len(kind[0])] = torch.tensor(kind[0], dtype=torch.int64)
        self._sending.append((header, dist.isend(header, peer, group=self._control)))

    def learn(self, stage: int, peer: int, training: bool) -> _Kind:
        """Return dims and type of the input of ``stage``; receive them from rank ``peer`` the first time."""
        if self._expected is not None:
            return self._expected
        if (stage, training) not in self._known:
            header = torch.empty(_LENGTH, dtype=torch.int64)
            with waiting("recv", peer, self._control):
                dist.recv(header, peer, group=self._control)
            index, dims, *tail = header.tolist()
            self._known[stage, training] = tuple(tail[:dims]), _DTYPES[index]
        return self._known[stage, training]

    def finish(self) -> None:
        """Wait until the announcements have arrived."""
        for _, work in self._sending:
            work.wait()
        self._sending.clear()
