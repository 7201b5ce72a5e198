"""Compute the decoder input of an encoder-decoder model for stages that have no labels to derive it from."""

from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.transformers.classes import class_name, takes_argument
from ..._compat.transformers.computing import encoder_outputs
from ...errors import ConfigError
from .microbatches import Batch, tokens_of

_GIVEN = ("decoder_input_ids", "decoder_inputs_embeds")


class _Seen(Exception):
    """Signal that the decoder was called."""


def targets_of(batch: Batch) -> tuple[int, int]:
    """Return samples, and tokens per sample, of the decoder's input; those of the encoder if it has no other."""
    for name in _GIVEN:
        found = batch.get(name)
        if isinstance(found, Tensor) and found.ndim > 1:
            return found.shape[0], found.shape[1]
    return tokens_of(batch)


def with_targets(model: nn.Module, decoder: nn.Module, batch: Batch) -> Batch:
    """Return the batch with the decoder's input, found by running stock code, which derives it from the labels, up to
    the decoder.

    Raises:
        ConfigError: the decoder was not called with tokens.
    """
    labels = batch.get("labels")
    if any(batch.get(name) is not None for name in _GIVEN) or not isinstance(labels, Tensor) or labels.ndim < 2:
        return batch
    seen: list[Any] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(args[0] if args else kwargs.get("input_ids"))
        raise _Seen

    handle = decoder.register_forward_pre_hook(note, with_kwargs=True, prepend=True)
    try:
        with torch.no_grad():  # the class's forward, since the instance's is a stage's, and without the model's hooks
            made = encoder_outputs(torch.zeros(*tokens_of(batch), 1, device=labels.device))
            inputs = {name: batch[name] for name in ("input_ids",) if name in batch}  # classifiers make them of these
            if takes_argument(model, "use_cache"):
                inputs["use_cache"] = False
            type(model).forward(model, **inputs, labels=labels, encoder_outputs=made)
    except _Seen:
        pass
    finally:
        handle.remove()
    if not seen or not isinstance(seen[0], Tensor):
        raise ConfigError(
            f"{class_name(model)} does not make decoder inputs from labels by itself, and only the last stage has "
            "labels: pass decoder_input_ids"
        )
    return {**batch, "decoder_input_ids": seen[0]}
