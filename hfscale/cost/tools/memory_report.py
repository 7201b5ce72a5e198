"""Report the memory of one rank, as predicted by its plan and as measured.

The prediction comes from :mod:`hfscale.cost.model.memory_model`, with further inputs from the model and the
schedule. The measurement counts distinct storages of parameters, gradients and the optimizer's state. Tensors that the
forward pass keeps for the backward pass are counted by :mod:`hfscale.features.memory.saved`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.torch import storage_key
from ..._compat.torch_device import ACCELERATOR
from ..._compat.transformers.computing import recomputes
from ...config.options import Options
from ...distributed.ops.head_cross_entropy import rows_per_chunk
from ...errors import ConfigError, check_count, check_switch
from ...features.memory.recomputation import Recomputation
from ...features.quantization.quantized_modules import beside_quantized
from ...models.module_kinds import experts_per_token
from ...parallel.data.part import DataParallel
from ...parallel.pipeline.microbatches import in_flight_together
from ...plan import Plan
from ...plan.feature_plans import offloaded, refuse_aside
from ...train.runtime import find_runtime, local_tensor, runtime_of
from ..model.memory_model import MemoryEstimate, estimate_memory


def memory_estimate(
    model_or_plan: nn.Module | Plan,
    optimizer: str = "adamw_torch_fused",
    *,
    tokens: int = 2048,
    sequence_length: int | None = None,
    num_microbatches: int | None = None,
    gradient_checkpointing: bool | None = None,
    mixed_precision: str | None = None,
    optim_args: Mapping[str, Any] | None = None,
) -> MemoryEstimate:
    """Estimate the bytes that one rank holds in training, by kind. Nothing runs, and ranks do not communicate.

    Weights, adapters, gradients and optimizer state are exact. Activations are exact for layers like LLaMA's, and
    estimated from above for other layers; the result's ``notes`` tell which. Temporary buffers of kernels and
    collectives are not included.

    Args:
        model_or_plan: a model that hfscale parallelized, for an estimate of this rank; or a plan, for an estimate of
            the rank that holds the most.
        optimizer: a name that :func:`hfscale.create_optimizer` accepts.
        tokens: tokens of one microbatch of one data-parallel rank, all sequences together.
        sequence_length: tokens per sequence, on which scores of eager attention depend; by default there is a single
            sequence with all tokens.
        num_microbatches: microbatches per step in a pipeline; by default the layout's, or one per stage.
        gradient_checkpointing: whether the backward pass recomputes all layers; by default as set on the model, by
            transformers' switch or by ``memory=``.
        mixed_precision: as for :func:`hfscale.from_pretrained`; by default the model's.
        optim_args: options of the optimizer that change its state: ``momentum``, ``amsgrad``, ``min_8bit_size``.

    Raises:
        ConfigError: an argument is unknown or impossible, or the first one is neither a model of hfscale nor a plan.
    """
    check_asked(
        tokens, num_microbatches, mixed_precision, optim_args, sequence_length=sequence_length
    )
    if gradient_checkpointing is not None:
        check_switch("gradient_checkpointing", gradient_checkpointing)
    if not isinstance(model_or_plan, nn.Module | Plan):
        raise ConfigError(
            f"memory_estimate needs a model that hfscale parallelized, or a plan, got {model_or_plan!r}: pass what "
            "hfscale.from_pretrained or hfscale.plan returned"
        )
    runtime = None if isinstance(model_or_plan, Plan) else runtime_of(model_or_plan)
    plan = model_or_plan if isinstance(model_or_plan, Plan) else runtime_of(model_or_plan).plan
    if offloaded(plan).optimizer:
        refuse_aside(optimizer)
    given: dict[str, Any] = {"optimizer": optimizer, "options": optim_args, "tokens": tokens}
    given |= {"num_microbatches": num_microbatches, "sequence_length": sequence_length}
    if runtime is None:
        given |= {
            "all_recomputed": bool(gradient_checkpointing),
            "mixed_precision": mixed_precision or "no",
        }
        return max(memory_of_ranks(plan, **given), key=lambda held: held.total)
    model = runtime.model
    part = runtime.part(Recomputation)
    return _memory_of_rank(
        plan,
        runtime.mesh.pp_rank,
        runtime.mesh.device,
        ranks=runtime.mesh.ranks,
        all_recomputed=recomputes(model.modules())
        if gradient_checkpointing is None
        else gradient_checkpointing,
        chosen=None if part is None else part.chosen,
        mixed_precision=mixed_precision or runtime.options.mixed_precision,
        trained={planned.name for planned, p in runtime.parameters() if p.requires_grad},
        routes=experts_per_token(model.config),
        **given,
    )


def memory_of_ranks(plan: Plan, **given: Any) -> list[MemoryEstimate]:
    """Estimate the memory of each pipeline rank of a plan on GPUs, as :func:`memory_estimate` does."""
    return [
        _memory_of_rank(plan, rank, torch.device(ACCELERATOR), **given)
        for rank in range(plan.layout.pp)
    ]


def _memory_of_rank(
    plan: Plan,
    pp_rank: int,
    device: torch.device,
    *,
    tokens: int,
    num_microbatches: int | None,
    **given: Any,
) -> MemoryEstimate:
    """Estimate the memory of one pipeline rank, with the size of the loss's chunks on ``device``, and the microbatches
    that the schedule has in flight.
    """
    rows = 0
    if plan.head is not None:
        width = plan.by_name[f"{plan.head}.weight"].model_shape({})[0]
        rows = rows_per_chunk(plan.layout.own_tokens(tokens), width, device)
    in_flight = in_flight_together(plan, num_microbatches)
    given |= {
        "in_flight": in_flight,
        "chunk_rows": rows,
        "fused": device.type != "cpu",
        "apart": num_microbatches == 1,
    }
    return estimate_memory(plan, pp_rank=pp_rank, tokens=tokens, **given)


def check_asked(
    count: Any,
    microbatches: Any,
    mixed_precision: Any,
    optim_args: Any,
    tokens: str = "tokens",
    **counts: Any,
) -> None:
    """Raise :class:`ConfigError` if an argument of an estimate is invalid. ``count`` is the number of tokens, or of
    another unit that errors call ``tokens``. Arguments that may be ``None`` are not checked if they are.
    """
    check_count(tokens, count)
    for name, value in {"num_microbatches": microbatches, **counts}.items():
        if value is not None:
            check_count(name, value)
    if mixed_precision is not None:
        Options(mixed_precision)  # raises for unknown names
    if not isinstance(optim_args, Mapping | None):
        raise ConfigError(
            f"optim_args={optim_args!r} cannot be read: pass a mapping, as {{'momentum': 0.9}}"
        )


def held_bytes(model: nn.Module, optimizer: Any = None) -> dict[str, int]:
    """Count the bytes that this rank holds between steps: weights, adapters, gradients and optimizer state. Tensors
    that share a storage count once. The model may also be one of stock transformers, with PEFT's adapters.
    """
    runtime = find_runtime(model)
    older = list[Any]()
    waiting = list[Any]()
    left_out = list[Any]()
    pairs: list[tuple[bool, Any]]
    if runtime is None:
        pairs = [(".lora_" in name, parameter) for name, parameter in model.named_parameters()]
    else:
        own = {adapter.name for adapter in runtime.plan.adapters}
        pairs = [(planned.name in own, parameter) for planned, parameter in runtime.parameters()]
        older = list(runtime.executor.older_weights())
        waiting = list(runtime.executor.waiting_gradients())
        compressing = runtime.part(DataParallel)
        left_out = [] if compressing is None else list(compressing.left_out())
    states = (
        []
        if optimizer is None
        else [value for state in optimizer.state.values() for value in state.values()]
    )
    weights = [parameter for adapter, parameter in pairs if not adapter]
    return {
        "weights": _storage_bytes([*weights, *beside_quantized(model), *older]),
        "adapters": _storage_bytes(parameter for adapter, parameter in pairs if adapter),
        "gradients": _storage_bytes(
            [*(parameter.grad for _, parameter in pairs), *left_out, *waiting]
        ),
        "optimizer": _storage_bytes(states),
    }


def _storage_bytes(values: Iterable[Any]) -> int:
    """Return the bytes of the tensors in ``values``; tensors that share a storage count once."""
    by_storage: dict[int, int] = {}
    with torch.no_grad():
        for value in values:
            if isinstance(value, Tensor):
                storage = local_tensor(value).untyped_storage()
                by_storage[storage_key(storage)] = storage.nbytes()
    return sum(by_storage.values())
