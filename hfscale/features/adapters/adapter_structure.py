"""Wrap a model according to a PEFT config, list the added parameters, and replace methods of PEFT's model that would
treat one rank's shards as the full model.
"""

import copy
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import nn

from ..._compat import peft
from ..._compat.transformers.classes import class_name
from ...errors import ConfigError
from ...models.module_kinds import is_transposed
from ...plan import AdapterParameter, Plan
from ...train.runtime import find_runtime
from ...train.runtime.parameter_names import stock_name, unwrapped

# The plan handles ties, token rows are wrapped one module at a time, and targets are full names.
_PLANNED = (
    "trainable_token_indices",
    "ensure_weight_tying",
    "modules_to_tie",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
)


def wrap(model: Any, config: Any, name: str, autocast: bool = True, beside: bool = False) -> Any:
    """Return PEFT's model around ``model``, with factors on the meta device. With ``beside``, ``model`` is already
    PEFT's model with other adapters, and is returned with one more. Raise :class:`ConfigError` with PEFT's message.
    """
    try:
        if beside:
            peft.add_adapter(model, config, name, autocast)
            return model
        return peft.wrapped_model(model, config, name, autocast)
    except (ValueError, TypeError, NotImplementedError) as error:
        around = class_name(peft.adapted_model(model))
        raise ConfigError(
            f"PEFT cannot apply {type(config).__name__} to {around}: {error}: correct the PEFT config"
        ) from error


def narrowed(
    config: Any, targets: Sequence[str], parameters: Sequence[str], copies: Sequence[str]
) -> Any:
    """Return a copy of the config that targets only these modules and parameters of experts, and copies only the
    modules ``copies``, all by their full names.
    """
    from peft.utils.constants import DUMMY_TARGET_MODULES

    result = copy.deepcopy(config)
    # PEFT needs at least one target, but this pipeline stage may have no targeted module.
    result.target_modules = list(targets) if targets or parameters else DUMMY_TARGET_MODULES
    if parameters and not targets:
        result.target_modules = []
    if hasattr(result, "target_parameters"):
        result.target_parameters = list(parameters) or None
    # IA3 needs the feedforward modules to be among the targets.
    if getattr(result, "feedforward_modules", None) is not None:
        result.feedforward_modules = [n for n in targets if peft.is_feedforward(config, n)]
    result.modules_to_save = list(copies) or None
    for field in _PLANNED:
        if hasattr(result, field):
            setattr(result, field, None)
    return result


def adapter_parameters(whole: Any, plan: Plan) -> list[AdapterParameter]:
    """Return the parameters that adapters add to PEFT's full model ``whole`` (those that are not in the plan), in
    order. Raise :class:`ConfigError` for kinds of adapters that hfscale cannot shard.
    """
    stock = whole.get_base_model()
    modules = dict(stock.named_modules())
    parameters: list[AdapterParameter] = []
    owners: dict[int, str] = {}
    for name, parameter in stock.named_parameters(remove_duplicate=False):
        wrapper_name, kept_in, rest = _split_name(modules, name)
        if kept_in is None:
            continue
        wrapper: Any = modules[wrapper_name]
        if kept_in not in (*peft.ADAPTER_DIMS, *peft.COPIES, peft.IA3_SCALES, peft.TOKEN_ROWS):
            raise ConfigError(
                f"{type(wrapper).__name__} has adapter parameters of the kind {kept_in!r} in {wrapper_name}, which "
                "hfscale cannot shard: use LoRA (with DoRA, rsLoRA), IA3 or LoHa"
            )
        path = stock_name(wrapper_name)
        inner = unwrapped(wrapper)
        parameter_name, experts = peft.adapted_experts(wrapper)
        adapted = ".".join(rest[1:]) if kept_in in peft.COPIES else parameter_name or "weight"
        base = f"{path}.{adapted}"
        if base not in plan.by_name:
            raise ConfigError(
                f"PEFT added an adapter to {base}, which is not a parameter of the model: correct target_modules or "
                "target_parameters"
            )
        owner = owners.setdefault(id(parameter), name)
        # Wrappers of experts name the parameter in an attribute.
        turned = is_transposed(inner) or isinstance(inner, nn.Embedding)
        parameters.append(
            AdapterParameter(
                name=name,
                shape=tuple(parameter.shape),
                dtype=parameter.dtype,
                base=base,
                kept_in=kept_in,
                transposed=bool(getattr(inner, "is_transposed", turned)),
                experts=experts,
                tied_to=None if owner == name else owner,
                tokens=peft.tokens_of(wrapper, rest[-1]),
                adapter=rest[0],
            )
        )
    return parameters


def _split_name(modules: dict[str, nn.Module], name: str) -> tuple[str, str | None, list[str]]:
    """Split the name of an adapter's parameter into the wrapper's name, the wrapper's attribute, and the rest of the
    path. The attribute is ``None`` for a parameter that no adapter has added.
    """
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        wrapper = ".".join(parts[:end])
        if peft.is_wrapper(modules.get(wrapper)):
            inside = parts[end]
            if inside in peft.WRAPPED:
                return wrapper, None, []
            return wrapper, inside, parts[end + 1 :]
    return "", None, []


def inject_alone(
    config: Any, name: str, module: nn.Module, path: str, adapters: Sequence[AdapterParameter]
) -> dict[str, nn.Parameter]:
    """Let PEFT add the adapter ``name`` to the stock ``module`` at ``path``, inside a temporary model that contains
    only this module. Return the temporary model's parameters, by name.
    """
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    root: Any
    holder: nn.Module
    root = holder = nn.Module()
    *owners, child = path.split(".")
    for owner in owners:
        holder.add_module(owner, nn.Module())
        holder = holder.get_submodule(owner)
    holder.add_module(child, module)
    modules, parameters, _ = targets_of(adapters)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = narrowed(config, modules, parameters, ())
        # PEFT's own injection function raises for methods whose values depend on all modules.
        PEFT_TYPE_TO_TUNER_MAPPING[alone.peft_type](root, alone, adapter_name=name)
    return dict(root.named_parameters(remove_duplicate=False))


def targets_of(adapters: Collection[AdapterParameter]) -> tuple[list[str], list[str], list[str]]:
    """Return what a PEFT config must target to create these adapters: modules, parameters of experts, and modules of
    which PEFT trains a copy.
    """
    made = [adapter for adapter in adapters if adapter.kept_in not in (peft.COPY, peft.TOKEN_ROWS)]
    modules = dict.fromkeys(adapter.module for adapter in made if not adapter.experts)
    parameters = dict.fromkeys(adapter.base for adapter in made if adapter.experts)
    copied = (stock_name(adapter.name) for adapter in adapters if adapter.kept_in == peft.COPY)
    return (
        list(modules),
        list(parameters),
        list(dict.fromkeys(n.partition(f".{peft.COPY}.")[0] for n in copied)),
    )


def check_matches(
    asked: Any, resolved: Any, plan: Plan, adapters: Collection[AdapterParameter]
) -> None:
    """Raise :class:`ConfigError` for a target that matches nothing; PEFT raises only if no target matches. ``resolved``
    is the config ``asked`` after PEFT's changes: projection names of older models become parameters of experts.
    """
    modules, parameters, copies = targets_of(adapters)
    modules += [adapter.module for adapter in adapters if adapter.tokens]
    known = [name.rpartition(".")[0] for name in plan.by_name]
    for field, matched in (
        ("target_modules", modules),
        ("target_parameters", parameters),
        ("modules_to_save", copies),
    ):
        wanted = getattr(asked, field, None)
        left = getattr(resolved, field, None) or ()
        for target in [] if wanted is None or isinstance(wanted, str) else wanted:
            is_matched = any(_matches_target(name, target) for name in matched)
            left_out = bool(getattr(asked, "exclude_modules", None)) and any(
                _matches_target(name, target) for name in known
            )
            by_peft = field == "modules_to_save" and _is_added_by_peft(asked, target)
            if target in left and not (is_matched or left_out or by_peft):
                names = ", ".join(target_names(plan))
                raise ConfigError(
                    f"{field} names {target!r}, which matches nothing in the model: use names of the model, such as "
                    f"{names}"
                )


def _is_added_by_peft(config: Any, target: str) -> bool:
    """Return whether PEFT itself adds the head ``target`` to a classifier's ``modules_to_save``, so that a model may
    lack it.
    """
    return target in peft.HEADS and getattr(config, "task_type", None) in peft.CLASSIFYING


def _matches_target(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def target_names(plan: Plan) -> list[str]:
    """Return valid names of targets: the last name of modules, and parameters of experts with their module's name."""
    experts = tuple(f"{mixture.name}." for mixture in plan.mixtures)
    names = {
        ".".join(name.split(".")[-2:]) if name.startswith(experts) else name.split(".")[-2]
        for name in plan.by_name
        if "." in name
    }
    return sorted(names)[:40]


def quietly(model: Any, config: Any, name: str, beside: bool = False) -> Any:
    """Call :func:`wrap` without the warnings that wrapping the full model has already given."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return wrap(model, config, name, beside=beside)


_MERGE = "call hfscale.merge_and_unload(model), on every rank"
_OTHERS = "call it on the model that hfscale.get_peft_model returned, on every rank"
_WEIGHTED = "save the adapters by hfscale.save_pretrained, and combine them in one process"
_REFUSED = {
    "merge_and_unload": _MERGE,
    "merge_adapter": _MERGE,
    "unmerge_adapter": _MERGE,
    "add_adapter": _OTHERS,
    "load_adapter": _OTHERS,
    "delete_adapter": _OTHERS,
    "add_weighted_adapter": _WEIGHTED,
}
_OF_STOCK = ("add_adapter", "load_adapter", "delete_adapter")  # methods of transformers' models too
_CONVERT = "save the adapter by hfscale.save_pretrained, and convert it in one process"


def guard_methods(peft_model: Any, whole: Any) -> None:
    """Make PEFT's methods raise that do not work on a sharded model (merging, adding adapters, ...), and let PEFT count
    the parameters of the full model ``whole``. Switching adapters on this rank's model also switches them on ``whole``.
    """
    stock = peft_model.get_base_model()
    for name, instead in _REFUSED.items():
        for holder in (peft_model, peft_model.base_model, *([stock] if name in _OF_STOCK else ())):
            if hasattr(type(holder), name):
                setattr(holder, name, _refusing(name, instead))
    peft.ask_before_state_dicts(_refuse_parts)
    for layer in peft.convertible_layers(peft_model):  # called by convert_to_lora and save_as_lora
        setattr(layer, peft.CONVERTS, _refusing("conversion to LoRA", _CONVERT))
    peft_model.get_nb_trainable_parameters = whole.get_nb_trainable_parameters

    def set_adapter(names: Any, *args: Any, **kwargs: Any) -> None:
        for each in (peft_model, whole):
            peft.set_adapters(each, names, *args, **kwargs)

    if peft_model.base_model is not stock:  # true for a model with a prompt
        peft_model.base_model.set_adapter = set_adapter


def _refuse_parts(model: Any) -> None:
    """Let PEFT's ``get_peft_model_state_dict``, which scripts often call on one rank, raise if it would return
    shards.
    """
    runtime = find_runtime(model)
    if runtime is None:
        return
    plan = runtime.plan
    if plan.stages is not None or any(plan.by_name[adapter.name].cuts for adapter in plan.adapters):
        raise ConfigError(
            f"{plan.layout.describe()}: PEFT's get_peft_model_state_dict would return only this rank's shard of the "
            "adapter: call hfscale.save_pretrained(model, directory), on every rank, which writes the full one in "
            "PEFT's format; hfscale.stream_weights(model, adapters_only=True) yields its tensors by PEFT's keys"
        )


def give_back_methods(stock: nn.Module) -> None:
    """Give a stock model its own methods back, which adding adapters had replaced, and remove its PEFT config."""
    for name in (*_OF_STOCK, "peft_config"):
        stock.__dict__.pop(name, None)


def _refusing(name: str, instead: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ConfigError(f"PEFT's {name} does not work on a sharded model: {instead}")

    return refuse
