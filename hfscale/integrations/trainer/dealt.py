"""Distribute an iterable dataset over distinct batches.

Data ranks get equally many examples, in the order of one process. If the dataset ends within a step, the last ones are
padded with examples from the beginning, which are marked so that they do not count::

    10 examples, two ranks, 3 rows each         rank 0: 0 1 2 | 6 7 8
                                                rank 1: 3 4 5 | 9 (0) (1)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import DataLoader

_KEPT = (
    *("collate_fn", "num_workers", "pin_memory", "drop_last", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "generator", "prefetch_factor", "persistent_workers"),
)


@dataclass
class Repeated:
    """An example that another rank, or an earlier step, has already."""

    example: Any


class DealtStream(IterableDatasetShard):
    """Accelerate's shard of an iterable dataset, with :class:`Repeated` examples as padding of the last step."""

    def __iter__(self) -> Iterator[Any]:
        ranks = range(self.process_index * self.batch_size, (self.process_index + 1) * self.batch_size)
        first, step = list[Any](), list[Any]()
        for example in self.dataset:
            step.append(example)
            if len(step) == self.batch_size * self.num_processes:
                yield from (step[place] for place in ranks)
                first, step = first or step, []
        if step and not self.drop_last:
            first = first or step
            for place in ranks:
                yield step[place] if place < len(step) else Repeated(first[(place - len(step)) % len(first)])


def dealt(loader: Any, batches: int, index: int, split: bool = False) -> Any:
    """Return a copy of the loader over the examples of distinct batch ``index`` of ``batches``.

    Args:
        split: whether the loader's batch size is the sum over all distinct batches.
    """
    size = loader.batch_size // batches if split else loader.batch_size
    stream = DealtStream(loader.dataset, size, loader.drop_last, batches, index)
    return DataLoader(stream, batch_size=size, **{name: getattr(loader, name) for name in _KEPT})
