"""Provide the accelerator inside a Trainer, for which ranks that share a batch (tensor ranks, for example) are one
process.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard, get_sampler
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.utils.data import IterableDataset, Sampler
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

from ..._compat.accelerate import is_prepared
from ..._compat.transformers.trainer import seed_workers_by
from ...parallel.pipeline.microbatches import rows_of
from ...train.step import metrics
from ..accelerator import Accelerator
from ..accelerator.loaders import dealt
from .trainer_batches import Collator, DealtStream, Marked, balanced


class TrainerAccelerator(Accelerator):
    """Adapt :class:`hfscale.Accelerator`, for which ranks that share a batch (tensor ranks, for example) are one
    process, to a Trainer.
    """

    _listed = (Sampler,)
    # For an evaluated batch of an iterable dataset: the number of rows, and of rows that count.
    _last: tuple[int, int] | None = None
    _counts: list[int] | None = None  # rows that count in the evaluated batch, by data rank

    def __init__(self, **kwargs: Any) -> None:
        if kwargs.get("mixed_precision") == "fp16":
            # hfscale's model casts by itself, and train_step scales the loss.
            kwargs["mixed_precision"] = "no"
        kwargs.pop("dynamo_plugin", None)  # hfscale compiles layers itself
        super().__init__(**kwargs)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Return whether gradients overflowed in float16, so that the learning rate schedule must not step."""
        if self._runtime is None:
            return False
        return bool(metrics(self._runtime.model).get("step_was_skipped", False))

    def free_memory(self, *objects: Any) -> Any:
        """Drop references like Accelerate, but remember the model, since a Trainer prepares loaders before it prepares
        the same model again.
        """
        runtime = self._runtime
        freed = super().free_memory(*objects)
        self._runtime = runtime
        return freed

    def adopt(self, model: nn.Module) -> None:
        """Use ``model`` from now on to count the batches of a step, instead of a model that was prepared earlier."""
        self._runtime = None
        self._adopt(model)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Prepare like :class:`hfscale.Accelerator`; ranks that share a batch augment its samples equally."""
        seed_workers_by(data_loader, self.mesh.batch_rank)
        if (
            isinstance(data_loader.batch_sampler, BatchRebalanceSampler)
            and self._runtime is not None
        ):
            data_loader = balanced(data_loader, self._runtime)
        # Data ranks may get some examples twice.
        if self.num_processes > 1 and not is_prepared(data_loader):
            if isinstance(data_loader.dataset, IterableDataset):
                data_loader = dealt(
                    data_loader,
                    self.num_processes,
                    self.process_index,
                    self.split_batches,
                    DealtStream,
                )
            data_loader.collate_fn = Collator(data_loader.collate_fn)
        # Batches stay on the CPU: a step checks them without a device synchronization, and then moves them in one copy.
        return super().prepare_data_loader(data_loader, False, slice_fn_for_dispatch)

    def examples_of(self, batch: Any, of_stream: bool = False) -> tuple[int, int] | None:
        """Return the number of examples in the loader's latest ``batch``, and the number of those that are not padding.

        All data ranks get batches of the same size: the last batches are padded with repeated examples from the
        beginning of the data. Return ``None``, on every rank, if no batch can be padded. ``of_stream`` is set for a
        stream in training, whose loader may already have ended.
        """
        state = self.gradient_state
        self._last = None
        if self.num_processes == 1:
            size = getattr(state.active_dataloader, "batch_size", None)
            if state.end_of_dataloader and state.remainder == -1 and size and not of_stream:
                # An iterable dataset's last batch may have fewer rows.
                self._last = (
                    size,
                    _rows(batch),
                )
            return None
        if not self.even_batches:
            return None
        if of_stream or isinstance(getattr(state.active_dataloader, "dataset", None), DealtStream):
            known = (
                batch.known
                if isinstance(batch, Marked) and any(batch.known)
                else (_rows(batch),) * 2
            )
            self._last = None if of_stream else known
            return known
        return self._dealt_last(state.active_dataloader) if state.end_of_dataloader else None

    def _dealt_last(self, loader: Any) -> tuple[int, int] | None:
        """Compute :meth:`examples_of` for the last batch from the sampler, because Accelerate's ``remainder`` is lost
        if a run resumes within an epoch.
        """
        sampler: Any = loader.batch_sampler
        while sampler is not None and not isinstance(sampler, BatchSamplerShard):
            sampler = getattr(sampler, "batch_sampler", None)
        if sampler is None or sampler.drop_last or not sampler.batch_size:
            return None
        size = (
            sampler.batch_size // self.num_processes
            if sampler.split_batches
            else sampler.batch_size
        )
        left = len(sampler.batch_sampler.sampler) % (size * self.num_processes)
        return size, size if left == 0 else min(
            size,
            max(0, left - self.process_index * size),
        )

    @contextmanager
    def counting(self, rows: int) -> Iterator[None]:
        """Let only the first ``rows`` rows of this rank count in gathered tensors inside the ``with`` block."""
        counts: Tensor = super().gather(torch.tensor([rows], device=self.device))
        self._counts = counts.tolist()
        try:
            yield
        finally:
            self._counts = None

    def gather(self, tensor: Any) -> Any:
        """Gather a tensor over ranks that have different batches. Inside :meth:`counting`, leave out rows that only pad
        a batch.
        """
        if self._counts is None or not isinstance(tensor, Tensor):
            return super().gather(tensor)
        counts = self._counts
        if tensor.ndim == 0:
            return _OfRanks.wrap(super().gather(tensor), counts)
        here = max(counts[self.process_index], 1)
        most = max(counts)
        chunks = tensor.unflatten(0, (-1, here))  # for example, chosen and rejected rows
        filled = chunks.new_zeros((len(chunks), most, *chunks.shape[2:]))
        filled[:, :here] = chunks
        every = super().gather(filled).unflatten(0, (len(counts), -1))
        return torch.cat(
            [part[:, :count].flatten(0, 1) for part, count in zip(every, counts, strict=True)]
        )

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather over ranks that have different batches, without padding rows, also for iterable datasets of unknown
        length.

        Scalars of ranks belong to no example, but Accelerate would keep only the first few ranks' scalars. Scalars are
        gathered as float64, because TRL returns another dtype for zero rows (KTO, on a rank without desirable rows).
        """
        if isinstance(input_data, torch.Tensor) and input_data.ndim == 0:
            return self.gather(
                input_data.double() if input_data.is_floating_point() else input_data
            )
        if self._counts is not None:
            return self.gather(input_data)
        gathered = super().gather_for_metrics(input_data, use_gather_object)
        if self._last is None:
            return gathered
        known = self.gather(torch.tensor([self._last], device=self.device)).sum(0).tolist()
        return recursively_apply(
            lambda each: each[: known[1]] if len(each) == known[0] else each, gathered
        )

    def _agree_on_order(self, data_loader: Any) -> None:
        sampler = get_sampler(data_loader)
        if isinstance(sampler, LengthGroupedSampler):
            sampler.batch_size *= (
                self.mesh.batch_world
            )  # group samples over a full step, like in one process
        super()._agree_on_order(data_loader)


def _rows(batch: Any) -> int:
    """Return the number of examples of a batch of any kind: GRPO's batches are lists, pictures and sound have no token
    ids.
    """
    if not isinstance(batch, Mapping):
        return len(batch)
    if "input_ids" in batch:
        return rows_of(batch)
    return next(len(value) for value in batch.values() if isinstance(value, Tensor) and value.ndim)


class _OfRanks(Tensor):
    """Hold one number per data rank; the sum skips ranks without rows, and the mean is weighted by rows."""

    rows: Tensor

    @classmethod
    def wrap(cls, numbers: Tensor, counts: list[int]) -> "_OfRanks":
        rows = torch.tensor(counts, device=numbers.device)
        made = torch.where(rows > 0, numbers, 0).as_subclass(cls)
        made.rows = rows
        return made

    def mean(self, *_: Any, **__: Any) -> Tensor:
        return (self.as_subclass(Tensor) * self.rows).sum() / self.rows.sum()
