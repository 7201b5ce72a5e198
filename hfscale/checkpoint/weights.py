"""Replace the weights of a parallelized model by those of a plain checkpoint."""

from pathlib import Path

import torch
from torch import nn

from .._compat.transformers.classes import stock_class
from ..distributed.files.replace import finish_move
from ..errors import CheckpointError
from ..features.adapters import Adapters
from ..features.adapters.storage import load_adapter
from ..train.runtime import Runtime, runtime_of
from ..train.runtime.shards import local_tensor
from ..train.runtime.writing import all_or_none
from .load import load_pretrained
from .stored_forms.scheme import form_in


@torch.no_grad()
def load_weights(model: nn.Module, directory: str | Path) -> None:
    """Replace a model's weights in place by those of a plain checkpoint, in any layout; call it on every rank. For a
    model with adapters only the adapter is read. The shards read take memory beside the present ones meanwhile. Raise
    :class:`CheckpointError` if the checkpoint is of another model, or lacks some of its weights.
    """
    runtime = runtime_of(model)
    with all_or_none(runtime.mesh, f"{directory} could not be loaded"):
        finish_move(directory)
        if (adapters := runtime.part(Adapters)) is not None:
            shares = load_adapter(str(directory), adapters.whole, adapters.name, runtime.plan, runtime.mesh)
        else:
            shares = _shares(runtime, str(directory))
    for planned, parameter in runtime.parameters():
        if planned.name in shares:
            local_tensor(parameter).copy_(shares[planned.name])


def _shares(runtime: Runtime, directory: str) -> dict[str, torch.Tensor]:
    kind, dtype = stock_class(runtime.model), runtime.model.dtype
    form, options = form_in(Path(directory)), {"dtype": dtype}
    if form is not None:  # of the same model as plain values, whose config describes no quantized weights
        options["config"] = runtime.model.config
    _, weights, missing = load_pretrained(kind, directory, runtime.plan, runtime.mesh, options, form=form)
    if missing:
        raise CheckpointError(
            f"{directory} lacks {len(missing)} of the model's weights, {sorted(missing)[0]} for one: it is of another "
            "model"
        )
    return weights.tensors
