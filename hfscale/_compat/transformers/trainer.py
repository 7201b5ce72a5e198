"""Private hooks of ``transformers.Trainer``, under public names of hfscale.

Read and run with transformers 5.17 to 5.24; ``tests/integrations/trainer/test_host.py`` compares signatures.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    Trainer as StockTrainer,  # scripts may replace the public name by hfscale's
    trainer as _module,
)

from .. import liger
from ..replaced import attribute_replaced

_trainer: Any = _module
_DEVICES = "_setup_devices"  # a cached property of TrainingArguments that counts the processes
_Mixin: Any = object  # so that type checkers accept a Trainer's attributes
accelerator_made_by = partial(attribute_replaced, _trainer, "Accelerator")
"""Let Trainer create its accelerator from a class inside the ``with`` block."""
RANDOM = "rng_state.pth"  # stock Trainer reads this file in a single process


class TrainerHooks(_Mixin):
    """A mixin that overrides a Trainer's methods for saving, resuming and clipping; all of them run on every rank.

    A subclass defines methods for states: ``write_state(directory)`` and ``read_state(checkpoint)`` for optimizer,
    schedule and RNG, ``write_random_states(directory)`` for files that stock Trainer reads, and
    ``put_back_random_states()``, which restores the RNG states that were read last. For weights, it defines
    ``read_weights(checkpoint)`` to resume, and ``read_best_weights(checkpoint)``.

    ``waiting_loss()`` runs the microbatches of a step in which an epoch has ended, and returns their loss.

    It also defines four methods that return context managers. ``written_aside(target)`` yields a directory to which
    Trainer writes instead of ``target``. ``kept_in_memory()`` is the same for a step that is saved to memory; for other
    steps, it returns ``None``. ``around_inputs()`` is entered while a batch is prepared, and ``around_reports()``
    while a step is logged, evaluated and saved.
    """

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.write_state(Path(output_dir))

    def _save_rng_state(self, output_dir: str) -> None:
        self.write_random_states(Path(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.put_back_random_states()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.read_state(Path(checkpoint))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        self.read_weights(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        self.read_best_weights(Path(self.state.best_model_checkpoint))

    _aside: Path | None = None  # the parent directory of the checkpoint during a save

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        target = (
            Path(self._get_output_dir(trial))
            / f"{_trainer.PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        )
        self._write_aside(self.written_aside(target), model, trial)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(target))

    def _write_aside(
        self, aside: AbstractContextManager[Path], model: nn.Module, trial: Any
    ) -> None:
        with aside as directory, attribute_replaced(self, "_aside", directory):
            super()._save_checkpoint(model, trial)

    def _maybe_log_save_evaluate(
        self,
        tr_loss: Any,
        grad_norm: Any,
        model: Any,
        trial: Any,
        *rest: Any,
        **more: Any,
    ) -> None:
        tr_loss += self.waiting_loss()
        with self.around_reports():
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *rest, **more)
        if (kept := self.kept_in_memory()) is not None:  # after the step's other callbacks
            self._write_aside(kept, model, trial)

    def _get_output_dir(self, trial: Any) -> str:
        return str(super()._get_output_dir(trial) if self._aside is None else self._aside)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._aside is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def _prepare_inputs(self, inputs: Any) -> Any:
        with self.around_inputs():
            return super()._prepare_inputs(inputs)

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # the accelerator handles meshes; Trainer takes shards for full tensors

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        pass  # hfscale has already placed the model


def batches_skipped_by_accelerator(trainer: Any) -> AbstractContextManager[None]:
    """When Trainer resumes within an epoch, let it skip batches by ``trainer.accelerator.skip_first_batches`` instead
    of Accelerate's function.
    """

    def skip(loader: Any, count: int = 0) -> Any:
        return trainer.accelerator.skip_first_batches(loader, count)

    return attribute_replaced(_trainer, "skip_first_batches", skip)


def kernels_left_alone() -> AbstractContextManager[None]:
    """Stop Trainer from applying Liger's kernels to its model inside the ``with`` block, since hfscale has applied
    them.

    If Liger is not installed, Trainer reports that itself, before its first step.
    """
    if not liger.is_installed():
        return nullcontext()
    return attribute_replaced(_trainer, "apply_liger_kernel", lambda *_: None)


def taken_for_adapted(model: Any) -> AbstractContextManager[None]:
    """Let Trainer accept a quantized model with adapters that is no ``PeftModel`` inside the ``with`` block."""
    return attribute_replaced(model, "_hf_peft_config_loaded", True)


def count_processes_on_cpu(arguments: Any) -> None:
    """Recount the processes in ``TrainingArguments`` that were made without ``use_cpu`` on a machine without GPUs."""
    arguments.use_cpu = True
    vars(arguments).pop(_DEVICES, None)
    _ = arguments.device


def use_one_gpu(arguments: Any) -> None:
    """Limit a process that sees several GPUs to one."""
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1


def seed_workers_by(loader: Any, rank: int) -> None:
    """Seed the workers of a Trainer's loader by ``rank``, the index of this process's batch among the data ranks, not
    by the process's rank. Processes that have the same batch then have the same seeds.
    """
    seed = getattr(loader, "worker_init_fn", None)
    if isinstance(seed, partial) and seed.func is _trainer.seed_worker:
        seed.keywords["rank"] = rank


def random_states_of_processes(checkpoint: Path) -> int:
    """Return how many processes of stock Trainer wrote RNG states into a checkpoint, one file each."""
    alone = (checkpoint / RANDOM).exists()
    return 0 if alone else len(list(checkpoint.glob("rng_state_*.pth")))


def read_random_states(checkpoint: Path, process: int | None = None) -> dict[str, Any] | None:
    """Return the RNG states that stock Trainer wrote into a checkpoint (``python``, ``numpy``, ``cpu``, devices, ...):
    those of a run in a single process, or those of one ``process`` of several. Return ``None`` if there is no such
    file.
    """
    path = checkpoint / (RANDOM if process is None else f"rng_state_{process}.pth")
    if not path.exists():
        return None
    with _trainer.safe_globals():
        return dict(torch.load(path, map_location="cpu", weights_only=True))


def has_stock_loss(trainer: Any) -> bool:
    """Return whether a Trainer computes its loss like ``transformers.Trainer``: no subclass overrides ``compute_loss``,
    and no ``compute_loss_func`` is given.
    """
    return (
        type(trainer).compute_loss is StockTrainer.compute_loss
        and trainer.compute_loss_func is None
    )


def has_own_prediction_step(trainer: Any) -> bool:
    """Return whether a class other than ``transformers.Trainer`` overrides the prediction step (``Seq2SeqTrainer``)."""
    kinds = [kind for kind in type(trainer).__mro__ if "prediction_step" in vars(kind)]
    return any(kind is not StockTrainer and not issubclass(kind, TrainerHooks) for kind in kinds)


def labels_of_step(trainer: Any, batches: Any) -> Any:
    """Return the number of labels by which a Trainer divides the loss of these microbatches: the labels of predicted
    tokens, summed over the batches of all data ranks. For classes that transformers does not list as causal
    (``GPT2LMHeadModel``), Trainer also counts the first label of each row.
    """
    stock = StockTrainer.get_batch_samples
    return stock(trainer, iter(batches), len(batches), trainer.args.device)[1]


def prepared(trainer: Any, inputs: Any) -> Any:
    """Return a batch as the ``_prepare_inputs`` of a Trainer's subclass prepares it; if no subclass overrides this
    method, return the loader's batch unchanged, on the CPU.
    """
    known = (TrainerHooks, StockTrainer)
    own = any(
        "_prepare_inputs" in vars(kind) for kind in type(trainer).__mro__ if kind not in known
    )
    return trainer._prepare_inputs(inputs) if own else inputs
