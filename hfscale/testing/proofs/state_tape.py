"""Record the states of recurrences between the pieces of whole sequences, and play them to parts of the sequences."""

from dataclasses import dataclass, field

from torch import Tensor
from torch.nn import functional as F

from ...distributed.ops.segments import Segments
from ...plan.sequence_split import Split


@dataclass
class StateTape:
    """Carry states between pieces in one process; a :class:`hfscale.distributed.ops.segments.Chain`."""

    split: Split
    rank: int | None = None  # whose pieces are computed; ``None``: all, which are recorded
    off: bool = True
    _inputs: list[Tensor] = field(default_factory=list)  # of convolutions, in the order of their calls
    _states: list[list[Tensor]] = field(default_factory=list)  # of scans, after each piece
    _played: list[int] = field(default_factory=lambda: [0, 0])

    def begin(self, rank: int | None) -> None:
        """Begin a pass: one of whole sequences, which is recorded anew, or one of a part of them."""
        self.rank, self.off, self._played = rank, False, [0, 0]
        if rank is None:
            self._inputs, self._states = [], []

    def segments(self) -> Segments | None:
        """Return the pieces of this pass; ``None`` in passes that are not of interest."""
        if self.off:
            return None
        ranks = range(self.split.size) if self.rank is None else [self.rank]
        return Segments(tuple(sorted(piece for rank in ranks for piece in self.split.pieces(rank))), None, self)

    def tails(self, x: Tensor, width: int) -> list[Tensor]:
        """Return the inputs before each piece, of the whole sequence."""
        if self.rank is None:
            self._inputs.append(x)
        whole = self._inputs[self._next(0)]
        segments = self.segments()
        assert segments is not None
        tails = [whole[..., max(0, start - width) : start] for start, _ in segments.pieces]
        return [F.pad(tail, (width - tail.shape[-1], 0)) for tail in tails]

    def receive(self, index: int, state: Tensor, anchor: Tensor) -> Tensor:
        """Return the recorded state before a piece."""
        if index == 0:
            if self.rank is None:
                self._states.append([])
            self._next(1)
        if self.rank is None:
            return state
        number = self.rank if index == 0 else 2 * self.split.size - 1 - self.rank
        return self._states[self._played[1] - 1][number - 1] if number else state

    def send(self, index: int, state: Tensor) -> None:
        """Record the state after a piece."""
        if self.rank is None:
            self._states[-1].append(state)

    def _next(self, kind: int) -> int:
        self._played[kind] += 1
        return self._played[kind] - 1
