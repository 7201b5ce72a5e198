"""Define ``hfscale.Accelerator``, which counts distinct batches.

Accelerate counts processes, but under tensor parallelism several processes share one batch. This subclass counts
*distinct batches* wherever the number matters (``num_processes``, the samples of a rank, gathering of results, steps of
a schedule). It does not wrap the model, because hfscale has already wrapped it.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.data_loader import IterableDatasetShard, get_sampler, prepare_data_loader
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from transformers.trainer_pt_utils import BatchRebalanceSampler

from ..._compat.accelerate import (
    BatchScheduler,
    Prepared,
    ScaledOptimizer,
    count_last_batch,
    is_prepared,
    list_model,
    load_hooks,
    note,
    save_hooks,
    split_among,
)
from ..._compat.torch_device import accelerators
from ...checkpoint.save import save_pretrained
from ...checkpoint.state import load_state, save_state, wait_for_saves
from ...config.environment import started_processes, without_launcher_switches
from ...distributed.mesh import Mesh
from ...distributed.process_groups import latest_mesh
from ...distributed.processes import TIMEOUT, met_before, own_device, start
from ...errors import ConfigError
from ...parallel.data.shard import set_gradient_sync
from ...train.gradient_norm import clip_grad_norm_
from ...train.runtime import Runtime, find_runtime, runtime_of
from ...train.runtime.handover import check_optimizers
from ...train.step import metrics
from .foreign_state import is_accelerates, load_accelerates
from .gathering import gather_batches, gather_objects, holds_tensors_alone, reduce_batches
from .loaders import CollateLast, OneOrder, dealt, is_stream, seed_workers_alike
from .named_states import directory_to_load, directory_to_save
from .whole_models import (
    agree_on_weights,
    check_alike,
    check_beside,
    full_state,
    is_plain,
    parameter_ids,
)

_TOO_LATE = (
    "no model that hfscale parallelized has been prepared yet: pass the model to prepare() together with, or before, "
    "the data loaders"
)
_FOREIGN = ("fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin", "parallelism_config")


class Accelerator(accelerate.Accelerator):
    """Replace ``accelerate.Accelerator`` for parallelized models.

    Pass the model to :meth:`prepare` together with, or before, the data loaders. The arguments are those of
    ``accelerate.Accelerator``, except arguments that would shard the model a second time.

    ``num_processes`` is the number of distinct batches in a step, and ``process_index`` the index of this rank's batch:
    ranks that differ only in model-parallel coordinates (tensor ranks, for example) share one batch. Both are known as
    soon as a model has been built, even before :meth:`prepare`. ``is_main_process`` and similar attributes refer to
    real processes.

    Attributes:
        serves_hfscale: marks this class; Accelerate's own class raises for models that are sharded over ranks.
    """

    serves_hfscale = True
    _runtime: Runtime | None = None
    _within_no_sync = _unfinished = False  # now, and in the latest backward pass
    _dealt_over_processes = False  # a loader was prepared before any model of hfscale
    flag_tensor: Tensor | None
    # Streams that are known to be finite.
    _listed: tuple[type, ...] = (
        RandomSampler,
        SubsetRandomSampler,
        WeightedRandomSampler,
    )

    def __init__(self, **kwargs: Any) -> None:
        clashing = [name for name in _FOREIGN if kwargs.get(name) is not None]
        if clashing:
            raise ConfigError(
                f"{', '.join(clashing)} would shard the model a second time: leave it out, and pass the layout to "
                "hfscale.from_pretrained(..., parallel=hfscale.ParallelConfig(...))"
            )
        # Without a GPU, Accelerate assumes a single process unless cpu=True.
        kwargs["cpu"] = kwargs.get("cpu") or not accelerators().is_available()
        # Otherwise, Accelerate would rendezvous with the ranks of an earlier start.
        if met_before() and not dist.is_initialized():
            asked = (
                handler.timeout
                for handler in kwargs.get("kwargs_handlers") or ()
                if isinstance(handler, InitProcessGroupKwargs) and handler.timeout
            )
            start(own_device(), next(asked, TIMEOUT))
        self._prepared = Prepared()
        with without_launcher_switches():
            super().__init__(**kwargs)
        # If each rank assumed a single process, every rank would print and write.
        world = dist.get_world_size() if dist.is_initialized() else started_processes()
        if (counted := self.state.num_processes) != world:
            raise ConfigError(
                f"Accelerate counts {counted} process(es), but {world} were started: Accelerate's state was created "
                "earlier (by accelerate.PartialState, accelerate.Accelerator or transformers.TrainingArguments) "
                "without cpu=True. Create hfscale.Accelerator() first, or set ACCELERATE_USE_CPU=1"
            )
        self._told, self._orders, self._worker_seeds = (
            set[int](),
            list[OneOrder](),
            torch.Generator(),
        )

    @property
    def mesh(self) -> Mesh:
        """Return the mesh of the prepared model."""
        if self._runtime is None:
            raise ConfigError(_TOO_LATE)
        return self._runtime.mesh

    @property
    def num_processes(self) -> int:
        """Return the number of distinct batches in a step, where ranks that share a batch (tensor ranks, for example)
        count once; before a model has been built, return the number of processes.
        """
        mesh = self._mesh_so_far
        told = int(self.state.num_processes) if mesh is None else mesh.batch_world
        if self._runtime is None:
            self._told.add(told)
        return told

    @property
    def process_index(self) -> int:
        """Return the index of this rank's batch within a step, which is equal on ranks that share a batch (tensor
        ranks, for example); before a model has been built, return the index of the process.
        """
        return (
            int(self.state.process_index)
            if (mesh := self._mesh_so_far) is None
            else mesh.batch_rank
        )

    @property
    def is_last_process(self) -> bool:
        """Return whether this is the last real process."""
        return bool(self.state.is_last_process)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare like Accelerate; models of transformers must be parallelized, and are returned unchanged.

        Other modules are prepared by Accelerate (as DDP), which requires that no two processes share a batch.
        """
        models = [obj for obj in args if isinstance(obj, nn.Module)]
        for model in models:
            if not self._stays_plain(model):
                self._adopt(model)
        known = [*models, *self._prepared.models]
        plain = parameter_ids(filter(is_plain, known))
        optimizers = [
            obj
            for obj in args
            if isinstance(obj, Optimizer) and plain.isdisjoint(parameter_ids([obj]))
        ]
        check_optimizers(optimizers, [runtime_of(model) for model in known if not is_plain(model)])
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Record the model, which is already wrapped and on its device.

        A stock model that is only evaluated is prepared by Accelerate, and each rank holds the full model.
        """
        if evaluation_mode and find_runtime(model) is None:
            return self._prepare_whole(model, device_placement)
        if self._stays_plain(model):
            made = super().prepare_model(model, device_placement, evaluation_mode)
            return note(self._prepared.models, made)
        self._adopt(model)
        list_model(self, model)
        return note(self._prepared.models, model)

    def _prepare_whole(self, model: nn.Module, device_placement: bool | None) -> Any:
        # The model is not recorded, because it is neither clipped nor saved.
        whole = super().prepare_model(
            model, device_placement=device_placement, evaluation_mode=True
        )
        if self._mesh_so_far is not None:
            agree_on_weights(whole, self._mesh_so_far)
        return whole

    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Prepare a loader that yields the samples of this rank's batch; ranks that share a batch (tensor ranks, for
        example) get the same samples.
        """
        if is_prepared(data_loader):
            return note(self._prepared.loaders, data_loader)
        if self._is_stock:
            self._dealt_over_processes = True
            return note(
                self._prepared.loaders,
                super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch),
            )
        placed = self.device_placement if device_placement is None else device_placement
        dispatches = bool(self.dispatch_batches)
        if dispatches and self.mesh.batch_world != self.mesh.layout.total_size:
            raise ConfigError(
                "dispatch_batches=True gives every process another slice of a batch, but in this layout some "
                "processes must get the same batch: leave dispatch_batches out"
            )
        rows = data_loader.batch_size is not None  # otherwise, the stream's examples are batches
        if self.mesh.batch_world > 1 and rows and not dispatches and is_stream(data_loader.dataset):
            # Keep the order of one process; Accelerate would give each process different files of a stream of datasets.
            data_loader = dealt(
                data_loader, self.mesh.batch_world, self.mesh.batch_rank, self.split_batches
            )
        self._agree_on_order(data_loader)
        seed = self.dataloader_config.data_seed or torch.random.initial_seed()
        shards = isinstance(data_loader.dataset, IterableDatasetShard)
        # The loader is already divided over distinct batches.
        split = shards or isinstance(data_loader.batch_sampler, BatchRebalanceSampler)
        loader = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=1 if split else self.mesh.batch_world,
            process_index=0 if split else self.mesh.batch_rank,
            split_batches=self.split_batches,
            put_on_device=placed or dispatches,
            rng_types=list(self.rng_types or ()),
            dispatch_batches=dispatches,
            even_batches=self.even_batches,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.mesh.all_gather_object(seed)[0],
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._follow_one_process(loader)
        return note(self._prepared.loaders, loader)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader that skips the first ``num_batches`` batches of the epoch, like Accelerate."""
        rest = super().skip_first_batches(dataloader, num_batches)
        if not self._is_stock:
            self._follow_one_process(rest)
        return rest

    def _follow_one_process(self, loader: Any) -> None:
        """Give the loader's workers equal seeds on ranks that share a batch; for a stream, let the loader record how
        many rows of the last step are not padding.
        """
        seed_workers_alike(loader, self.mesh, self._worker_seeds)
        if isinstance(getattr(loader, "collate_fn", None), CollateLast):
            count_last_batch(loader)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer like Accelerate. Its ``step_was_skipped``, by which schedules pause, includes steps that
        hfscale skips because gradients overflowed in float16.
        """
        made = super().prepare_optimizer(optimizer, device_placement)
        return note(self._prepared.optimizers, ScaledOptimizer.of(made, self._skips))

    def _skips(self, optimizer: Any) -> bool:
        return any(
            metrics(model).get("step_was_skipped")
            and not parameter_ids([optimizer]).isdisjoint(parameter_ids([model]))
            for model in self._prepared.models
            if not is_plain(model)
        )

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a schedule like Accelerate: it steps :attr:`num_processes` times per optimizer step.

        So its length must be ``steps * accelerator.num_processes``, or ``epochs * len(loader)`` with the length of the
        loader before :meth:`prepare`. With ``split_batches=True``, or without :meth:`prepare`, the schedule steps once.
        """
        if is_prepared(scheduler):
            return note(self._prepared.schedulers, scheduler)
        follows = self.step_scheduler_with_optimizer

        def batches() -> int:
            return self.num_processes if follows and not self.split_batches else 1

        made = BatchScheduler.of(super().prepare_scheduler(scheduler), batches)
        return note(self._prepared.schedulers, made)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Add objects with a state, which :meth:`save_state` then writes."""
        super().register_for_checkpointing(*objects)
        self._prepared.registered.extend(objects)

    def free_memory(self, *objects: Any) -> Any:
        """Drop references to all prepared objects, and release ``objects``. A model that is prepared later may have
        another layout.
        """
        self._prepared.forget()
        self._orders.clear()
        self._runtime = None
        return super().free_memory(*objects)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this rank's part of ``inputs`` like Accelerate; ranks that share a batch (tensor ranks, for example)
        get the same part.
        """
        yield split_among(inputs, self.num_processes, self.process_index, apply_padding)

    def gather(self, tensor: Any) -> Any:
        """Concatenate the ranks' tensors along the first dim, in batch order. Ranks that share a batch (tensor ranks,
        for example) count once, so every sample occurs once.
        """
        if self._is_stock:
            return super().gather(tensor)
        return gather_batches(self.mesh, tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather the ranks' data like :meth:`gather`, without the duplicates that pad the last batch; objects are
        gathered into one list.
        """
        if self._is_stock or (not use_gather_object and holds_tensors_alone(input_data)):
            return super().gather_for_metrics(input_data, use_gather_object)
        gathered = gather_objects(self.mesh, input_data)
        state = self.gradient_state
        trims = state.end_of_dataloader and state.remainder > 0
        return gathered[: state.remainder] if trims else gathered

    def check_trigger(self) -> bool:
        """Return whether :meth:`set_trigger` was called on any process (the same on all processes), and reset it."""
        if self.flag_tensor is None:
            self.flag_tensor = torch.tensor(0, device=self.device)
        # Reduce over processes, because processes that share a batch set the trigger independently.
        told = super().reduce(self.flag_tensor)
        if told.item() < 1:
            return False
        self.flag_tensor = torch.tensor(0, device=self.device)
        return True

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum or mean of the ranks' tensors, times ``scale``; ranks that share a batch (tensor ranks, for
        example) count once.
        """
        if self._is_stock:
            return super().reduce(tensor, reduction, scale)
        return reduce_batches(self.mesh, tensor, reduction, scale)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the backward pass like Accelerate; raise :class:`ConfigError` with pipeline stages, where training steps
        run the backward pass.
        """
        if self._runtime is not None:
            self._runtime.executor.check_plain_call("accelerator.backward")
        super().backward(loss, **kwargs)
        self._unfinished = self._within_no_sync

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate gradients without reducing them over the data axes inside the ``with`` block."""
        if is_plain(model):
            with super().no_sync(model):
                yield
            return
        stock = runtime_of(model).model
        set_gradient_sync(stock, False)
        self._within_no_sync = True
        try:
            yield
        finally:
            self._within_no_sync = False
            set_gradient_sync(stock, True)

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Clip by the global norm if gradients are synchronized in this step; ``parameters`` are the model's
        parameters.

        Raises:
            ConfigError: ``parameters`` are only some of the model's trainable parameters.
        """
        named = parameters.values() if isinstance(parameters, dict) else parameters
        listed = [named] if isinstance(named, Tensor) else list(named)
        given = {id(p) for p in listed}
        plain = parameter_ids(filter(is_plain, self._prepared.models))
        if self._is_stock or (given and given <= plain):
            return super().clip_grad_norm_(listed, max_norm, norm_type)
        for model in self._prepared.models:
            if is_plain(model):
                continue
            trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
            # A rank whose stages train nothing must still participate in the norm.
            still = runtime_of(model).plan.stages is not None and (
                not given or given & set(map(id, model.parameters()))
            )
            if trained <= given and (trained or still):
                return clip_grad_norm_(model, max_norm, norm_type) if self.sync_gradients else None
        raise ConfigError(
            "clip_grad_norm_ must get all trainable parameters of one prepared model, got only some of them, or "
            "other parameters: pass model.parameters(), because a model's gradients are clipped together"
        )

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Return the full weights, on the CPU, under the names of ``model.state_dict()`` in one process; over ranks
        only on the main process, like Accelerate over FSDP, and empty elsewhere. Call it on every rank.
        """
        runtime = find_runtime(model)
        if runtime is None or runtime.is_alone:
            return super().get_state_dict(model, unwrap)
        return full_state(runtime)

    def save_model(
        self, model: nn.Module, save_directory: Any, max_shard_size: Any = "5GB", **more: Any
    ) -> None:
        """Write the full model as a plain Hugging Face directory, which stock transformers can load; call it on every
        rank.
        """
        if is_plain(model):
            super().save_model(model, save_directory, max_shard_size, **more)
            return
        save_pretrained(model, save_directory, max_shard_size=max_shard_size)

    def save_state(
        self, output_dir: Any = None, safe_serialization: bool = True, **more: Any
    ) -> str:
        """Write the training state, for any layout (:func:`hfscale.save_state`), to ``output_dir``, or with
        ``automatic_checkpoint_naming=True`` to the project's next numbered directory. Then call the hooks of
        :meth:`register_save_state_pre_hook`. Call it on every rank, between steps: gradients are not saved, so it warns
        within an accumulation of gradients.
        """
        if self._is_stock:
            return str(super().save_state(output_dir, safe_serialization, **more))
        if (self._unfinished or not self.sync_gradients) and self.is_main_process:
            warnings.warn(
                "accelerator.save_state was called within an accumulation of gradients, and a state has no gradients: "
                "a run that resumes from it would leave out this step's microbatches so far. Save where "
                "accelerator.sync_gradients is True",
                stacklevel=2,
            )
        model, optimizer, others = self._prepared.of_one_run(self, self._orders)
        directory = directory_to_save(self, output_dir, runtime_of(model).mesh)
        save_state(model, directory, optimizer=optimizer, **others)
        # Hooks run now, when the directory exists; like under FSDP, hooks get no weights to write.
        for hook in save_hooks(self):
            hook([model], [], str(directory))
        self.project_configuration.iteration += 1
        return str(directory)

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **more: Any) -> None:
        """Restore the prepared model, optimizer and schedulers from a state of :meth:`save_state` or of Accelerate."""
        if self._is_stock:
            super().load_state(input_dir, load_kwargs, **more)
            return
        model, optimizer, others = self._prepared.of_one_run(self, self._orders)
        directory = directory_to_load(self, input_dir)
        for hook in load_hooks(self):
            hook([model], str(directory))
        if is_accelerates(directory):
            schedulers = [scheduler.scheduler for scheduler in self._prepared.schedulers]
            load_accelerates(model, directory, optimizer, schedulers)
            return
        load_state(model, directory, optimizer=optimizer, **others)
        for order in self._orders:
            order.leave_off()

    def end_training(self) -> None:
        """Wait for asynchronous saves, and then end training like Accelerate."""
        wait_for_saves()
        super().end_training()

    @property
    def _mesh_so_far(self) -> Mesh | None:
        """Return the mesh of the prepared model, or otherwise of the latest model that was built."""
        return latest_mesh() if self._runtime is None else self._runtime.mesh

    @property
    def _is_stock(self) -> bool:
        """Return whether Accelerate's own code can run unchanged: no model of hfscale is prepared, and every process of
        the latest model that was built, if any, has its own batch.
        """
        mesh = latest_mesh()
        return self._runtime is None and (
            mesh is None or mesh.batch_world == mesh.layout.total_size
        )

    def _stays_plain(self, model: nn.Module) -> bool:
        if not is_plain(model):
            return False
        if (mesh := self._mesh_so_far) is not None:
            check_beside([model], mesh)
        return True

    def _adopt(self, model: nn.Module) -> None:
        runtime = runtime_of(model)
        if runtime.mesh.device.type != self.device.type:
            raise ConfigError(
                f"the accelerator is on {self.device}, but the model is on {runtime.mesh.device}: to train on the CPU "
                "of a machine with GPUs, set ACCELERATE_USE_CPU=1 (cpu=True affects only the accelerator)"
            )
        if self.mixed_precision not in ("no", "bf16"):
            raise ConfigError(
                f"hfscale.Accelerator(mixed_precision={self.mixed_precision!r}) cannot be used: use 'no' or 'bf16'"
            )
        # train_step already scales the loss for float16, so it must not be scaled again here.
        expected = (
            "no" if runtime.options.mixed_precision == "fp16" else runtime.options.around_products
        )
        if expected != self.mixed_precision:
            raise ConfigError(
                f"the accelerator has mixed_precision={self.mixed_precision!r}, but the model was built with "
                f"{runtime.options.mixed_precision!r}: give both the same, hfscale.from_pretrained(..., "
                f"mixed_precision={self.mixed_precision!r}), or the accelerator mixed_precision={expected!r}"
            )
        if not runtime.is_alone:
            # The copied model raises hfscale's error; copying the accelerator's process groups would raise torch's
            # error.
            self.__dict__["__reduce_ex__"] = runtime.model.__reduce_ex__
        if self._runtime is not None:
            check_alike(runtime, self._runtime)
        else:
            check_beside(filter(is_plain, self._prepared.models), runtime.mesh)
            if self._dealt_over_processes and not runtime.is_alone:
                raise ConfigError(_TOO_LATE)
            self._runtime = runtime
            batches = runtime.mesh.batch_world
            # A schedule's length may have been computed from the earlier number.
            if self._told - {batches} and self.is_main_process:
                warnings.warn(
                    f"accelerator.num_processes was {max(self._told - {batches})} when it was read before this model "
                    f"was built, but with {runtime.mesh.layout.describe()} it is {batches}, the number of different "
                    "batches per step, so a schedule whose length was computed from the earlier number is wrong: "
                    "build the model before num_processes is read",
                    stacklevel=4,
                )

    def _agree_on_order(self, data_loader: Any) -> None:
        """Make every rank shuffle in the same order; samplers that Accelerate handles get generators with equal
        states.
        """
        sampler = get_sampler(data_loader)
        if not hasattr(sampler, "generator"):
            return
        seeded = self.use_seedable_sampler and isinstance(sampler, RandomSampler)
        if isinstance(sampler, self._listed) and not seeded:
            if self.use_stateful_dataloader:
                raise ConfigError(
                    "use_stateful_dataloader=True needs use_seedable_sampler=True and shuffle=True, got a "
                    f"{type(sampler).__name__}, for which a state saved in a later epoch would resume in the order of "
                    "the first epoch: set both, or leave use_stateful_dataloader out"
                )
            self._orders.append(OneOrder(sampler, self.mesh))
            by_batches = isinstance(data_loader.sampler, BatchSampler)
            (
                data_loader.sampler if by_batches else data_loader.batch_sampler
            ).sampler = self._orders[-1]
        else:
            seed = (
                sampler.generator.initial_seed()
                if sampler.generator is not None
                else torch.random.initial_seed()
            )
            sampler.generator = torch.Generator().manual_seed(self.mesh.all_gather_object(seed)[0])
