"""Install the hooks that shard hidden states along the sequence at the first layer of a stack, and gather them at its
end.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...._compat.transformers.hidden_states import (
    hidden_states_of,
    other_arguments,
    with_hidden_states,
)
from ....distributed.ops.collectives import copy_to_tp_region
from .region import SequenceRegion


def install_sequence_hooks(
    region: SequenceRegion, model: nn.Module, holds: Callable[[str], bool]
) -> None:
    """Install the hooks of sequence parallelism on a stack of layers, on the module that calls the layers, and on
    modules that need the full sequence.

    Only modules that ``holds`` accepts, those of this pipeline stage, get hooks.
    """
    plan = region.plan
    hooks = _Hooks(region)
    owner = model.get_submodule(plan.owner)
    owner.register_forward_pre_hook(lambda *_: region.begin())
    if plan.exit == plan.owner or holds(plan.exit):
        model.get_submodule(plan.exit).register_forward_hook(hooks.make_whole)
    owner.register_forward_hook(lambda *_: region.check_finished())
    for name in filter(holds, plan.layers):
        layer = model.get_submodule(name)
        layer.register_forward_pre_hook(hooks.before_layer, with_kwargs=True)
        if plan.dropout:
            layer.register_forward_hook(lambda *_: region.random.leave_layer())
    for name in filter(holds, plan.gathered):
        module = model.get_submodule(name)
        module.register_forward_pre_hook(hooks.before_whole, with_kwargs=True)
        module.register_forward_hook(hooks.after_whole)


def draw_sums_alike(
    region: SequenceRegion, block: str, rows: Sequence[nn.Module], exits: Sequence[nn.Module]
) -> None:
    """Make dropout draw the same mask on every tensor rank from the row projections of ``block``, whose outputs are
    partial sums, to the modules ``exits`` at the end of the block.
    """
    for row in rows:
        row.register_forward_pre_hook(
            lambda module, _: region.random.enter_sums(module, block) if region.cut else None
        )
    for module in exits:
        module.register_forward_hook(lambda *_: region.random.leave_sums())


class _Hooks:
    def __init__(self, region: SequenceRegion) -> None:
        self.region = region

    @torch.compiler.disable  # asking autograd which pass it recomputes would break the compiled graph
    def before_layer(
        self, layer: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Scatter the input of the first layer, so that it has this rank's tokens only."""
        if not self.region.active:
            return None
        if self.region.plan.dropout:
            self.region.random.enter_layer(layer)
        x = hidden_states_of(args, kwargs)
        share = self.region.cut_before(layer, x)
        self.region.note_stream()
        return None if share is None else with_hidden_states(args, kwargs, share)

    def make_whole(self, _: nn.Module, args: Any, output: Any) -> Any:
        """Gather all tokens of the last layer's output."""
        if isinstance(output, Tensor):
            return self.region.finish(output)
        if isinstance(output, tuple):
            return (self.region.finish(output[0]), *output[1:])
        output.last_hidden_state = self.region.finish(output.last_hidden_state)
        return output

    def before_whole(
        self, _: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Gather all tokens for a module that mixes tokens."""
        region = self.region
        group = self.region.group
        if not region.cut:
            return None
        args, kwargs = with_hidden_states(
            args, kwargs, region.enter(hidden_states_of(args, kwargs))
        )
        # Other inputs (an encoder's output) have all tokens already; each rank computes a partial gradient of these
        # inputs.
        others = {
            name: copy_to_tp_region(x, group)
            for name, x in other_arguments(kwargs).items()
            if _trains(x)
        }
        rest = (copy_to_tp_region(x, group) if _trains(x) else x for x in args[1:])
        return (*args[:1], *rest), {**kwargs, **others}

    def after_whole(self, _: nn.Module, args: Any, output: Any) -> Any:
        """Return this rank's tokens of the output of a module that mixes tokens."""
        if not self.region.cut:
            return output
        own = self.region.keep_own
        return (own(output[0]), *output[1:]) if isinstance(output, tuple) else own(output)


def _trains(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad
