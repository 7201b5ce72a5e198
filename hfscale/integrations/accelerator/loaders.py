"""Give ranks that share a batch the same order of samples in an epoch, and the same seeds for workers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import IterableDatasetShard
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler

from ..._compat.accelerate import LastBatch
from ..._compat.torch import before_iterators
from ...distributed.mesh import Mesh

KEPT = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "drop_last",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


class OneOrder(Sampler[int]):
    """Sample in the first rank's order on every rank. Every rank still draws an order, so that its random numbers
    continue as in one process. After :meth:`load_state_dict`, an interrupted epoch continues in its original order.
    """

    def __init__(self, sampler: Any, mesh: Mesh) -> None:
        self.sampler = sampler
        self._mesh = mesh
        self._began: Tensor | None = None  # RNG state from which the current order was drawn
        self._resumed: Tensor | None = None
        self._left_off: Tensor | None = None

    def __iter__(self) -> Iterator[int]:
        own = getattr(self.sampler, "generator", None)
        stream = torch.default_generator if own is None else own
        resumed = self._resumed
        self._resumed = None
        if resumed is not None:
            stream.set_state(resumed)
        drawn = [stream.get_state(), torch.tensor(list(self.sampler))]
        if resumed is not None and own is None and self._left_off is not None:
            stream.set_state(self._left_off)
        if self._mesh.control is not None:
            dist.broadcast_object_list(drawn, src=0, group=self._mesh.control)
        self._began = drawn[0]
        yield from drawn[1].tolist()
        self._began = None

    def __len__(self) -> int:
        return len(self.sampler)

    def state_dict(self) -> dict[str, Any]:
        """Return the RNG state from which the current order was drawn."""
        return {"began": self._began}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the saved RNG state, from which the next epoch's order is then drawn."""
        self._resumed = state["began"]

    def leave_off(self) -> None:
        """Record the RNG's current state. A resumed run sets the RNG to it after the order of the interrupted epoch has
        been drawn again.
        """
        self._left_off = torch.random.get_rng_state()


@dataclass
class _OfLastStep:
    """Mark an example of a stream's last step, in which only ``left`` examples of all ranks are new, and the remaining
    ones are padding.
    """

    example: Any
    left: int


class InOneOrder(IterableDatasetShard):
    """Divide a stream over ranks in the order of one process, in place of Accelerate's shard. The last step is padded
    with examples from the beginning of the stream; a subclass has :meth:`of_last_step`, which marks its examples.
    """

    def __iter__(self) -> Iterator[Any]:
        places = range(
            self.process_index * self.batch_size, (self.process_index + 1) * self.batch_size
        )
        first = list[Any]()
        step = list[Any]()
        for example in self.dataset:
            step.append(example)
            if len(step) == self.batch_size * self.num_processes:
                yield from (step[place] for place in places)
                first = first or step
                step = []
        if step and not self.drop_last:
            left = len(step)
            filled = step + (first or step) * self.num_processes * self.batch_size
            yield from (self.of_last_step(filled[place], place < left, left) for place in places)

    def of_last_step(self, example: Any, is_new: bool, left: int) -> Any:
        """Return an example of the last step, marked. ``is_new`` is whether it is one of the ``left`` examples of all
        ranks that are new in this step, and not padding.
        """
        raise NotImplementedError


class StreamShare(InOneOrder):
    """Divide a stream like Accelerate, in the order of one process; the batches of the last step are
    :class:`~hfscale._compat.accelerate.LastBatch`.
    """

    def __iter__(self) -> Iterator[Any]:
        stream = self.dataset
        if not hasattr(stream, "set_epoch") and isinstance(
            getattr(stream, "generator", None), torch.Generator
        ):
            stream.generator.manual_seed(self.epoch)
        yield from super().__iter__()

    def of_last_step(self, example: Any, is_new: bool, left: int) -> Any:
        """Return the example with the number of new examples, which its batch keeps."""
        return _OfLastStep(example, left)


class PositionedShare(StreamShare):
    """Divide a stream with a ``state_dict`` over ranks. After each batch, the stream's position is that of one process,
    because every rank reads the whole stream.
    """

    def state_dict(self) -> Any:
        """Return the stream's position."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Continue from a position of the stream."""
        self.dataset.load_state_dict(state)


class CollateLast:
    """Wrap ``collate``, a loader's collate function, to mark the batch of a stream's last step, which may contain
    padding (:class:`StreamShare`).
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, examples: list[Any]) -> Any:
        """Collate examples; the last step's batch becomes a :class:`~hfscale._compat.accelerate.LastBatch`."""
        marked = [example for example in examples if isinstance(example, _OfLastStep)]
        if not marked:
            return self._collate(examples)
        return LastBatch(self._collate([example.example for example in marked]), marked[0].left)


def dealt(
    loader: Any,
    batches: int,
    index: int,
    split: bool,
    kind: type[IterableDatasetShard] = StreamShare,
) -> Any:
    """Return a copy of ``loader``, a stream's loader, that yields only batch ``index`` of the ``batches`` distinct
    batches of each step. With ``split``, these are the parts of one batch of ``loader``; otherwise each is as large as
    a batch of ``loader``.
    """
    size = loader.batch_size // batches if split else loader.batch_size
    if kind is StreamShare and hasattr(loader.dataset, "state_dict"):
        kind = PositionedShare
    stream = kind(loader.dataset, size, loader.drop_last, batches, index)
    made = DataLoader(
        stream,
        batch_size=size,
        **{name: getattr(loader, name) for name in KEPT},
    )
    if issubclass(kind, StreamShare):
        made.collate_fn = CollateLast(made.collate_fn)
    return made


def seed_workers_alike(data_loader: Any, mesh: Mesh, seeds: torch.Generator) -> None:
    """Give workers of ranks that share a batch the first rank's seed; every rank draws a seed, like one process."""
    loader = getattr(data_loader, "base_dataloader", data_loader)
    if mesh.sharing is None or not loader.num_workers or loader.generator not in (None, seeds):
        return

    def agree() -> None:
        seeds.manual_seed(
            mesh.all_gather_object(int(torch.empty((), dtype=torch.int64).random_()))[0]
        )

    loader.generator = seeds
    before_iterators(loader, agree)


def is_stream(dataset: Any) -> bool:
    """Return whether a dataset is a stream (of torch or of datasets) that is not yet divided over ranks."""
    streams = isinstance(dataset, IterableDataset) or hasattr(dataset, "n_shards")
    return streams and not isinstance(dataset, IterableDatasetShard)
