"""The one file of this room that touches private names of FSDP2.

Checked with torch 2.13, where a module has several parameter groups, and written for 2.11 too, where it has one. FSDP2
reduces gradients in hooks of autograd. They do not serve where several microbatches are under way at once, nor where
the gradients of weights are made without them (a split backward pass), so it is told when to; torch's own pipelines do
the same.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard


def _groups(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _states(model: nn.Module) -> list[Any]:
    root: Any = fully_shard.state(model)  # type: ignore[attr-defined]
    return list(root._state_ctx.all_states)


def reduce_now(model: nn.Module) -> None:
    """Reduce and shard what gradients backward passes have left, and end the step."""
    for state in _states(model):
        for group in _groups(state):
            group.post_backward()
    root: Any = fully_shard.state(model)  # type: ignore[attr-defined]
    root._root_post_backward_final_callback()


def add_up_gradients(model: nn.Module) -> None:
    """Move gradients that autograd's hooks have not seen to where they are added up, in the type of reductions."""
    for parameter in _parameters(model):
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()


def _parameters(model: nn.Module) -> Iterator[Any]:
    return (parameter for state in _states(model) for group in _groups(state) for parameter in group.fsdp_params)
