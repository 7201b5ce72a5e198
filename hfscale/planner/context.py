"""Plan context parallelism: whether sequences can be sharded, and how attention reads the other ranks' tokens."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from .._host.transformers.experts import use_eager_experts
from ..families.clone import layers_of_every_kind
from ..families.fields import HEAD_FIELDS, field, first_count, text_config
from ..families.projections import is_tokenwise
from ..families.unwritable import UNWRITABLE
from ..plan.context import ContextPlan
from ..plan.parameter import wild_name
from ..sequences import heads_fit
from ..sequences.cut import CUT_INSIDE
from ..sequences.probe import find_mixing
from .draft import Draft
from .probe import tiny_model_of
from .remembered import Remembered, said_by
from .text_model import find_text_model, other_inputs

_NO_CLONE = "no tiny clone of it can be built, on which to prove what reads which tokens"
_WINDOWS = ("sliding_window", "attention_chunk_size")
_WINDOW = 5
_MANY = 8  # layers
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_heads")


def plan_context(draft: Draft) -> None:
    """Prove it on a clone, where the layout cuts sequences."""
    size = draft.layout.cp
    if size == 1:
        return
    family = draft.config.model_type
    if draft.no_step or draft.loss is None:
        draft.problem(
            f"cp_size={size} does not fit {family!r}: sequences are cut where train_step shifts the labels of a causal "
            f"language model, and this loss is another{f' ({draft.no_step})' if draft.no_step else ''}: use cp_size=1"
        )
        return
    if family in UNWRITABLE:
        draft.problem(f"{draft.layout.describe()} does not fit {family!r} with {UNWRITABLE[family]}: use one process")
        return
    text = find_text_model(draft.model) or ""
    if uncut := _read_inside(draft, text):
        draft.problem(
            f"cp_size={size} does not fit {family!r}: its layers read what towers make of pictures by inputs that are "
            f"not cut ({', '.join(uncut)}): use cp_size=1"
        )
        return
    layers = _in_layers(draft.model, text)
    found = _find(draft, text, layers)
    if found.mixing:
        draft.problem(f"cp_size={size} does not fit {family!r}: {found.mixing}: use cp_size=1")
        return
    whole = tuple(name for name, module in layers.items() if type(module) in found.kinds)
    if whole and draft.layout.sequence_parallel and draft.tp > 1:
        draft.problem(
            f"cp_size={size} runs {wild_name(whole[0])} on whole sequences, and sequence_parallel=True cuts what it is "
            "given: use sequence_parallel=False"
        )
    heads, keys = _heads(draft)
    together = _share_out_heads(draft, size, heads, keys)
    method = str(draft.layout.cp_method)
    draft.features.append(ContextPlan(method, found.pads, whole, together, text, heads, keys))


def _read_inside(draft: Draft, text: str) -> list[str]:
    """List the inputs of the text model ``text``, besides embeddings, that cannot be sharded."""
    return [name for name in other_inputs(draft.modules[text]) if name not in CUT_INSIDE] if text else []


@dataclass(frozen=True)
class _Reading:
    """How the modules of one model class and config read other tokens.

    Attributes:
        mixing: why sequences cannot be sharded; empty if they can.
        pads: whether rows may have padding.
        kinds: classes of modules that mix tokens, and can be run on full sequences.
        seen: classes of modules in layers that were tried.
    """

    mixing: str
    pads: bool = False
    kinds: frozenset[type] = frozenset()
    seen: frozenset[type] = frozenset()


def _find(draft: Draft, text: str, layers: dict[str, nn.Module]) -> _Reading:
    """Find the modules that mix tokens, on a clone with every kind of module in the model's ``layers``."""
    own_class: Any = type(draft.model)
    unseen = list[str]()
    for count in (layers_of_every_kind(draft.config), _MANY):  # some kinds come every few layers only
        question = own_class, draft.config, text, count
        found = _known.answer((own_class, said_by(draft.config), text, count), partial(_proved, *question))
        if found.mixing:
            return found
        unseen = [name for name, m in layers.items() if type(m) not in found.seen and not _is_tokenwise(draft, name, m)]
        if not unseen:
            return found
    kind = type(layers[unseen[0]]).__name__
    return _Reading(f"nothing is known of what {kind} reads, which a tiny clone of {_MANY} layers has not")


_known = Remembered[_Reading]()


def _proved(kind: Any, config: Any, text: str, layers: int) -> _Reading:
    """Prove it on a tiny model in float64; may take half a minute."""
    clone = tiny_model_of(kind, config, torch.float64, layers=layers, **_short(config))
    if clone is None:
        return _Reading(_NO_CLONE)
    clone = clone.double()  # what a family keeps in 32 bits by itself, too: nothing but the arithmetic is compared
    use_eager_experts(clone)  # the host's grouped products take no float64
    candidates = list(_in_layers(clone, text).values())
    mixing, kinds = find_mixing(clone, False, candidates, text)
    if mixing:
        return _Reading(mixing)
    with_padding, more = find_mixing(clone, True, candidates, text)
    return _Reading("", not with_padding and more <= kinds, frozenset(kinds), frozenset(map(type, candidates)))


def _is_tokenwise(draft: Draft, name: str, module: nn.Module) -> bool:
    """Return whether a module that is not in the clone is known to compute token by token."""
    mixture = any(f"{each.name}.".startswith(f"{name}.") for each in draft.mixtures)
    return mixture or is_tokenwise(module) or "MLP" in type(module).__name__


def _in_layers(model: nn.Module, text: str) -> dict[str, nn.Module]:
    """Map names to the direct children of all members of module lists in ``text``: of layers, and of lists in them."""
    listed = [
        (f"{name}.{index}", member)
        for name, module in model.get_submodule(text).named_modules(prefix=text)
        if isinstance(module, nn.ModuleList)
        for index, member in enumerate(module)
    ]
    return {f"{name}.{child}": module for name, member in listed for child, module in member.named_children()}


def _short(config: Any) -> dict[str, int]:
    """Return config fields for windows and chunks shorter than the sequences tried."""
    return {name: _WINDOW for name in _WINDOWS if isinstance(field(config, name), int)}


def _heads(draft: Draft) -> tuple[int, int]:
    """Return the numbers of query and key/value heads on one tensor rank; zeros if the config has no such fields."""
    config = text_config(draft.config)
    heads = first_count(config, HEAD_FIELDS) or 0
    keys = first_count(config, _KEY_HEADS) or heads
    return heads // draft.tp, max(keys // draft.tp, 1) if heads else 0


def _share_out_heads(draft: Draft, size: int, heads: int, keys: int) -> int:
    """Return how many ranks exchange heads (1 for methods without); note a problem if the heads do not divide."""
    method = draft.layout.cp_method
    if method not in ("heads", "heads_ring"):
        return 1
    fitting = [n for n in range(2, size + 1) if size % n == 0 and heads_fit(heads, keys, n)]
    if method == "heads_ring" and fitting:
        return max(fitting)
    if heads and size not in fitting:
        draft.problem(
            f"cp_method={method!r} shares {heads} heads, and {keys} of keys and values, out to cp_size={size} ranks, "
            "and they do not divide: use cp_method='gather' or 'ring'"
        )
    return 1
