"""Build one rank of a run that was never launched, by the training code on the meta device, and run a step."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ..._compat.torch_fake import META
from ...api.build import build
from ...api.sources import FromSeed, Outline
from ...checkpoint.load import materialize_buffers
from ...config.memory import MemoryConfig
from ...config.options import Options
from ...config.parallel import ParallelConfig
from ...distributed.mesh import Mesh
from ...features.adapters.peft_config import read_config
from ...parallel.pipeline.placeholders import drop_other_stages
from ...parallel.tensor.part import cut_parameters
from ...plan import Plan
from ...train import train_step
from ...train.runtime import runtime_of
from ...train.runtime.shards import LocalWeights
from ..model.job import Job
from ..model.model_shape import ModelShape
from .simulated_rank import FusedAttention, SimulatedRank, SimulatedTraffic, leave_alone, simulated_rank


@dataclass(frozen=True)
class RunSpec:
    """Describe the model and layout to build."""

    config: PreTrainedConfig
    mixed_precision: str = "no"
    memory: MemoryConfig | None = None
    peft_config: Any = None
    auto_class: Any = AutoModelForCausalLM
    stock: tuple[tuple[str, Any], ...] = ()  # arguments of the stock model, such as ``dtype``
    device: str = "cuda"  # the kind that computes


def run_spec(config: PreTrainedConfig, **given: Any) -> RunSpec:
    """Return the spec for arguments of :func:`hfscale.plan`; quantized weights count as frozen."""
    given.pop("quantization_config", None)
    own = {field.name: given.pop(field.name) for field in fields(RunSpec) if field.name in given}
    return RunSpec(config, **own, stock=tuple(given.items()))


class _WithoutValues(FromSeed):
    """Provide weights without values: shards on the meta device take no memory."""

    def load(self, plan: Plan, mesh: Mesh) -> tuple[Any, LocalWeights]:
        """Return the model and its weights on the meta device, in this rank's sizes."""
        model = self.template(None)
        drop_other_stages(model, plan, mesh.pp_rank)
        cut_parameters(model, plan, mesh)
        materialize_buffers(model, {}, META)
        shapes = {name: plan.by_name[name].local_shape(mesh.ranks) for name in plan.local_names(mesh.pp_rank)}
        tensors = {
            name: torch.empty(shape, dtype=plan.by_name[name].dtype, device=META) for name, shape in shapes.items()
        }
        return model, LocalWeights(tensors)


@contextmanager
def meta_model(spec: RunSpec, layout: ParallelConfig, rank: int = 0) -> Iterator[tuple[Any, Mapping[int, Any]]]:
    """Yield the model of ``rank`` of a layout, in training, and the memory of autocast's copies of its weights."""
    options = Options(spec.mixed_precision, memory=spec.memory)
    adapter = None if spec.peft_config is None else read_config(spec.peft_config)
    with simulated_rank(layout.total_size, rank, spec.device) as copies, _quiet():
        outline = Outline(spec.config, spec.auto_class, dict(spec.stock))
        yield build(_WithoutValues(outline, 0), layout, options, adapter).train(), copies


def take_step(
    model: Any, job: Job, shape: ModelShape, counting: AbstractContextManager[Any], mixed_precision: str
) -> SimulatedTraffic:
    """Run a step of the job's microbatches on a meta model; ``counting`` records the bytes that it keeps."""
    runtime = runtime_of(model)
    leave_alone(runtime, torch.bfloat16 if mixed_precision != "no" else next(model.parameters()).dtype)
    ids = [torch.zeros((job.batch, job.sequence), dtype=torch.int64) for _ in range(job.microbatches)]
    rank = SimulatedRank(runtime, partial(_found, job, shape))
    with rank, FusedAttention(), counting:
        train_step(model, [{"input_ids": one, "labels": one} for one in ids])
    return rank.traffic


def _found(job: Job, shape: ModelShape, looked_at: Tensor) -> Tensor:
    """Return what the host would read from the device: zeros, or this rank's routes, spread evenly over experts."""
    found = torch.zeros(looked_at.shape, dtype=looked_at.dtype)
    if not (shape.experts and looked_at.ndim == 3 and len(looked_at) == 2):
        return found
    spread = job.layout.slices_tokens and found[0].numel() == shape.experts
    routes = round(job.tokens / (job.layout.tp if spread else 1) * shape.routed * found[0].numel() / shape.experts)
    each, rest = divmod(routes, found[0].numel())
    found[0] = each + (torch.arange(found[0].numel()) < rest).view_as(found[0])
    found[1] = found[0, :1]  # of rank 0: every other sends it as much as it keeps for itself
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings about a run that is never launched."""
    logger = logging.getLogger("hfscale")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
