"""What a model returns in a step, for whoever wants to see it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.utils.generic import ModelOutput

from ..runtime import Runtime
from ..runtime.batches import Microbatch
from .last_stage import from_last_stage

_LOSS = "loss"


class KeptOutputs:
    """Tensors that a model returned beside its loss, by microbatch, where the head is."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._kept: dict[int, dict[str, Tensor]] = {}

    @contextmanager
    def keeping(self, batch: Microbatch, index: int) -> Iterator[None]:
        """Within: the model's loss is computed of microbatch ``index``."""
        assert self._runtime.loss is not None  # checked as the step was prepared
        with self._runtime.loss.keeping_outputs() as outputs:
            yield
        self.keep(outputs[0], batch, index)

    def keep(self, output: Any, batch: Microbatch, index: int) -> None:
        """Keep an output; of sequences that ranks have parts of, that of all tokens."""
        found = {name: value.detach() for name, value in _named(output) if isinstance(value, Tensor) and value.ndim}
        for part in self._runtime.parts:
            found = {name: part.all_tokens(self._runtime, batch, value) for name, value in found.items()}
        self._kept[index] = found

    def gathered(self, given: int) -> list[ModelOutput]:
        """One output for each of ``given`` batches, on every rank of a pipeline; microbatches of one are put together.

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
    """What the rank with the last stage says; collective over stages."""
    group, stages = runtime.mesh.group("pp"), runtime.plan.stages
    if group is None or stages is None:
        return names
    told = [names]
    source = dist.get_global_rank(group, stages.ranks[-1])
    dist.broadcast_object_list(told, src=source, group=runtime.mesh.reports)
    return told[0]
