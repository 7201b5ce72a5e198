"""An evaluation step whose logits are wanted, whatever the layout."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime import Objective, runtime_of
from ..runtime.batches import Microbatch
from .inputs import prepare
from .last_stage import from_last_stage
from .step import token_mean


@torch.no_grad()
def predict_step(model: nn.Module, batch: Mapping[str, Any], *, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """The loss that :func:`hfscale.eval_step` returns, and the logits of this rank's batch, ``[b, s, V]``.

    Every rank has them whole: of a cut vocabulary, of cut sequences, and those of the last stage on all stages. They
    are as large as in one process.

    Raises:
        ConfigError: as :func:`hfscale.eval_step`.
    """
    runtime = runtime_of(model)
    microbatches, count = prepare(runtime, batch, train=False)
    mean = token_mean(runtime, count, label_smoothing)
    kept: dict[int, Tensor] = {}

    def keep_logits(called: Any, microbatch: Microbatch, index: int) -> Tensor:
        assert runtime.loss is not None
        with runtime.loss.keeping_logits() as logits:
            share = mean.loss(called, microbatch, index)
        kept[index] = logits[0]
        for part in runtime.parts:
            kept[index] = part.all_tokens(runtime, microbatch, kept[index])
        return share

    with runtime.around(lambda part: part.around_step(runtime, microbatches, train=False)):
        loss = runtime.executor.run(model, microbatches, Objective(keep_logits), backward=False)
    own = [torch.cat([kept[index] for index in sorted(kept)])] if kept else []
    (logits,) = from_last_stage(runtime, own)
    return loss, logits
