"""Collect the model's outputs of a step, gathered over sequence shards and pipeline stages."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.utils.generic import ModelOutput

from .runtime import Runtime
from .runtime.batches import Microbatch


def from_last_stage(runtime: Runtime, made: list[Tensor]) -> list[Tensor]:
    """Return the last stage's tensors on all ranks of its pipeline, without a graph; collective.

    Args:
        made: the tensors, on the rank that has the last stage; ignored elsewhere.
    """
    group, stages = runtime.mesh.pp_group, runtime.plan.stages
    if group is None or stages is None:
        return [tensor.detach() for tensor in made]
    holder = stages.ranks[-1]
    source, here = dist.get_global_rank(group, holder), runtime.mesh.pp_rank == holder
    told = [[(tuple(tensor.shape), tensor.dtype) for tensor in made] if here else None]
    dist.broadcast_object_list(told, src=source, group=runtime.mesh.reports)
    device = runtime.mesh.device
    found = [tensor.detach().contiguous() for tensor in made] if here else []
    for index, (shape, dtype) in enumerate(told[0] or ()):
        tensor = found[index] if here else torch.empty(shape, dtype=dtype, device=device)
        # Booleans as bytes: not every backend can send them.
        dist.broadcast(tensor.view(torch.uint8) if dtype == torch.bool else tensor, src=source, group=group)
        if not here:
            found.append(tensor)
    return found


_LOSS = "loss"


class KeptOutputs:
    """The tensors that a model returned besides its loss, by microbatch, on the rank that has the head."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._kept: dict[int, dict[str, Tensor]] = {}

    @contextmanager
    def keeping(self, batch: Microbatch, index: int) -> Iterator[None]:
        """Record the model's output of microbatch ``index``, whose loss is computed inside the `with` block."""
        assert self._runtime.loss is not None  # checked as the step was prepared
        with self._runtime.loss.keeping_outputs() as outputs:
            yield
        self.keep(outputs[0], batch, index)

    def keep(self, output: Any, batch: Microbatch, index: int) -> None:
        """Keep an output; if ranks have shards of its sequences, gather all tokens."""
        found = {name: value.detach() for name, value in _named(output) if isinstance(value, Tensor) and value.ndim}
        gather = self._runtime.context.gather_tokens
        self._kept[index] = {name: gather(batch, value) for name, value in found.items()}

    def gathered(self, given: int) -> list[ModelOutput]:
        """Return one output for each of ``given`` batches, on every rank of a pipeline, microbatches of a batch
        concatenated.

        Collective over stages.
        """
        kept = [self._kept[index] for index in sorted(self._kept)]
        size = max(len(kept) // given, 1)
        groups = [kept[start : start + size] for start in range(0, len(kept), size)]
        joined = [{name: torch.cat([each[name] for each in group]) for name in group[0]} for group in groups]
        names = _told(self._runtime, [list(output) for output in joined])
        tensors = iter(from_last_stage(self._runtime, [value for output in joined for value in output.values()]))
        return [_output({name: next(tensors) for name in output}) for output in names]


def _named(output: Any) -> Sequence[tuple[str, Any]]:
    if isinstance(output, Mapping):
        return [(name, value) for name, value in output.items() if name != _LOSS]
    return [("logits", output[1])]  # return_dict=False, with labels


def _output(tensors: dict[str, Tensor]) -> ModelOutput:
    made = ModelOutput()
    for name, tensor in tensors.items():
        made[name] = tensor
    return made


def _told(runtime: Runtime, names: list[list[str]]) -> list[list[str]]:
    """Broadcast the output names from the rank with the last stage; collective over stages."""
    group, stages = runtime.mesh.pp_group, runtime.plan.stages
    if group is None or stages is None:
        return names
    told = [names]
    source = dist.get_global_rank(group, stages.ranks[-1])
    dist.broadcast_object_list(told, src=source, group=runtime.mesh.reports)
    return told[0]
