"""Load the weights of a plain checkpoint, or of an adapter, into a model that trains."""

from pathlib import Path

import torch
from torch import nn

from .._compat.transformers.classes import stock_class
from ..distributed.files.replace import finish_move
from ..distributed.files.sources import refuse_foreign
from ..errors import CheckpointError
from ..features.adapters import by_peft
from ..train.runtime import runtime_of
from ..train.runtime.shards import local_tensor
from ..train.runtime.writing import all_or_none
from .load import load_pretrained
from .stored_forms.scheme import form_in


@torch.no_grad()
def load_weights(model: nn.Module, directory: str | Path) -> None:
    """Replace a model's weights, or only its adapter's, by weights from a checkpoint; call this on every rank."""
    runtime = runtime_of(model)
    with all_or_none(runtime.mesh, f"{directory} could not be loaded"):
        finish_move(directory)
        if runtime.adapters is None:  # for adapters, read_saved checks each directory
            refuse_foreign(Path(directory))
        if (by_stock := by_peft.found_around(runtime, model)) is not None:
            by_peft.load(by_stock, str(directory))
            return
        if (adapters := runtime.adapters) is not None:
            shares = adapters.read_saved(str(directory), runtime)
        else:
            form = form_in(Path(directory))
            options = {"dtype": runtime.model.dtype}
            # The same model with plain values: its config describes no quantized weights.
            if form is not None:
                options["config"] = runtime.model.config
            kind = stock_class(runtime.model)
            plan = runtime.plan
            _, weights, missing = load_pretrained(
                kind,
                str(directory),
                runtime.model,
                plan,
                runtime.mesh,
                options,
                form=form,
            )
            if missing:
                raise CheckpointError(
                    f"{directory} lacks {len(missing)} of the model's weights, for example {sorted(missing)[0]}, "
                    "because it is of another model: give the checkpoint that belongs to this config"
                )
            shares = weights.tensors
    for planned, parameter in runtime.parameters():
        if planned.name in shares:
            local_tensor(parameter).copy_(shares[planned.name])
