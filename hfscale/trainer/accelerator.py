"""The accelerator inside a Trainer: its processes are the distinct batches."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard, get_sampler
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.utils.data import IterableDataset, Sampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from .._host.accelerate import is_prepared
from .._host.transformers.trainer import seed_workers_by
from ..accelerator import Accelerator
from ..train import metrics
from .batches import Collator, Marked, rows_of
from .dealt import DealtStream, dealt


class TrainerAccelerator(Accelerator):
    """:class:`hfscale.Accelerator` that a Trainer asks for processes and means distinct batches."""

    _listed = (Sampler,)
    _last: tuple[int, int] | None = None  # of the batch of a stream that is evaluated
    _counts: list[int] | None = None  # rows that count, of each data rank, in the batch that is evaluated

    def __init__(self, **kwargs: Any) -> None:
        if kwargs.get("mixed_precision") == "fp16":
            kwargs["mixed_precision"] = "no"  # the model has its own, and train_step scales the loss
        super().__init__(**kwargs)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether gradients overflowed in float16, so that the schedule is not to go on either."""
        if self._runtime is None:
            return False
        return bool(metrics(self._runtime.model).get("step_was_skipped", False))

    def adopt(self, model: nn.Module) -> None:
        """Count the distinct batches of this model from now on, in place of any other's."""
        self._runtime = None
        self._adopt(model)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """As :class:`hfscale.Accelerator`'s; ranks that share a batch augment its samples alike."""
        seed_workers_by(data_loader, self.mesh.batch_rank)
        if self.num_processes > 1 and not is_prepared(data_loader):  # which are dealt some examples twice
            if isinstance(data_loader.dataset, IterableDataset):
                data_loader = dealt(data_loader, self.num_processes, self.process_index, self.split_batches)
            data_loader.collate_fn = Collator(data_loader.collate_fn)
        # Batches stay on the CPU, where a step looks at them without waiting for a device, and moves them in one copy.
        return super().prepare_data_loader(data_loader, False, slice_fn_for_dispatch)

    def examples_of(self, batch: Any, of_stream: bool = False) -> tuple[int, int] | None:
        """How many examples the batch has that the loader has just given, and how many of them repeat none.

        Data ranks are dealt batches of one size; the last ones are filled up with examples from the beginning. ``None``
        where none can have been, on every rank alike.

        Args:
            of_stream: whether it is of a stream that is trained on, whose loader may be at its end already.
        """
        state, self._last = self.gradient_state, None
        if self.num_processes == 1:
            size = getattr(state.active_dataloader, "batch_size", None)
            if state.end_of_dataloader and state.remainder == -1 and size and not of_stream:
                self._last = size, rows_of(batch)  # of a stream, whose last batch may have fewer rows
            return None
        if not self.even_batches:
            return None
        if of_stream or isinstance(getattr(state.active_dataloader, "dataset", None), DealtStream):
            known = batch.known if isinstance(batch, Marked) and any(batch.known) else (rows_of(batch),) * 2
            self._last = None if of_stream else known
            return known
        return self._dealt_last(state.active_dataloader) if state.end_of_dataloader else None

    def _dealt_last(self, loader: Any) -> tuple[int, int] | None:
        """Of the last batch. Accelerate's remainder is lost where a run goes on in the middle of an epoch."""
        sampler: Any = loader.batch_sampler
        while sampler is not None and not isinstance(sampler, BatchSamplerShard):
            sampler = getattr(sampler, "batch_sampler", None)
        if sampler is None or sampler.drop_last or not sampler.batch_size:
            return None
        size = sampler.batch_size // self.num_processes if sampler.split_batches else sampler.batch_size
        left = len(sampler.batch_sampler.sampler) % (size * self.num_processes)
        return size, size if left == 0 else min(size, max(0, left - self.process_index * size))

    @contextmanager
    def counting(self, rows: int) -> Iterator[None]:
        """Within: of what is gathered, the first ``rows`` rows of this rank count, and no others.

        A rank without any has one row, since its passes wait for those of other ranks.
        """
        counts: Tensor = super().gather(torch.tensor([rows], device=self.device))
        self._counts = counts.tolist()
        try:
            yield
        finally:
            self._counts = None

    def gather(self, tensor: Any) -> Any:
        """Accelerate's, of distinct batches; without rows that repeat others."""
        if self._counts is None or not isinstance(tensor, Tensor):
            return super().gather(tensor)
        counts = self._counts
        if tensor.ndim == 0:
            return _OfRanks.of(super().gather(tensor), counts)
        here, most = max(counts[self.process_index], 1), max(counts)
        chunks = tensor.unflatten(0, (-1, here))  # chosen and rejected rows, say
        filled = chunks.new_zeros((len(chunks), most, *chunks.shape[2:]))
        filled[:, :here] = chunks
        every = super().gather(filled).unflatten(0, (len(counts), -1))
        return torch.cat([part[:, :count].flatten(0, 1) for part, count in zip(every, counts, strict=True)])

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Also of a stream, whose length nobody knows, what fills up a batch is dropped.

        A number of each rank's is none of an example's: Accelerate would drop those of all ranks but the first few.
        Such numbers travel in one type: of no rows TRL makes another one (KTO, where a rank has no desirable ones).
        """
        if isinstance(input_data, torch.Tensor) and input_data.ndim == 0:
            return self.gather(input_data.double() if input_data.is_floating_point() else input_data)
        if self._counts is not None:
            return self.gather(input_data)
        gathered = super().gather_for_metrics(input_data, use_gather_object)
        if self._last is None:
            return gathered
        known = self.gather(torch.tensor([self._last], device=self.device)).sum(0).tolist()
        return recursively_apply(lambda each: each[: known[1]] if len(each) == known[0] else each, gathered)

    def _agree_on_order(self, data_loader: Any) -> None:
        sampler = get_sampler(data_loader)
        if isinstance(sampler, LengthGroupedSampler):
            sampler.batch_size *= self.mesh.batch_world  # of a step, as in one process
        super()._agree_on_order(data_loader)


class _OfRanks(Tensor):
    """A number of each data rank: their sum, without ranks that have no rows; their mean, weighed by rows."""

    rows: Tensor

    @classmethod
    def of(cls, numbers: Tensor, counts: list[int]) -> "_OfRanks":
        """Numbers of ranks with so many rows."""
        rows = torch.tensor(counts, device=numbers.device)
        made = torch.where(rows > 0, numbers, 0).as_subclass(cls)
        made.rows = rows
        return made

    def mean(self, *_: Any, **__: Any) -> Tensor:
        """Of the rows."""
        return (self.as_subclass(Tensor) * self.rows).sum() / self.rows.sum()
