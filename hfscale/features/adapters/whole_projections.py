"""Support adapters that mix all inputs or all outputs of a projection, so that every tensor rank computes it in full.

OFT rotates blocks of inputs, HRA reflects all inputs, and LoKr's product spans several ranks' slices. Parameters of
such adapters are full on every rank. While a wrapper computes, the projection has its full weight, gathered and frozen,
but the block around the wrapper still gets and returns this rank's slices::

    column    x [.., in] --wrapper, weight [out, in]--> [.., out] --this rank's slice--> [.., out/t]
    row       x [.., in/t] --all-gather--> [.., in] --wrapper--> [.., out], which the first rank alone adds to the sum

So each rank has partial gradients of an adapter. Autograd keeps the gathered weights of a forward pass until its
backward pass.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.peft import WHOLE
from ..._compat.replaced import entries_replaced
from ..._compat.torch import own_parameters
from ...distributed.mesh import Mesh
from ...distributed.ops.collectives import copy_to_tp_region, gather_from_tp_region
from ...errors import ConfigError
from ...models.module_kinds import follow_weight, weight_dims
from ...plan import AdapterParameter, ParameterPlan, Plan
from ...train.runtime import Runtime
from ...train.runtime.parameter_names import module_at, unwrapped
from ...train.runtime.shards import gather_full, local_tensor


def whole_paths(plan: Plan) -> list[str]:
    """Return the projections that are sharded over tensor ranks, but whose adapters (OFT, HRA or LoKr) need all of
    their inputs and outputs.
    """
    return list(dict.fromkeys(adapter.module for adapter in _on_whole(plan)))


def refuse_other_modules(plan: Plan) -> None:
    """Raise :class:`ConfigError` for adapters that need all inputs and outputs of a module (OFT, HRA, LoKr), if the
    module is sharded, but is not a projection of a tensor-parallel block.
    """
    sides = {name for block in plan.blocks for name in (*block.column, *block.row)}
    across = {name for block in plan.blocks for name, _ in block.across}
    for adapter in _on_whole(plan):
        path = adapter.module
        base = plan.by_name[adapter.base]
        cut = base.cut_over("tp")
        inputs = 0 if adapter.transposed else 1
        # If a projection concatenates several matrices along its inputs, gathered inputs would be in another order.
        in_parts = cut is not None and cut.dim == inputs and bool(cut.parts)
        if path not in sides - across or len(base.shape) != 2 or in_parts:
            raise ConfigError(
                "over tensor ranks, target_modules of this peft_type must be projections inside of the layers' "
                f"attention and MLP blocks, got {path}: leave this module out of target_modules, or use tp_size=1"
            )


def _on_whole(plan: Plan) -> Iterator[AdapterParameter]:
    for adapter in plan.adapters:
        if adapter.kept_in in WHOLE and plan.by_name[adapter.base].cut_over("tp") is not None:
            yield adapter


@contextmanager
def shown_whole(model: nn.Module, plan: Plan, holds: Callable[[str], bool]) -> Iterator[None]:
    """Inside the ``with`` block, show PEFT the full sizes of projections whose adapters need the full weight: meta
    tensors, which take no memory, replace their parameters.
    """
    with ExitStack() as stack:
        frozen: list[tuple[nn.Parameter, nn.Parameter]] = []
        for path in whole_paths(plan):
            if not holds(f"{path}.weight"):
                continue
            module = unwrapped(module_at(model, path))
            held = own_parameters(module)
            shown = {
                name: nn.Parameter(
                    torch.empty(
                        plan.by_name[f"{path}.{name}"].shape, dtype=leaf.dtype, device="meta"
                    ),
                    requires_grad=leaf.requires_grad,
                )
                for name, leaf in held.items()
                if leaf is not None
            }
            frozen += [(held[name], each) for name, each in shown.items()]
            stack.enter_context(_shown(module, shown))
        yield
    for leaf, each in frozen:  # copy the requires_grad that PEFT has set
        leaf.requires_grad_(each.requires_grad)


@contextmanager
def _shown(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside the ``with`` block, replace parameters of a projection by ``tensors``, and set its size attributes
    (``in_features``, for example) to the sizes of the new weight.
    """
    held = own_parameters(module)
    try:
        with entries_replaced((held, name, value) for name, value in tensors.items()):
            follow_weight(module)
            yield
    finally:
        follow_weight(module)


def gathered(planned: ParameterPlan, share: Tensor, mesh: Mesh) -> Tensor:
    """Return a full parameter from this rank's ``share``, which is not sharded over data axes; collective."""
    return gather_full(share.contiguous(), planned.shape, planned.model_cuts, mesh)


def install_whole_projections(runtime: Runtime) -> None:
    """Make the adapters' wrappers compute with the full weight of their projection, gathered over tensor ranks, while
    their inputs and outputs remain this rank's shards.
    """
    for path in whole_paths(runtime.plan):
        if runtime.is_local(f"{path}.weight"):
            wrapper: Any = module_at(runtime.model, path)
            # Compiled graphs cannot handle a parameter that is temporarily replaced.
            wrapper.forward = torch.compiler.disable(_projection(runtime, path, wrapper))


def _projection(runtime: Runtime, path: str, wrapper: nn.Module) -> Callable[..., Tensor]:
    mesh = runtime.mesh
    group = mesh.tp_group
    base = unwrapped(wrapper)
    plans = {
        name: runtime.plan.by_name[f"{path}.{name}"]
        for name in own_parameters(base)
        if f"{path}.{name}" in runtime.plan.by_name
    }
    weight = plans["weight"]
    cut = weight.cut_over("tp")
    assert cut is not None
    outputs, inputs = weight_dims(base)
    forward = partial(_with_whole, base, wrapper.forward, plans, mesh)
    if cut.dim == outputs:
        own = replace(cut, dim=-1)
        return lambda x, *args, **kwargs: own.take(
            forward(x, *args, **kwargs), mesh.tp_rank
        ).contiguous()
    lengths = [cut.local_length(weight.shape[inputs], rank) for rank in range(cut.size)]

    def row(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        full = copy_to_tp_region(gather_from_tp_region(x, lengths, group), group)
        found = forward(full, *args, **kwargs)
        return found if mesh.tp_rank == 0 else found * 0.0

    return row


def _with_whole(
    base: nn.Module,
    forward: Callable[..., Tensor],
    plans: Mapping[str, ParameterPlan],
    mesh: Mesh,
    x: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    held = own_parameters(base)
    wanted = {
        name: planned for name, planned in plans.items() if planned.cut_over("tp") is not None
    }
    trained = next((name for name in wanted if held[name].requires_grad), None)
    if trained is not None:
        raise ConfigError(
            f"{plans[trained].name} must be frozen, got requires_grad=True: its adapter computes with a copy of the "
            "weight that is gathered from all tensor ranks, and this copy returns no gradient to the weight: freeze "
            "the weight (requires_grad_(False)), or use tp_size=1"
        )
    full = {
        name: gathered(planned, local_tensor(held[name]), mesh) for name, planned in wanted.items()
    }
    with _shown(base, full):
        return forward(x, *args, **kwargs)
