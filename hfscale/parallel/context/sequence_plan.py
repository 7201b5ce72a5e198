"""Find whether a model's sequences can be sharded over context ranks, and how attention reads other ranks' tokens."""

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from ..._compat.transformers.added_layers import added_decoders
from ..._compat.transformers.classes import takes_argument
from ...models.clone import layers_of_every_kind
from ...models.facts import ask
from ...models.family_limits import UNWRITABLE
from ...models.fields import HEAD_FIELDS, first_count, text_config
from ...models.module_kinds import is_tokenwise
from ...models.names import wild_name
from ...plan.context_plan import ContextPlan
from ...plan.drafting.draft import Draft
from ...plan.drafting.text_model import find_text_model, other_inputs
from ...plan.sequence_split import heads_fit

AT_MARKED = {"deepstack_visual_embeds": "visual_pos_masks"}
"""Names of inputs that are lists of tensors, each with the name of the mask ``[b, s]`` that belongs to it.

Each tensor of the list has one row for every token that the mask marks.
"""
_CUT_INSIDE = ("visual_pos_masks", "per_layer_inputs", *AT_MARKED)
"""Inputs of multimodal models' text models, in addition to the embeddings, that :mod:`.cut_batch` shards by token."""
_MANY = 8  # number of layers of the largest tiny copy
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_heads")


def plan_sequences(draft: Draft) -> None:
    """Plan how sequences are sharded, after a check on a tiny copy of the model that they can be."""
    size = draft.layout.cp
    family = draft.config.model_type
    if not _averages_tokens(draft):
        draft.problem(
            f"cp_size={size} does not fit {family!r}: sharded sequences need a loss that is a mean over tokens, and "
            f"the loss of this model is not one{f' ({draft.no_step})' if draft.no_step else ''}: use cp_size=1"
        )
        return
    if family in UNWRITABLE:
        draft.problem(
            f"{draft.layout.describe()} does not fit {family!r} with {UNWRITABLE[family]}: use one process"
        )
        return
    text = find_text_model(draft.model) or ""
    # Inputs of the text model in addition to the embeddings.
    given = other_inputs(draft.modules[text]) if text else []
    if uncut := [name for name in given if name not in _CUT_INSIDE]:
        draft.problem(
            f"cp_size={size} does not fit {family!r}: its layers read outputs of an image or audio encoder from "
            f"inputs that cannot be sharded along the sequence ({', '.join(uncut)}): use cp_size=1"
        )
        return
    layers = modules_in_layers(draft.model, text)
    reading = _find(draft, text, layers)
    if reading.mixing:
        draft.problem(f"cp_size={size} does not fit {family!r}: {reading.mixing}: use cp_size=1")
        return
    whole, handing, reads_masks = (
        tuple(name for name, module in layers.items() if type(module).__name__ in kinds)
        for kinds in (reading.kinds, reading.handing, reading.reads_masks)
    )
    if (mixers := whole + handing) and draft.layout.sequence_parallel and draft.tp > 1:
        draft.problem(
            f"cp_size={size}: {wild_name(mixers[0])} must get all tokens of its context rank, but "
            "sequence_parallel=True shards these tokens over tensor ranks: use sequence_parallel=False"
        )
    heads, keys = _heads(draft)
    together = _share_out_heads(draft, size, heads, keys)
    method = str(draft.layout.cp_method)
    own = (whole, reads_masks, reading.whole_mask, handing)
    draft.features.append(
        ContextPlan(
            method,
            reading.pads,
            *own,
            together,
            text,
            heads,
            keys,
        )
    )


def _averages_tokens(draft: Draft) -> bool:
    """Return whether the loss is a mean over the tokens of the input."""
    if draft.no_step or draft.loss is not None:
        return not draft.no_step
    return not takes_argument(draft.model, "decoder_input_ids") and bool(
        ask("token loss", draft.model)
    )


@dataclass(frozen=True)
class _Reading:
    """Describe how the modules of one model class and config mix tokens."""

    mixing: str  # the reason why sequences cannot be sharded; empty if they can be sharded
    pads: bool = False  # whether padded batches are supported
    kinds: Collection[str] = ()  # names of the classes of token mixers that run on full sequences
    # names of the classes of mixers that run on a rank's own tokens, starting from the state after the preceding tokens
    handing: Collection[str] = ()
    reads_masks: Collection[str] = ()  # the ``kinds`` that are attention in a family's own code
    whole_mask: bool = False  # whether the model needs the attention_mask of all tokens
    seen: Collection[str] = ()  # names of the classes of all modules in the clone's layers


def _find(draft: Draft, text: str, layers: dict[str, nn.Module]) -> _Reading:
    """Find the modules that mix tokens, by running a tiny copy of the model with few layers.

    If the tiny copy lacks a kind of module that the model's ``layers`` have, the result says why sequences cannot be
    sharded, unless the module is known to compute each token separately.
    """
    unseen = list[str]()
    # Some kinds of modules occur only every few layers.
    for count in (
        layers_of_every_kind(draft.config),
        _MANY,
    ):
        reading = _Reading(
            **ask(
                "mixing",
                draft.model,
                str(count),
                text,
                text=text,
                layers=count,
            )
        )
        if reading.mixing:
            return reading
        names = (
            (name, module)
            for name, module in layers.items()
            if type(module).__name__ not in reading.seen
        )
        unseen = [name for name, module in names if not _is_tokenwise(draft, name, module)]
        if not unseen:
            return reading
    kind = type(layers[unseen[0]]).__name__
    return _Reading(
        f"{kind} may read other tokens, which cannot be checked: a tiny clone of {_MANY} layers has no such module"
    )


def _is_tokenwise(draft: Draft, name: str, module: nn.Module) -> bool:
    """Return whether a module is known, without a run of the module, to compute each token separately."""
    mixture = any(f"{each.name}.".startswith(f"{name}.") for each in draft.mixtures)
    return mixture or is_tokenwise(module) or "MLP" in type(module).__name__


def modules_in_layers(model: nn.Module, text: str) -> dict[str, nn.Module]:
    """Return, by name, the modules inside the layers of ``text``: the direct children of each entry of each module
    list, including lists that are nested in layers.
    """
    inside = added_decoders(model)
    members = (
        f"{name}.{index}"
        for name, module in model.get_submodule(text).named_modules(prefix=text)
        if isinstance(module, nn.ModuleList)
        for index in range(len(module))
    )
    listed = [inside.get(name, name) for name in members]
    return {
        f"{name}.{child}": module
        for name in listed
        for child, module in model.get_submodule(name).named_children()
    }


def _heads(draft: Draft) -> tuple[int, int]:
    """Return the numbers of query and key/value heads on one tensor rank; zeros if the config has no such fields."""
    config = text_config(draft.config)
    heads = first_count(config, HEAD_FIELDS) or 0
    keys = first_count(config, _KEY_HEADS) or heads
    return heads // draft.tp, max(keys // draft.tp, 1) if heads else 0


def _share_out_heads(draft: Draft, size: int, heads: int, keys: int) -> int:
    """Return how many ranks exchange heads in a group under ``cp_method="heads_ring"``; 1 for all other methods.

    For ``heads`` and ``heads_ring``, add a problem to ``draft`` if no possible group of ranks divides the heads evenly.
    """
    method = draft.layout.cp_method
    if method not in ("heads", "heads_ring"):
        return 1
    fitting = [n for n in range(2, size + 1) if size % n == 0 and heads_fit(heads, keys, n)]
    if method == "heads_ring" and fitting:
        return max(fitting)
    if heads and size not in fitting:
        draft.problem(
            f"cp_method={method!r} needs {heads} query heads and {keys} key/value heads that divide evenly over "
            f"cp_size={size} ranks, but they do not: use cp_method='gather' or 'ring'"
        )
    return 1
