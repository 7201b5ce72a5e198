"""Simulate one rank of a run: execute the training code on the meta device, in one process without other ranks.

A step takes the same branches as on GPUs, but computes no values. Collectives are recorded instead of sent. Where the
code would wait for a value from the device or another host, it gets a made-up value.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ..._compat.replaced import attribute_replaced
from ..._compat.torch import TorchDispatchMode, schema_of, tree_leaves
from ..._compat.torch_attention import flash_broadcasts_heads, flash_on_cpu
from ..._compat.torch_fake import (
    META,
    autocast_on_meta,
    fake_process_group,
    finished,
    group_of,
    meta_as_accelerator,
)
from ...api.build import build
from ...api.sources import FromSeed, Outline
from ...config.memory import MemoryConfig
from ...config.options import Options
from ...config.parallel import AXES, ParallelConfig
from ...distributed import process_groups
from ...distributed.mesh import EXPERT_AXES, MESH_AXES, Mesh
from ...features.adapters.storage import read_config
from ...parallel.pipeline.placeholders import drop_other_stages
from ...parallel.pipeline.run import Pipeline
from ...parallel.tensor.part import cut_parameters
from ...plan import Plan
from ...train.runtime import Runtime, runtime_of
from ...train.runtime.parameter_names import materialize_buffers
from ...train.runtime.shards import LocalWeights
from ...train.step import train_step
from ..model.job import Job
from ..model.model_shape import ModelShape
from ..model.traffic import ring_share

HOST = "host"
OTHERS = "others"
# Operators whose result has a size or a value that the CPU needs.
WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "equal",
}
MOVING = {"_to_copy", "copy_", "set_"}
INPUT_SECOND = ("allgather", "reduce_scatter", "alltoall")
Answer = Callable[[Tensor], Tensor]


@dataclass
class SimulatedTraffic:
    """Hold the collectives of one rank, and the bytes that it sends in them, by parallel axis. Further keys: ``"host"``
    (messages between CPUs), ``"stages"`` (hidden states between pipeline stages) and ``"ties"`` (gradients of tied
    tensors).
    """

    calls: dict[str, Counter[str]] = field(default_factory=dict)  # axis -> collective -> calls
    # Bytes that this rank sends, if each collective runs as a ring.
    sent: dict[str, float] = field(default_factory=dict)


@contextmanager
def simulated_rank(
    world: int,
    rank: int = 0,
    like: str = "cuda",
) -> Iterator[dict[int, Any]]:
    """Make this process one of ``world`` simulated ranks, whose device is the meta device in place of the kind
    ``like``. Yield the storages of the casts of weights that autocast makes.
    """
    with ExitStack() as stack:
        stack.enter_context(attribute_replaced(process_groups, "own_device", lambda: META))
        stack.enter_context(meta_as_accelerator())
        copies = stack.enter_context(autocast_on_meta(like))
        if world > 1:
            stack.enter_context(fake_process_group(world, rank))
        yield copies


class SimulatedRank(TorchDispatchMode):
    """Simulate the collectives of one rank on the meta device, and record the bytes that it sends in :attr:`traffic`.
    Where the CPU reads a tensor from the device, ``answer`` gives its values.
    """

    def __init__(self, runtime: Runtime, answer: Answer) -> None:
        super().__init__()
        self.traffic = SimulatedTraffic()
        self._answer = answer
        own = runtime.mesh
        # If a group spans several axes, the first one names the group.
        axes = reversed((*MESH_AXES, *EXPERT_AXES, *AXES))
        self._axes = {
            str(group.group_name): axis for axis in axes if (group := own.group(axis)) is not None
        }
        self._axes |= {str(group.group_name): "ties" for group in own.ties.values()}
        self._axes |= {str(group.group_name): "stages" for group in own.streams.values()}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = schema_of(func).name.partition("::")[2]
        if func.namespace == "c10d":
            return self._collective(func, name.strip("_"), args, kwargs)
        if name in MOVING:
            return self._copied_between_devices(func, name, args, kwargs)
        on_device = any(tensor.device == META for tensor in _tensors((args, kwargs)))
        if on_device and name == "_grouped_mm":
            return _grouped(
                args[0],
                args[1],
                args[2] if len(args) > 2 else kwargs.get("offs"),
            )
        if not on_device or name not in WAITING:
            return func(*args, **kwargs)
        result = func(
            *(self._answer(a) if isinstance(a, Tensor) else a for a in args),
            **kwargs,
        )
        return result.to(META) if isinstance(result, Tensor) else result

    def _copied_between_devices(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Copy a tensor between devices; a copy from the meta device to the CPU gets made-up values."""
        source = args[1] if name == "copy_" else args[0]
        target = args[0].device if name == "copy_" else kwargs.get("device") or source.device
        if source.device != META or target == META:
            return func(*args, **kwargs)
        made = self._answer(source)
        return func(args[0], made, **kwargs) if name == "copy_" else func(made, **kwargs)

    def _collective(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        source = args[1] if name.startswith(INPUT_SECOND) else args[0]
        given = _tensors(source)
        group = group_of(args)
        axis = HOST
        size = 1 if group is None else int(group.size())
        if any(tensor.device == META for tensor in _tensors((args, kwargs))):
            axis = OTHERS if group is None else self._axes.get(group.group_name, OTHERS)
        handed = sum(tensor.numel() * tensor.element_size() for tensor in given)
        self.traffic.calls.setdefault(axis, Counter())[name] += 1
        share = ring_share(name.removesuffix("_base").rstrip("_"), size)
        self.traffic.sent[axis] = self.traffic.sent.get(axis, 0.0) + handed * share
        if axis != HOST:
            return finished(func, args)
        result = func(*args, **kwargs)
        if name == "allreduce":  # a sum to which all ranks add the same values
            for tensor in given:
                tensor.mul_(size)
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _grouped(left: Tensor, right: Tensor, ends: Tensor | None) -> Tensor:
    """Return an empty tensor with the shape of a grouped matrix product, which torch's meta device supports only for
    aligned 16-bit operands.
    """
    groups = list(left.shape[:1]) if left.ndim == right.ndim == 3 else []
    if left.ndim == right.ndim == 2 and ends is not None:
        groups = [len(ends)]
    return left.new_empty((*groups, left.shape[-2], right.shape[-1]))


class FusedAttention(TorchFunctionMode):
    """Replace scaled dot-product attention on the meta device by a kernel that keeps no scores, as GPUs have it;
    torch's own choice on the meta device would keep them.

    The replacement is not used where GPUs have no such kernel: for attention biases that train, and for fewer key heads
    than query heads, unless torch repeats the key heads.
    """

    def __init__(self) -> None:
        super().__init__()
        self._broadcasts = flash_broadcasts_heads()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not functional.scaled_dot_product_attention or args[0].device != META:
            return func(*args, **kwargs)
        q, k, v = args[:3]
        mask = kwargs.get("attn_mask")
        trains = mask is not None and mask.requires_grad
        repeats = kwargs.get("enable_gqa") or (k.shape[1] == 1 and self._broadcasts)
        if trains or (q.shape[1] != k.shape[1] and not repeats):
            return func(*args, **kwargs)
        if mask is not None and mask.dtype == torch.bool:  # torch makes it a bias in each call
            mask = torch.empty_like(mask, dtype=q.dtype)
        scale = kwargs.get("scale") or q.shape[-1] ** -0.5
        return flash_on_cpu(
            q,
            k,
            v,
            bool(kwargs.get("is_causal")),
            mask,
            scale,
        )[0]


@dataclass(frozen=True)
class RunSpec:
    """Describe the model and the options of a rank that is built on the meta device."""

    config: PreTrainedConfig
    mixed_precision: str = "no"
    memory: MemoryConfig | None = None
    peft_config: Any = None
    auto_class: Any = AutoModelForCausalLM
    stock: tuple[tuple[str, Any], ...] = ()  # arguments of the stock model: ``dtype``
    device: str = "cuda"  # the kind of device to simulate


def run_spec(config: PreTrainedConfig, **given: Any) -> RunSpec:
    """Return the :class:`RunSpec` for arguments of :func:`hfscale.plan`; weights that would be quantized are built as
    unquantized ones.
    """
    given.pop("quantization_config", None)
    own = {field.name: given.pop(field.name) for field in fields(RunSpec) if field.name in given}
    return RunSpec(config, **own, stock=tuple(given.items()))


class _WithoutValues(FromSeed):
    """Build a model whose weights are this rank's shards on the meta device, which have no values and take no
    memory.
    """

    def load(self, plan: Plan, mesh: Mesh) -> tuple[Any, LocalWeights]:
        """Return the model, and the shards that this rank holds of its weights, on the meta device."""
        model = self.template(None)
        drop_other_stages(model, plan, mesh.pp_rank)
        cut_parameters(model, plan, mesh)
        materialize_buffers(model, {}, META)
        held = [plan.by_name[name] for name in plan.local_names(mesh.pp_rank)]
        return model, LocalWeights(
            {
                estimate.name: torch.empty(
                    estimate.local_shape(mesh.ranks),
                    dtype=estimate.dtype,
                    device=META,
                )
                for estimate in held
            }
        )


@contextmanager
def meta_model(
    spec: RunSpec, layout: ParallelConfig, rank: int = 0
) -> Iterator[tuple[Any, Mapping[int, Any]]]:
    """Yield the model that ``rank`` has in a layout, on the meta device and in training mode, and the storages of the
    casts of its weights that autocast makes.
    """
    options = Options(spec.mixed_precision, memory=spec.memory)
    adapter = None if spec.peft_config is None else read_config(spec.peft_config)
    logger = logging.getLogger("hfscale")
    with simulated_rank(layout.total_size, rank, spec.device) as copies, ExitStack() as stack:
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)  # no warnings, because this run is never launched
        outline = Outline(spec.config, spec.auto_class, dict(spec.stock))
        yield build(_WithoutValues(outline, 0), layout, options, adapter).train(), copies


def take_step(
    model: Any,
    job: Job,
    shape: ModelShape,
    counting: AbstractContextManager[Any],
    mixed_precision: str,
) -> SimulatedTraffic:
    """Run the training step that ``job`` describes on a model on the meta device, inside the context ``counting``, and
    return the bytes that the rank sends.
    """
    runtime = runtime_of(model)
    executor = runtime.executor
    # In a real run, ranks exchange random seeds, and stages exchange dtypes, before the first step.
    runtime.streams.agreed = True
    if isinstance(executor, Pipeline):
        dtype = torch.bfloat16 if mixed_precision != "no" else next(model.parameters()).dtype
        executor.expect((model.config.get_text_config(decoder=True).hidden_size,), dtype)
    ids = [
        torch.zeros(
            (job.batch, job.sequence),
            dtype=torch.int64,
        )
        for _ in range(job.microbatches)
    ]
    rank = SimulatedRank(runtime, partial(_value_on_host, job, shape))
    attention = FusedAttention()
    with rank, attention, counting:
        train_step(model, [{"input_ids": one, "labels": one} for one in ids])
    return rank.traffic


def _value_on_host(job: Job, shape: ModelShape, looked_at: Tensor) -> Tensor:
    """Return made-up values for a tensor that the CPU reads from the meta device: zeros or, for counts of tokens per
    expert, an equal number for every expert.
    """
    indices = torch.zeros(looked_at.shape, dtype=looked_at.dtype)
    if not (shape.experts and looked_at.ndim == 3 and len(looked_at) == 2):
        return indices
    spread = job.layout.slices_tokens and indices[0].numel() == shape.experts
    routes = round(
        job.tokens
        / (job.layout.tp if spread else 1)
        * shape.routed
        * indices[0].numel()
        / shape.experts
    )
    routes_of_expert, rest = divmod(routes, indices[0].numel())
    indices[0] = routes_of_expert + (torch.arange(indices[0].numel()) < rest).view_as(indices[0])
    indices[1] = indices[0, :1]  # rank 0 receives from each rank what that rank keeps itself
    return indices
