"""Install the edges of a block as hooks on stock modules, given functions that communicate.

Processes and inference's threads install the same hooks; they differ in the functions of their :class:`Edge`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..._compat.transformers.hidden_states import hidden_states_of, with_hidden_states
from ...plan.cut import Cut
from ...plan.modules import BlockPlan

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Edge:
    """Hold how one tensor rank communicates with the others.

    Attributes:
        rank: its own.
        size: the number of ranks.
        enter: applied to the block's input.
        leave: applied to the block's output, a partial sum.
        enter_other: applied to the block's other inputs, which are the same on all ranks.
        gather: concatenates the ranks' slices of a tensor's last dim, given their lengths.
    """

    rank: int
    size: int
    enter: Callable[[Tensor], Tensor]
    leave: Callable[[Tensor], Tensor]
    enter_other: Callable[[Tensor], Tensor]
    gather: Callable[[Tensor, list[int]], Tensor]


def hook_block(model: nn.Module, block: BlockPlan, edge: Edge) -> None:
    """Install hooks on the inputs and outputs of ``block``, its per-head inputs, and its modules across heads."""
    if block.heads or block.sample_heads:
        model.get_submodule(block.name).register_forward_pre_hook(_own_heads(block, edge), with_kwargs=True)
    for name in block.enter:
        model.get_submodule(name).register_forward_pre_hook(_entered(block, edge), with_kwargs=True)
    for name in block.leave:
        model.get_submodule(name).register_forward_hook(_left(edge))
    for name, width in block.across:
        _compute_across(model.get_submodule(name), width, block.replicas if name in block.replicated else 1, edge)


def _entered(block: BlockPlan, edge: Edge) -> Callable[..., Arguments]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        others = {name: edge.enter_other(kwargs[name]) for name in block.enter_inputs if kwargs.get(name) is not None}
        kwargs = {**kwargs, **others}
        return with_hidden_states(args, kwargs, edge.enter(hidden_states_of(args, kwargs)))

    return hook


def _left(edge: Edge) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return (edge.leave(output[0]), *output[1:]) if isinstance(output, tuple) else edge.leave(output)

    return hook


def _own_heads(block: BlockPlan, edge: Edge) -> Callable[..., Arguments]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        own = dict(kwargs)
        for name, dim in block.heads:
            if own.get(name) is not None:
                own[name] = own[name].chunk(edge.size, dim)[edge.rank]
        for name in block.sample_heads:
            if own.get(name) is not None:
                by_sample = own[name].unflatten(0, (hidden_states_of(args, kwargs).shape[0], -1))
                own[name] = by_sample.chunk(edge.size, 1)[edge.rank].flatten(0, 1)
        return args, own

    return hook


def _compute_across(module: nn.Module, width: int, replicas: int, edge: Edge) -> None:
    """Gather the full ``width`` of a cut activation for ``module``, and cut its output to this rank's slice.

    Where ``replicas`` consecutive ranks hold the same share, the first one's is read.
    """
    cut = Cut("tp", -1, edge.size, replicas=(replicas,))
    lengths = [cut.local_length(width, other) for other in range(edge.size)]

    def gathered(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # What follows differs between ranks, so the gradient of the whole is the sum over them.
        every = edge.gather(args[0], lengths)
        if replicas > 1:
            every = every.unflatten(-1, (edge.size // replicas, replicas, -1))[..., 0, :].flatten(-2)
        return edge.enter_other(every), *args[1:]

    module.register_forward_pre_hook(gathered)
    module.register_forward_hook(lambda _, args, output: cut.take(output, edge.rank))


def set_local_sizes(module: Any, block: BlockPlan) -> None:
    """Let ``module``, that of ``block``, read local sizes from its attributes and its config."""
    for path, divisor in block.local_attributes:
        owner, _, name = path.rpartition(".")
        holder = module.get_submodule(owner)
        setattr(holder, name, getattr(holder, name) // divisor)
    if block.local_config:
        module.config = _LocalConfig(module.config, block.local_config)


class _LocalConfig:
    """Show a config to one block with some fields replaced by local sizes."""

    def __init__(self, config: Any, fields: tuple[tuple[str, int], ...]) -> None:
        local = {field: getattr(config, field) // divisor for field, divisor in fields}
        self.__dict__.update(local, _whole=config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_whole":  # asked for by copy and pickle, before there is anything here
            raise AttributeError(name)
        return getattr(self._whole, name)
