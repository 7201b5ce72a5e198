"""The hooks of ``transformers.Trainer`` that it does not promise to keep, under names of ours.

Read and run with transformers 5.17 and 5.23; ``tests/trainer/test_host.py`` compares signatures.
"""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import trainer as _module

from ..replaced import attribute_replaced

_trainer: Any = _module
_DEVICES = "_setup_devices"  # a cached property of TrainingArguments: the processes, as they are counted first


class TrainerHooks:
    """What a Trainer calls for saving, resuming and clipping: put in front of one."""

    def write_state(self, directory: Path) -> None:
        """Write optimizer, schedule and random streams into a checkpoint; on every rank."""

    def read_state(self, checkpoint: Path) -> None:
        """Read them; on every rank."""

    def write_random_states(self, directory: Path) -> None:
        """Write random streams into a checkpoint, for stock Trainer; on every rank."""

    def put_back_random_states(self) -> None:
        """Go on with those of the checkpoint whose state was read; on every rank."""

    def read_weights(self, checkpoint: Path) -> None:
        """Put the weights of a checkpoint that is resumed from into the model; on every rank."""

    def read_best_weights(self, checkpoint: Path) -> None:
        """The same, at the end of a run, of its best checkpoint."""

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

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.read_weights(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        state: Any = self.state  # type: ignore[attr-defined]
        self.read_best_weights(Path(state.best_model_checkpoint))

    def written_aside(self, target: Path) -> AbstractContextManager[Path]:
        """Let Trainer write the checkpoint ``target`` in a directory of its name, inside the one that this yields."""
        return nullcontext(target.parent)

    _aside: Path | None = None  # the directory that Trainer takes for the one with the checkpoints, during a save

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        trainer: Any = self
        target = Path(self._get_output_dir(trial)) / f"{_trainer.PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        with self.written_aside(target) as self._aside:
            try:
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
            finally:
                self._aside = None
        if trainer.args.push_to_hub:
            self._push_from_checkpoint(str(target))

    def _get_output_dir(self, trial: Any) -> str:
        return str(super()._get_output_dir(trial) if self._aside is None else self._aside)  # type: ignore[misc]

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._aside is None:
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]

    def around_inputs(self) -> AbstractContextManager[None]:
        """Around preparing a batch."""
        return nullcontext()

    def _prepare_inputs(self, inputs: Any) -> Any:
        with self.around_inputs():
            return super()._prepare_inputs(inputs)  # type: ignore[misc]

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # the accelerator knows the axes; the host takes a plain tensor for a whole one

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        pass  # it is where hfscale has put it


def accelerator_made_by(kind: Any) -> AbstractContextManager[None]:
    """Within: Trainer makes its accelerator of this class."""
    return attribute_replaced(_trainer, "Accelerator", kind)


def batches_skipped_by_accelerator(trainer: Any) -> AbstractContextManager[None]:
    """Within: Trainer goes on in the middle of an epoch with the loader that its accelerator makes of the whole one's.

    The accelerator of the moment, since a ``model_init`` makes another one on the way.
    """

    def skip(loader: Any, count: int = 0) -> Any:
        return trainer.accelerator.skip_first_batches(loader, count)

    return attribute_replaced(_trainer, "skip_first_batches", skip)


def kernels_left_alone() -> AbstractContextManager[None]:
    """Within: Trainer gives its model no kernels of Liger's: it has those that it was built with."""
    return attribute_replaced(_trainer, "apply_liger_kernel", lambda *_: None)


def evaluated_with_logits(trainer: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    """Trainer's prediction step, which does not ask the model, as it asks Liger's, to leave its logits out."""

    def evaluated(*args: Any, **kwargs: Any) -> Any:
        with attribute_replaced(trainer.args, "use_liger_kernel", False):
            return step(*args, **kwargs)

    return evaluated


def taken_for_adapted(model: Any) -> AbstractContextManager[None]:
    """Within: a quantized model that has adapters inside, and is no ``PeftModel``, is not refused for having none."""
    return attribute_replaced(model, "_hf_peft_config_loaded", True)


def count_processes_on_cpu(arguments: Any) -> None:
    """Make ``TrainingArguments`` that were made without ``use_cpu`` on a machine without GPUs see all processes."""
    arguments.use_cpu = True
    vars(arguments).pop(_DEVICES, None)
    _ = arguments.device


def use_one_gpu(arguments: Any) -> None:
    """One process that sees several GPUs has its model on one."""
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1


def seed_workers_by(loader: Any, rank: int) -> None:
    """Seed a Trainer's loader workers by the distinct batch instead of the process."""
    seed = getattr(loader, "worker_init_fn", None)
    if isinstance(seed, partial) and seed.func is _trainer.seed_worker:
        seed.keywords["rank"] = rank


RANDOM = "rng_state.pth"  # which stock Trainer reads in one process


def read_random_states(checkpoint: Path) -> dict[str, Any] | None:
    """What stands in a checkpoint's :data:`RANDOM`: states of ``python``, ``numpy``, ``cpu`` and devices, and more."""
    if not (checkpoint / RANDOM).exists():
        return None
    with _trainer.safe_globals():
        return dict(torch.load(checkpoint / RANDOM, map_location="cpu", weights_only=True))


def has_stock_loss(trainer: Any) -> bool:
    """Whether the loss is the model's own, computed as ``transformers.Trainer`` does."""
    return type(trainer).compute_loss is transformers.Trainer.compute_loss and trainer.compute_loss_func is None


def has_own_prediction_step(trainer: Any) -> bool:
    """Whether a class beside ``transformers.Trainer`` says what a prediction is, ``Seq2SeqTrainer`` for one."""
    kinds = [kind for kind in type(trainer).__mro__ if "prediction_step" in vars(kind)]
    return any(kind is not transformers.Trainer and not issubclass(kind, TrainerHooks) for kind in kinds)


def chooses_optimizer(trainer: Any) -> bool:
    """Whether a subclass says itself what ``optim`` stands for."""
    own, stock = type(trainer).get_optimizer_cls_and_kwargs, transformers.Trainer.get_optimizer_cls_and_kwargs
    return own is not stock


def unheard_options(arguments: Any, given: Mapping[str, Any]) -> list[str]:
    """Of the options in ``optim_args``, those that make no difference to what Trainer makes of ``optim``."""

    def made(options: str | None) -> Any:
        asked = copy.copy(arguments)
        asked.optim_args = options
        return transformers.Trainer.get_optimizer_cls_and_kwargs(asked)

    usual = made(None) if given else None
    return [name for name, value in given.items() if made(f"{name}={value}") == usual]


def groups_by_decay(trainer: Any, model: nn.Module) -> list[dict[str, Any]] | None:
    """Trainer's two parameter groups, where a subclass says itself what decays; ``None`` where none does."""
    if type(trainer).get_decay_parameter_names is transformers.Trainer.get_decay_parameter_names:
        return None
    names = set(trainer.get_decay_parameter_names(model))
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [each for name, each in trained if (name in names) == decays], "weight_decay": rate}
        for decays, rate in ((True, trainer.args.weight_decay), (False, 0.0))
    ]


def labels_of_step(trainer: Any, batches: Any) -> Any:
    """How many labels a Trainer takes these microbatches of all distinct batches to have, and divides their loss by.

    Those that a causal model predicts; of classes that it does not know for such (``GPT2LMHeadModel``), the first one
    of each row too.
    """
    return trainer._get_num_items_in_batch(batches, trainer.args.device)


def prepared(trainer: Any, inputs: Any) -> Any:
    """A batch as a subclass prepares it; where none does it stays as the loader gave it, on the CPU."""
    known = (TrainerHooks, transformers.Trainer)
    own = any("_prepare_inputs" in vars(kind) for kind in type(trainer).__mro__ if kind not in known)
    return trainer._prepare_inputs(inputs) if own else inputs
