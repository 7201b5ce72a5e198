"""Collect the model's outputs of a step, gathered over sequence shards and pipeline stages."""

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
    """Return the tensors that the last stage has ``made``, by key, on all ranks of its pipeline, detached;
    collective.
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
    """Keep a model's outputs other than its loss, by microbatch, on the rank that has the head."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._kept: dict[int, dict[str, Tensor]] = {}

    def recording(self, mean: Objective) -> Objective:
        """Return an objective that computes ``mean``, and also keeps the model's outputs."""

        def loss(called: Any, batch: Microbatch, index: int) -> Tensor:
            assert self._runtime.loss is not None  # checked when the step was prepared
            with self._runtime.loss.keeping_outputs() as outputs:
                loss = mean.loss(called, batch, index)
            self.keep(outputs[0], batch, index)
            return loss

        return Objective(loss)

    def keep(self, output: Any, batch: Microbatch, index: int) -> None:
        """Keep an output; if ranks have shards of its sequences, gather all tokens."""
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
        """Return, on all stages, one output for each of ``given`` batches, joined from its microbatches; collective."""
        kept = [self._kept[index] for index in sorted(self._kept)]
        size = max(len(kept) // given, 1)
        groups = [kept[start : start + size] for start in range(0, len(kept), size)]
        joined = [
            {name: torch.cat([part[name] for part in group]) for name in group[0]}
            for group in groups
        ]
        return [ModelOutput(output) for output in from_last_stage(self._runtime, joined)]
