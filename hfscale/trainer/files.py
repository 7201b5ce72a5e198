"""Checkpoints of a Trainer: plain Hugging Face directories, and the state of a run inside them.

::

    checkpoint-N/   config.json, model.safetensors ... (any layout, and stock transformers, reads them)
                    tokenizer, training_args.bin, trainer_state.json: Trainer's own
                    hfscale_state/: weights, optimizer, schedule and random streams (hfscale.save_state)
                    optimizer.pt, scheduler.pt: what stock Trainer in one process resumes from (:mod:`.stock_state`)
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import nn
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from .._host.accelerate import stock_optimizer
from .._host.replaced import attribute_replaced
from ..checkpoint import load_state, save_pretrained, save_state
from ..checkpoint.weights import load_weights
from ..errors import CheckpointError
from ..runtime import runtime_of
from . import stock_state

STATE = "hfscale_state"

__all__ = ["STATE", "check_complete", "has_state", "load_weights", "read_state", "weights_written", "write_state"]


def weights_written(model: Any, directory: Path) -> AbstractContextManager[None]:
    """Write the weights; within, ``model.save_pretrained`` has nothing left to do."""
    save_pretrained(model, directory)
    return attribute_replaced(model, "save_pretrained", lambda *_, **__: None)


def check_complete(resume: Any, output: str) -> None:
    """Look at the checkpoint that a run is to go on from: what Trainer writes last must be there.

    Args:
        resume: Trainer's ``resume_from_checkpoint``.
        output: where checkpoints are, of which ``True`` means the last one.

    Raises:
        CheckpointError: the run ended while it was written; the last complete one is named.
    """
    found = get_last_checkpoint(output) if resume is True and Path(output).is_dir() else resume
    if not isinstance(found, str | Path) or not Path(found).is_dir() or (Path(found) / TRAINER_STATE_NAME).exists():
        return
    beside = [each for each in Path(found).parent.glob("checkpoint-*") if (each / TRAINER_STATE_NAME).exists()]
    last = max(beside, key=lambda each: int(each.name.split("-")[-1]), default=None)
    advice = f"resume_from_checkpoint={str(last)!r} is complete" if last else "there is no complete one beside it"
    raise CheckpointError(
        f"{found} has no {TRAINER_STATE_NAME}, which is written last: a run ended while it wrote this checkpoint; "
        f"{advice}"
    )


def has_state(checkpoint: Path) -> bool:
    """Whether hfscale has written the state of a run into it."""
    return (checkpoint / STATE).is_dir()


def write_state(model: nn.Module, directory: Path, optimizer: Any, scheduler: Any) -> None:
    """Into a checkpoint's directory; collective."""
    save_state(model, directory / STATE, optimizer=optimizer, scheduler=scheduler)
    stock_state.write(runtime_of(model), directory, stock_optimizer(optimizer), scheduler)


def read_state(model: nn.Module, checkpoint: Path, optimizer: Any, scheduler: Any) -> None:
    """From a checkpoint; one that was written without a state leaves everything at its beginning, as Trainer does.

    Raises:
        CheckpointError: the state is of another model, optimizer or, where hfscale wrote it, layout.
    """
    if has_state(checkpoint):
        load_state(model, checkpoint / STATE, optimizer=optimizer, scheduler=scheduler)
    elif (checkpoint / stock_state.OPTIMIZER).exists():
        stock_state.read(runtime_of(model), checkpoint, stock_optimizer(optimizer), scheduler)
