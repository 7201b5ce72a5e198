"""Rotary embeddings whose frequencies depend on how long a sequence is: they are asked for all positions."""

from typing import Any

from torch import nn

from .seam import current_batch

_BY_LENGTH = ("dynamic", "longrope")
"""The host's kinds of rotary embeddings that look at the largest position (Peng et al. 2023; Ding et al. 2024)."""


def ask_for_all_positions(model: nn.Module) -> list[Any]:
    """Have those embeddings in ``model`` compute all positions of a cut sequence, and return this rank's.

    Returns:
        the handles of the hooks that do it.
    """
    handles = list[Any]()
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if any(kind in _BY_LENGTH for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])):
            handles.append(module.register_forward_pre_hook(_all_positions, with_kwargs=True))
            handles.append(module.register_forward_hook(_own_positions))
    return handles


def _all_positions(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    batch = current_batch()
    if batch is None:
        return None
    given = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    whole = batch.whole_positions(given.device).expand(*given.shape[:-1], -1)
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": whole}
    return (args[0], whole, *args[2:]), kwargs


def _own_positions(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    batch = current_batch()
    return output if batch is None else tuple(table[..., batch.places, :] for table in output)
