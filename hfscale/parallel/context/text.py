"""Sequences that are cut inside of a model of more than text, where its model of text begins.

::

    ids [b, s] --embedding--> [b, s, h] --pictures put in--> [b, s, h] --cut--> [b, s/n, h] --layers, head--> own logits
    pictures --towers, whole, on every context rank--^        masks, positions [3, b, s] --cut--^

A rank's gradient of a tower is that of its own tokens: partial, like that of every weight, and summed with them.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .cut_batch import LABELS, CutBatch, cut_inputs
from .seam import current_batch, learn


def cut_inside(text: nn.Module, learned: Callable[[CutBatch], None] = learn) -> Any:
    """Cut the inputs of the module ``text``, given for full sequences, to this rank's tokens.

    Args:
        learned: told of the sequences with the positions that the model around it has made.

    Returns:
        the handle of the hook that does it.
    """
    names = list(inspect.signature(text.forward).parameters)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch = current_batch()
        if batch is None:
            return None
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if "position_ids" in names and given.get("position_ids") is None:
            given["position_ids"] = torch.arange(batch.split.total, device=_device(given))[None]
        learned(replace(batch, position_ids=given.get("position_ids")))
        passed_on = {name: given.pop(name) for name in LABELS if name in given}  # which are cut already
        return (), {**cut_inputs(batch, given), **passed_on}

    return text.register_forward_pre_hook(before, with_kwargs=True)


def _device(given: dict[str, Any]) -> torch.device | None:
    tokens = (given.get(name) for name in ("inputs_embeds", "input_ids"))
    return next((each.device for each in tokens if isinstance(each, Tensor)), None)
