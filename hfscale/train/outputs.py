"""Collect the outputs of the model in a step (logits, ...), gathered over sequence shards and sent from the last
pipeline stage to all ranks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.utils.generic import ModelOutput

from .runtime import Objective, Runtime
from .runtime.batches import Microbatch


def from_last_stage(
    runtime: Runtime, made: Sequence[Mapping[Any, Tensor]]
) -> list[dict[Any, Tensor]]:
    """Broadcast the tensors that the last pipeline stage has ``made`` to all ranks of its pipeline, and return them by
    key, detached; collective.
    """
    group = runtime.mesh.group("pp")
    stages = runtime.plan.stages
    own = [{name: tensor.detach() for name, tensor in each.items()} for each in made]
    if group is None or stages is None:
        return own
    holder = stages.ranks[-1]
    source = dist.get_global_rank(group, holder)
    here = runtime.mesh.pp_rank == holder
    told = [
        [{name: (tuple(x.shape), x.dtype) for name, x in each.items()} for each in own]
        if here
        else None
    ]
    dist.broadcast_object_list(told, src=source, group=runtime.mesh.reports)
    if here:
        outputs = [{name: tensor.contiguous() for name, tensor in each.items()} for each in own]
    else:
        outputs = _empty(told[0] or (), runtime.mesh.device)
    for tensor in (tensor for each in outputs for tensor in each.values()):
        # Booleans are sent as bytes, because not every backend supports booleans.
        dist.broadcast(
            tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor,
            src=source,
            group=group,
        )
    return outputs


def _empty(kinds: Sequence[Mapping[Any, Any]], device: torch.device) -> list[dict[Any, Tensor]]:
    return [
        {n: torch.empty(shape, dtype=kind, device=device) for n, (shape, kind) in each.items()}
        for each in kinds
    ]


class KeptOutputs:
    """Collect the outputs of a model in a step, except its loss, by microbatch, on the rank that has the head."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._kept: dict[int, dict[str, Tensor]] = {}

    def recording(self, mean: Objective) -> Objective:
        """Return a loss computation that equals ``mean``, and also keeps the model's outputs of each microbatch."""

        def loss(called: Any, batch: Microbatch, index: int) -> Tensor:
            assert self._runtime.loss is not None  # checked when the step was prepared
            with self._runtime.loss.keeping_outputs() as outputs:
                loss = mean.loss(called, batch, index)
            self.keep(outputs[0], batch, index)
            return loss

        return Objective(loss)

    def keep(self, output: Any, batch: Microbatch, index: int) -> None:
        """Keep the output of microbatch number ``index``; if its sequences are sharded over ranks, all-gather all
        tokens first.
        """
        # return_dict=False, with labels.
        named = dict(output) if isinstance(output, Mapping) else {"logits": output[1]}
        named.pop("loss", None)
        values = {
            name: value.detach()
            for name, value in named.items()
            if isinstance(value, Tensor) and value.ndim
        }
        gather = self._runtime.context.gather_tokens
        self._kept[index] = {name: gather(batch, value) for name, value in values.items()}

    def gathered(self, given: int) -> list[ModelOutput]:
        """Return the outputs of each of the step's ``given`` batches, on all pipeline stages; outputs of the
        microbatches into which a batch was split are concatenated. Collective.
        """
        kept = [self._kept[index] for index in sorted(self._kept)]
        size = max(len(kept) // given, 1)
        groups = [kept[start : start + size] for start in range(0, len(kept), size)]
        joined = [
            {name: torch.cat([part[name] for part in group]) for name in group[0]}
            for group in groups
        ]
        return [ModelOutput(output) for output in from_last_stage(self._runtime, joined)]
