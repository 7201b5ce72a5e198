"""Checkpoints of a Trainer: plain Hugging Face directories, and the state of a run inside them.

::

    checkpoint-N/   config.json, model.safetensors ... (any layout, and stock transformers, reads them)
                    tokenizer, training_args.bin, trainer_state.json, rng_state_R.pth: Trainer's own
                    hfscale_state/: weights, optimizer, schedule and random streams (hfscale.save_state)
                    optimizer.pt, scheduler.pt: what stock Trainer in one process resumes from (:mod:`.stock_state`)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint import load_state, save_pretrained, save_state
from ..checkpoint.weights import load_weights
from ..runtime import runtime_of
from . import stock_state

STATE = "hfscale_state"

__all__ = ["STATE", "has_state", "load_weights", "read_state", "weights_written", "write_state"]


@contextmanager
def weights_written(model: Any, directory: Path) -> Iterator[None]:
    """Write the weights; within, ``model.save_pretrained`` has nothing left to do."""
    save_pretrained(model, directory)
    held = vars(model).get("save_pretrained")
    model.save_pretrained = lambda *_, **__: None
    try:
        yield
    finally:
        del model.save_pretrained
        if held is not None:
            model.save_pretrained = held


def has_state(checkpoint: Path) -> bool:
    """Whether hfscale has written the state of a run into it."""
    return (checkpoint / STATE).is_dir()


def write_state(model: nn.Module, directory: Path, optimizer: Any, scheduler: Any) -> None:
    """Into a checkpoint's directory; collective."""
    save_state(model, directory / STATE, optimizer=_plain(optimizer), scheduler=scheduler)
    stock_state.write(runtime_of(model), directory, _plain(optimizer), scheduler)


def read_state(model: nn.Module, checkpoint: Path, optimizer: Any, scheduler: Any) -> None:
    """From a checkpoint; one that was written without a state leaves everything at its beginning, as Trainer does.

    Raises:
        CheckpointError: the state is of another model, optimizer or, where hfscale wrote it, layout.
    """
    if has_state(checkpoint):
        load_state(model, checkpoint / STATE, optimizer=_plain(optimizer), scheduler=scheduler)
    elif (checkpoint / stock_state.OPTIMIZER).exists():
        stock_state.read(runtime_of(model), checkpoint, _plain(optimizer), scheduler)


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """Without Accelerate's wrapper."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found
