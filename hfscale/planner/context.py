"""Plan context parallelism: whether sequences can be cut, and how attention reads the other ranks' tokens."""

from typing import Any

import torch
from torch import nn

from .._host.transformers.classes import from_config
from .._host.transformers.experts import use_eager_experts
from ..families.clone import LAYERS, tiny_clone
from ..families.fields import HEAD_FIELDS, field, first_count, text_config
from ..plan.modules import ContextPlan
from ..plan.parameter import wild_name
from ..sequences.probe import find_mixing
from .draft import Draft

_WINDOWS = ("sliding_window", "attention_chunk_size")
_WINDOW = 5
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_heads")


def plan_context(draft: Draft) -> None:
    """Prove it on a clone, where the layout cuts sequences."""
    size = draft.layout.size("cp")
    if size == 1:
        return
    family = draft.config.model_type
    if draft.no_step or draft.loss is None:
        draft.problem(
            f"cp_size={size} does not fit {family!r}: sequences are cut where train_step shifts the labels of a causal "
            f"language model, and this loss is another{f' ({draft.no_step})' if draft.no_step else ''}: use cp_size=1"
        )
        return
    clone = _clone(draft)
    if clone is None:
        draft.problem(
            f"cp_size={size} does not fit {family!r}: no tiny clone of it can be built, on which to prove what reads "
            "which tokens: use cp_size=1"
        )
        return
    mixing, kinds = find_mixing(clone, False, list(_in_layers(clone).values()))
    if mixing:
        draft.problem(f"cp_size={size} does not fit {family!r}: {mixing}: use cp_size=1")
        return
    pads = not find_mixing(clone, True, list(_in_layers(clone).values()))[0]
    whole = tuple(name for name, module in _in_layers(draft.model).items() if type(module) in kinds)
    if whole and draft.layout.sequence_parallel and draft.tp > 1:
        draft.problem(
            f"cp_size={size} runs {wild_name(whole[0])} on whole sequences, and sequence_parallel=True cuts what it is "
            "given: use sequence_parallel=False"
        )
    _check_heads(draft, size)
    draft.context = ContextPlan(str(draft.layout.cp_method), pads, whole)


def _in_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules directly below the members of lists of modules: below layers, and what is listed in them."""
    listed = [
        (f"{name}.{index}", member)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for index, member in enumerate(module)
    ]
    return {f"{name}.{child}": module for name, member in listed for child, module in member.named_children()}


def _clone(draft: Draft) -> Any | None:
    """A tiny one in float64, with layers of every kind that the model has, as far as its config lists them."""
    model = draft.model
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        try:
            # What a family keeps in 32 bits by itself, too: nothing but the arithmetic is compared.
            config = tiny_clone(model.config, layers=_kinds_of_layers(model.config), **_short(model.config))
            clone = from_config(type(model), config, dtype=torch.float64).double()
        except Exception:  # whatever stock code says of a clone it cannot build
            return None
        use_eager_experts(clone)  # the host's grouped products take no float64
        return clone


def _short(config: Any) -> dict[str, int]:
    """Windows and chunks that are shorter than what is tried."""
    return {name: _WINDOW for name in _WINDOWS if isinstance(field(config, name), int)}


def _kinds_of_layers(config: Any) -> int:
    listed = (field(text_config(config), name) for name in ("layer_types", "layers_block_type"))
    return max(LAYERS, *(len(set(kinds)) for kinds in listed if isinstance(kinds, (list, tuple))), 0)


def _check_heads(draft: Draft, size: int) -> None:
    if draft.layout.cp_method != "heads":
        return
    config = text_config(draft.config)
    heads = (first_count(config, HEAD_FIELDS) or 0) // draft.tp
    keys = max(1, (first_count(config, _KEY_HEADS) or heads * draft.tp) // draft.tp)
    if heads and (heads % size or (keys % size and size % keys)):
        draft.problem(
            f"cp_method='heads' shares {heads} heads, and {keys} of keys and values, out to cp_size={size} ranks, and "
            "they do not divide: use cp_method='gather' or 'ring'"
        )
