"""Memory of one rank: as the plan predicts it, and as it is.

The prediction is :mod:`hfscale.estimate.memory`'s, with what only a model or a schedule knows filled in. What is held
is counted by storages, each once: those of parameters, gradients and the optimizer's state. What the forward pass keeps
for the backward pass is :mod:`.saved`'s.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._host.torch import storage_key
from .._host.transformers.computing import recomputes
from ..errors import ConfigError, check_count, check_switch
from ..estimate.counted import Counted
from ..estimate.memory import MemoryEstimate, estimate_memory
from ..families.expert_modules import experts_per_token
from ..ops.head_cross_entropy import rows_per_chunk
from ..options import Options
from ..parallel.data import DataParallel
from ..plan import Plan
from ..plan.offload import offloaded, refuse_aside
from ..quantization.quantized_modules import beside_quantized
from ..runtime import find_runtime, local_tensor, runtime_of
from .alive import alive_together
from .recompute import Recomputation


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
    """Bytes that one rank holds in training, by kind; ``print`` it. Nothing is run, and ranks do not communicate.

    Weights, adapters, gradients and optimizer state are exact. Activations are counted for LLaMA's kind of layer, and
    estimated from above for any other; the notes say which. Not in it: what kernels and collectives use meanwhile.

    Args:
        model_or_plan: a model that hfscale parallelized, of which this rank's part is meant; or a plan, of which the
            rank is meant that holds most.
        optimizer: a name that :func:`hfscale.create_optimizer` knows.
        tokens: tokens of one microbatch of one batch rank, over all of its sequences.
        sequence_length: tokens of one of these sequences, on which scores of eager attention depend; by default there
            is one sequence, of all tokens.
        num_microbatches: that go through pipeline stages in a step; by default the layout's, or one per stage.
        gradient_checkpointing: whether all layers are recomputed in the backward pass; by default as the model is set,
            by transformers' switch or by ``memory=``.
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp8"``; by default the model's.
        optim_args: the optimizer's options, where they change its state: ``momentum``, ``amsgrad``, ``min_8bit_size``.

    Raises:
        ConfigError: something is unknown or impossible, or what is given is neither a model of hfscale's nor a plan.
    """
    check_asked(tokens, num_microbatches, mixed_precision, optim_args, sequence_length=sequence_length)
    _check_optimizer(model_or_plan, optimizer)
    if gradient_checkpointing is not None:
        check_switch("gradient_checkpointing", gradient_checkpointing)
    if isinstance(model_or_plan, Plan):
        found = memory_of_ranks(
            model_or_plan, optimizer, tokens=tokens, sequence_length=sequence_length, optim_args=optim_args,
            num_microbatches=num_microbatches, mixed_precision=mixed_precision or "no",
            gradient_checkpointing=bool(gradient_checkpointing),
        )  # fmt: skip
        return max(found, key=lambda held: held.total)
    sizes = {"tokens": tokens, "sequence_length": sequence_length}
    given: dict[str, Any] = {"optimizer": optimizer, "options": optim_args, **sizes}
    if not isinstance(model_or_plan, nn.Module):
        raise ConfigError(f"memory_estimate got {model_or_plan!r}: pass a model that hfscale parallelized, or a plan")
    runtime = runtime_of(model_or_plan)
    plan, model = runtime.plan, runtime.model
    part = runtime.part(Recomputation)
    given |= {
        "checkpointing": recomputes(model) if gradient_checkpointing is None else gradient_checkpointing,
        "recomputed_layers": None if part is None else part.chosen,
        "mixed_precision": mixed_precision or runtime.options.mixed_precision,
    }
    given |= {"trained": {planned.name for planned, p in runtime.parameters() if p.requires_grad}}
    given |= {"alive": alive_together(plan, num_microbatches), "routes": experts_per_token(model.config)}
    return estimate_memory(
        plan, runtime.mesh.ranks, chunk_rows=_chunk_rows(plan, tokens, runtime.mesh.device.type), **given
    )


def _check_optimizer(model_or_plan: Any, name: str) -> None:
    """Refuse an optimizer that cannot be where the plan wants it."""
    runtime = find_runtime(model_or_plan) if isinstance(model_or_plan, nn.Module) else None
    plan = model_or_plan if runtime is None else runtime.plan
    if isinstance(plan, Plan) and offloaded(plan).optimizer:
        refuse_aside(name)


def check_asked(
    count: Any, microbatches: Any, mixed_precision: Any, optim_args: Any, tokens: str = "tokens", **counts: Any
) -> None:
    """Refuse what nothing can be estimated for.

    Args:
        tokens: name of ``count``.
        counts: further numbers, by name; ``None`` stands for a default.

    Raises:
        ConfigError: with the value.
    """
    check_count(tokens, count)
    for name, value in {"num_microbatches": microbatches, **counts}.items():
        if value is not None:
            check_count(name, value)
    if mixed_precision is not None:
        Options(mixed_precision)  # refuses what is unknown
    if not isinstance(optim_args, Mapping | None):
        raise ConfigError(f"optim_args={optim_args!r} cannot be read: pass a mapping, as {{'momentum': 0.9}}")


def memory_of_ranks(
    plan: Plan,
    optimizer: str = "adamw_torch_fused",
    *,
    tokens: int = 2048,
    sequence_length: int | None = None,
    num_microbatches: int | None = None,
    optim_args: Mapping[str, Any] | None = None,
    mixed_precision: str = "no",
    gradient_checkpointing: bool = False,
    routes: int | None = None,
    counted: Counted | None = None,
) -> list[MemoryEstimate]:
    """Estimate the memory of each pipeline rank of a plan, as :func:`memory_estimate` does for one.

    Args:
        routes: experts per token, if known.
        counted: activation bytes measured on the model's own layers, for those without a formula.
    """
    alive = alive_together(plan, num_microbatches)
    return [
        estimate_memory(
            plan,
            {"pp": rank},
            optimizer=optimizer,
            options=optim_args,
            tokens=tokens,
            alive=alive,
            checkpointing=gradient_checkpointing,
            mixed_precision=mixed_precision,
            routes=routes,
            chunk_rows=_chunk_rows(plan, tokens, "cpu"),
            counted=counted,
            sequence_length=sequence_length,
        )
        for rank in range(plan.layout.pp)
    ]


def _chunk_rows(plan: Plan, tokens: int, device: str) -> int:
    if plan.head is None:
        return 0
    weight = plan.by_name[f"{plan.head}.weight"]
    cut = weight.cut_over("tp")
    width = cut.local_length(weight.shape[0], 0) if cut else weight.shape[0]
    return rows_per_chunk(tokens, width, torch.device(device))


@dataclass(frozen=True)
class Held:
    """Bytes that this rank holds now, each storage counted once. The kinds are those of an estimate.

    Attributes:
        weights: parameters of the model; of quantized ones, packed bytes and everything needed to read them; stashed
            weight versions of microbatches in flight.
        adapters: parameters of adapters.
        gradients: gradients of all of them, those waiting for a later step, and residuals of gradient compression.
        optimizer: state of the optimizer.
    """

    weights: int
    adapters: int
    gradients: int
    optimizer: int


def held_bytes(model: nn.Module, optimizer: Any = None) -> Held:
    """Count the bytes that this rank holds between steps; a stock model's adapters are recognized by PEFT's names."""
    runtime = find_runtime(model)
    if runtime is not None:
        own = {adapter.name for adapter in runtime.plan.adapters}
        pairs = [(planned.name in own, parameter) for planned, parameter in runtime.parameters()]
    else:
        pairs = [(".lora_" in name, parameter) for name, parameter in model.named_parameters()]
    weights = [parameter for adapter, parameter in pairs if not adapter]
    compressing = None if runtime is None else runtime.part(DataParallel)
    left_out = [] if compressing is None else compressing.left_out()
    older, waiting = (
        ((), ())
        if runtime is None
        else (
            runtime.executor.older_weights(),
            runtime.executor.waiting_gradients(),
        )
    )
    states = [] if optimizer is None else [value for state in optimizer.state.values() for value in state.values()]
    return Held(
        weights=storage_bytes([*weights, *beside_quantized(model), *older]),
        adapters=storage_bytes(parameter for adapter, parameter in pairs if adapter),
        gradients=storage_bytes([*(parameter.grad for _, parameter in pairs), *left_out, *waiting]),
        optimizer=storage_bytes(states),
    )


def storage_bytes(values: Iterable[Any]) -> int:
    """Bytes of the memory of all tensors among ``values``, each piece once."""
    found: dict[int, int] = {}
    with torch.no_grad():
        for value in values:
            if isinstance(value, Tensor):
                storage = local_tensor(value).untyped_storage()
                found[storage_key(storage)] = storage.nbytes()
    return sum(found.values())
