"""Find the layers of a model. FSDP2 shards by layer, pipeline stages consist of layers, and layers contain blocks."""

from typing import Any

from torch import nn

from ..._compat.transformers.classes import layer_classes
from ...errors import PlanError
from ...models.blueprint import Blueprint
from ...models.names import wild_name
from ..parameter import join_path
from .draft import Draft


def find_layers(draft: Draft, blueprint: Blueprint | None) -> list[str]:
    """Return the names of the model's layers, in order: the modules in the layer lists that ``blueprint`` names.

    Without such lists, layers are the modules whose classes are in transformers' ``_no_split_modules``.
    """
    lists = _lists(draft, blueprint) if blueprint is not None else []
    if not lists:
        # The blueprint does not apply to these layers, so they only group parameters.
        classes = layer_classes(draft.model)
        names = list[str]()
        # Outer modules come first. A module inside a layer is not a layer.
        for (
            name,
            module,
        ) in draft.modules.items():
            if type(module).__name__ in classes and not name.startswith(
                tuple(f"{layer}." for layer in names)
            ):
                names.append(name)
        tied = {layer for layer, _ in _tied_outside(draft, names)}
        return [layer for layer in names if layer not in tied]
    layers = [
        f"{path}.{name}" for path in lists for name, _ in draft.modules[path].named_children()
    ]
    for layer, name in _tied_outside(draft, layers) if draft.layout.data_world > 1 else ():
        draft.problem(
            f"{draft.layout.describe()}: {wild_name(layer)} shares the tensor {wild_name(name)} with a module outside "
            "of this layer, but FSDP2 shards each layer by itself, which would untie this tensor: use "
            "dp_shard_size=1 and dp_replicate_size=1"
        )
    return layers


def _lists(draft: Draft, blueprint: Blueprint) -> list[str]:
    """Return the names of the model's lists of layers that ``blueprint``, the description of its model family,
    mentions.

    If there are none, add a problem under tensor parallelism, which needs them.
    """
    lists = find_lists(draft.model, blueprint)
    if not lists and draft.tp > 1:
        wanted = " or ".join(
            repr(base_prefix(draft.model) + path) for path in blueprint.layer_lists
        )
        draft.problem(
            f"tp_size={draft.tp}: the blueprint of {draft.config.model_type!r} (how hfscale shards its layers) names "
            f"the layer list {wanted}, which {type(draft.model).__name__} does not have: correct the blueprint, or "
            "use tp_size=1"
        )
    return lists


def find_lists(model: Any, blueprint: Blueprint) -> list[str]:
    """Return the full names of the layer lists (``nn.ModuleList``) in ``model`` that the blueprint mentions.

    The blueprint, which describes a model family's layers, has these names relative to the base model.
    """
    modules = dict(model.named_modules())
    lists = list[str]()
    for path in blueprint.layer_lists:
        # In some classes, the attribute with the base model is not named `base_model_prefix`.
        ends = [
            name
            for name, module in modules.items()
            if name.endswith(f".{path}") and any(module.children())
        ]
        known = [name for name in (base_prefix(model) + path, path) if name in modules]
        lists += known[:1] or (ends if len(ends) == 1 else [])
    return lists


def base_prefix(model: Any) -> str:
    """Return the prefix of the base model's module names in ``model``; empty if ``model`` is the base model itself."""
    return "" if getattr(model, "base_model", model) is model else f"{model.base_model_prefix}."


def _tied_outside(draft: Draft, layers: list[str]) -> list[tuple[str, str]]:
    """Return the layers that share a tensor with the rest of the model, each with the tensor's name in the layer."""
    homes: dict[int, dict[tuple[int, str], str]] = {}
    for name, parameter in draft.named():
        homes.setdefault(id(parameter), {})[draft.place(name)] = name
    tied = []
    for names in (list(places.values()) for places in homes.values() if len(places) > 1):
        owners = [
            next((layer for layer in layers if name.startswith(f"{layer}.")), None)
            for name in names
        ]
        if len(set(owners)) > 1:
            tied += [
                (owner, name)
                for owner, name in zip(owners, names, strict=True)
                if owner is not None
            ]
    return tied


def find_layer_list(model: Any) -> str:
    """Return the name of the base model's list of layers: the ``nn.ModuleList`` with the most parameters, not counting
    lists inside another list.

    Raise :class:`PlanError` if there is no list, or if a second list has at least half as many parameters.
    """
    lists: dict[str, int] = {}
    for name, module in getattr(model, "base_model", model).named_modules():
        if isinstance(module, nn.ModuleList) and not any(
            name.startswith(f"{outer}.") for outer in lists
        ):
            lists[name] = sum(parameter.numel() for parameter in module.parameters())
    ranked = sorted((name for name in lists if lists[name]), key=lambda name: -lists[name])
    if not ranked:
        raise PlanError(
            "the base model has no list of layers (an nn.ModuleList), which hfscale needs to shard it by layer"
        )
    if len(ranked) > 1 and 2 * lists[ranked[1]] >= lists[ranked[0]]:
        raise PlanError(
            "the base model has several lists of layers of similar size, so none can be taken as its list of layers: "
            f"{', '.join(ranked[:2])}"
        )
    return base_prefix(model) + ranked[0]


def direct_children(modules: dict[str, Any], owner: str) -> list[str]:
    """Return the full names of the modules directly below ``owner``."""
    return [
        join_path(owner, name) if owner else name for name, _ in modules[owner].named_children()
    ]
