"""Install tensor parallelism for PEFT's adapters inside tensor-parallel blocks.

A wrapper computes with local factors, and the projection inside the wrapper with a local weight. Their sum is
all-reduced, or stays sharded, by the collective at the entry or exit of the tensor-parallel block. This
module handles the remaining cases: gradients of replicated factors are partial and must be summed; DoRA needs the norms
of full rows; and dropout before an adapter must draw equal masks on all ranks if the input is replicated, and different
masks if the input is sharded.
"""

from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._compat.peft import (
    BASE,
    BEFT_BIAS,
    COPIES,
    DORA_MAGNITUDES,
    DROPOUTS,
    LORA_A,
    LORA_B,
    TOKEN_ROWS,
    UNILORA_VECTOR,
    modules_in,
    note_casts,
)
from ..._compat.peft_shared import sample_through
from ...parallel.tensor.edges import Overlap
from ...parallel.tensor.part import TensorParallel
from ...parallel.tensor.partial_gradients import (
    PartialSums,
    computes_with,
    read_partial,
    read_through,
)
from ...parallel.tensor.random import drawn_again, drop_again, drop_own
from ...plan import AdapterParameter, BlockPlan, Plan
from ...train.runtime import Runtime
from ...train.runtime.parameter_names import module_at, owner_of, unwrapped
from .fused_lora import why_unfused
from .token_rows import install_token_rows
from .whole_projections import install_whole_projections


def install_adapter_edges(runtime: Runtime) -> set[nn.Module]:
    """Install the communication between tensor ranks that adapters need, if there are adapters and several tensor
    ranks. Return the wrappers whose first factor saves only a shard of its input for the backward pass.
    """
    plan = runtime.plan
    model = runtime.model
    tensor = runtime.part(TensorParallel)
    if not plan.adapters or tensor is None or tensor.sums is None:
        return set()
    sums = tensor.sums
    for adapter in plan.adapters:
        planned = plan.by_name[adapter.name]
        # A trained copy of a module is used like the module itself.
        elsewhere = adapter.kept_in in (*COPIES, TOKEN_ROWS)
        if "tp" in planned.partial and not elsewhere and runtime.is_local(adapter.name):
            holder, name = owner_of(model, adapter.name)
            once = not _is_summed_bias(plan, adapter) or runtime.mesh.tp_rank == 0
            module = _reader_of(model, adapter, holder)
            # The module that computes with all experts reads the experts' factors.
            if adapter.experts:
                module = model.get_submodule(adapter.module)
            if _is_computed_by_all(plan, adapter):
                read = partial(_read_by_first, sums, runtime.mesh.tp_rank == 0)
                read_through(module, holder, {name: read})
                continue
            read_partial(module, sums, names=(name,), once=once, holder=holder)
    install_token_rows(runtime, sums)
    install_whole_projections(runtime)
    apart = set[nn.Module]()
    for block in (block for block in plan.blocks if runtime.is_local(block.name)):
        _install_in_block(runtime, tensor, sums, block, apart)
    return apart


def _reader_of(model: nn.Module, adapter: AdapterParameter, holder: nn.Module) -> nn.Module:
    """Return the module whose forward pass reads an adapter's parameter, which is an attribute of ``holder``. For the
    one vector that all wrappers of UniLoRA share, this is the module with this adapter.
    """
    if adapter.kept_in == UNILORA_VECTOR:
        return module_at(model, adapter.module)
    return computes_with(model, holder)


def _is_computed_by_all(plan: Plan, adapter: AdapterParameter) -> bool:
    """Return whether the parameter is UniLoRA's vector, which all wrappers share, in a module where every tensor rank
    computes the full gradient of the vector, so that it must count only once.
    """
    base = plan.by_name[adapter.base]
    whole = base.cut_over("tp") is None and "tp" not in base.partial
    return whole and adapter.kept_in == UNILORA_VECTOR


def _read_by_first(sums: PartialSums, first: bool, leaf: Tensor) -> Tensor:
    """Return the parameter ``leaf``, whose gradient is summed over tensor ranks, for a module in which every rank
    computes the full gradient: only the gradient of the first rank counts in the sum.
    """
    read = sums.read(leaf)
    # Other ranks need a gradient of zeros, because the sum may be a collective of the backward pass.
    return read if first else read.detach() + 0.0 * read


def _is_summed_bias(plan: Plan, adapter: AdapterParameter) -> bool:
    """Return whether an adapter's parameter is a bias after a row-parallel projection, whose output is summed over
    ranks, so that only one rank may add the bias.
    """
    of_factor = adapter.kept_in == LORA_B and len(adapter.shape) == 1
    is_bias = of_factor or adapter.kept_in == BEFT_BIAS
    return is_bias and plan.by_name[adapter.base].cut_over("tp") is not None


def _install_in_block(
    runtime: Runtime,
    tensor: TensorParallel,
    sums: PartialSums,
    block: BlockPlan,
    apart: set[nn.Module],
) -> None:
    stream = tensor.region_of(block.name)
    rank = runtime.mesh.tp_rank
    # If an MLP's projections are children of its layer (OPT, BERT), the MLP's block also contains the layer's
    # attention.
    inner = [
        f"{other.name}." for other in runtime.plan.blocks if other.name.startswith(f"{block.name}.")
    ]

    def in_cut_stream() -> bool:
        return stream.cut if stream is not None and stream.cut else block.dropout > 0

    for path, wrapper in runtime.model.get_submodule(block.name).named_modules():
        if unwrapped(wrapper) is wrapper or BASE in path.split("."):
            continue
        name = f"{block.name}.{path}" if path else block.name  # the stock module's name
        if f"{name}.".startswith(tuple(inner)):
            continue
        row = name in block.row
        if row:
            sum_norms(wrapper, sums.group)
        overlap = None if row else tensor.overlaps.get(block.name)
        # Other modules may run before the block's entry, and would read the values of the previous pass.
        if overlap is not None and name in (*block.column, *block.shared):
            _install_overlap(runtime, wrapper, overlap, sums, apart)
        sample_through(wrapper, partial(_sampled, row, in_cut_stream, name))
        for number, dropout in enumerate(modules_in(wrapper, DROPOUTS)):
            if isinstance(dropout, nn.Dropout):
                key = f"{name}/{number}"
                drop = dropout.forward
                drawn = partial(_dropped, dropout, drop, row, in_cut_stream, rank, key, overlap)
                dropout.forward = drawn  # type: ignore[method-assign]


def _install_overlap(
    runtime: Runtime, wrapper: Any, overlap: Overlap, sums: PartialSums, apart: set[nn.Module]
) -> None:
    """Let adapters gather a block's input again, or compute their gradients while the backward collective runs."""
    if overlap.regather:
        _keep_shares(wrapper, overlap, sums)
        apart.add(wrapper)
    elif runtime.options.fused_adapters and why_unfused(wrapper) is None:
        first, second = modules_in(wrapper, LORA_A), modules_in(wrapper, LORA_B)
        overlap.defer(zip(first, second, strict=True), sums)


def _keep_shares(wrapper: nn.Module, overlap: Overlap, sums: PartialSums) -> None:
    """Let adapters save only a shard of a block's input for the backward pass, where the full input is gathered again
    for weight gradients anyway.
    """

    def note(x: Tensor, found: Tensor) -> None:
        if overlap.gathered is not None:
            overlap.gathered.made(x, found, methodcaller("to", found.dtype))

    factors = modules_in(wrapper, LORA_A)
    if factors:
        note_casts(wrapper, note)
    for factor in factors:
        overlap.read_by(factor, sums.read)  # the factor is replicated and has a partial gradient


def sum_norms(wrapper: nn.Module, group: dist.ProcessGroup) -> None:
    """Make DoRA all-reduce the weight norms of a row projection, because each rank has only a slice of every row."""
    for module in modules_in(wrapper, DORA_MAGNITUDES):
        module.get_weight_norm = partial(_norm_over_ranks, group, bool(module.fan_in_fan_out))  # type: ignore[assignment]


def _norm_over_ranks(
    group: dist.ProcessGroup,
    transposed: bool,
    weight: Tensor,
    lora_weight: Tensor,
    scaling: float,
    **_: Any,
) -> Tensor:
    """Return the norms ``[out]`` of the rows of ``weight + scaling lora_weight``; each rank holds some of the columns
    ``in``.
    """
    with torch.no_grad():  # DoRA treats the norm as a constant
        whole = (weight.T if transposed else weight) + scaling * lora_weight
        squares = (
            torch.linalg.vector_norm(
                whole, dim=1, dtype=torch.promote_types(whole.dtype, torch.float32)
            )
            ** 2
        )
        dist.all_reduce(squares, group=group)
        return squares.sqrt().to(weight.dtype)


def _sampled(
    row: bool,
    in_cut_stream: Callable[[], bool],
    key: str,
    draw: Callable[[Tensor], Tensor],
    mean: Tensor,
) -> Tensor:
    """Sample a random value around ``mean``, which every tensor rank computes in full, equal on all tensor ranks."""
    if row or not in_cut_stream():
        return draw(mean)
    return drop_again(draw, mean, key)(mean)


def _dropped(
    module: nn.Dropout,
    drop: Callable[[Tensor], Tensor],
    row: bool,
    in_cut_stream: Callable[[], bool],
    rank: int,
    key: str,
    overlap: Overlap | None,
    x: Tensor,
) -> Tensor:
    """Apply dropout before an adapter: to a row projection's sharded input with this rank's RNG, and to all other
    inputs with equal masks on all ranks.
    """
    if not module.training:
        return drop(x)
    if row:
        return drop_own(drop, x, rank)
    if not in_cut_stream():
        return drop(x)
    again = overlap.gathered if overlap is not None else None
    if again is None or again.gives(x) is None:
        return drop_again(drop, x, key)(x)
    drawn = drop_again(
        partial(nn.functional.dropout, p=module.p, training=True),
        x,
        key,
    )
    dropped = drawn_again(x, drawn)
    again.made(x, dropped, drawn)
    return dropped
