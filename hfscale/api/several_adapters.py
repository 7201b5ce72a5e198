"""Add, load and delete adapters of a sharded model that has an adapter already; every rank must make each call."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from .._compat.peft import delete_adapter
from ..errors import ConfigError
from ..features.adapters import Adapters, attach_adapters, complete_config, read_config
from ..features.adapters.adapter_structure import guard_methods
from ..features.adapters.attach import NOT_ADDED
from ..features.adapters.planned import plan_with
from ..features.adapters.several import let_all_train
from ..features.adapters.storage import load_adapter
from ..plan import Plan
from ..train.runtime import Runtime, runtime_of
from ..train.runtime.handover import Replaced
from ..train.runtime.shards import LocalWeights
from ..train.runtime.writing import all_or_none
from .assemble import assemble, take_apart

Change = Callable[[LocalWeights], tuple[Adapters, Plan]]


def replaced_by(runtime: Runtime, by: str) -> Replaced:
    """Return an object with weak references to the model's parameters, for the time in which the hfscale function
    ``by`` replaces these parameters.
    """
    return Replaced([(planned.name, parameter) for planned, parameter in runtime.parameters()], by)


def change_adapters(runtime: Runtime, by: str, change: Change) -> Adapters:
    """Undo the sharding of a model, call ``change`` on this rank's shards to change the model's adapters, and shard
    the model again by the plan that ``change`` returns. If ``change`` raises, the model is restored.
    """
    model = runtime.model
    training = model.training
    replaced = replaced_by(runtime, by)
    shares = take_apart(runtime)
    before = LocalWeights(dict(shares.tensors), list(shares.quantized))
    put_together = partial(assemble, model, mesh=runtime.mesh, options=runtime.options)
    try:
        adapters, planned = change(shares)
    except Exception:
        known: Any = runtime.adapters
        replaced.hand_over(put_together(runtime.plan, weights=before, adapters=known))
        raise
    frozen = let_all_train(model, planned, runtime.mesh.pp_rank)
    made = put_together(planned, weights=shares, adapters=adapters)
    live = made.live_parameters()
    for name in frozen:
        live[name].requires_grad_(False)
    replaced.hand_over(made)
    adapters.peft_model.train(training)
    return adapters


def put_several(peft_model: Any, put_methods: Callable[[], None]) -> None:
    """Set ``add_adapter``, ``load_adapter`` and ``delete_adapter`` of PEFT's model; ``put_methods`` sets its remaining
    methods.
    """

    def changed(by: str, change: Callable[[Runtime, Adapters, LocalWeights], Any]) -> None:
        runtime = runtime_of(peft_model)
        adapters = _adapters_of(runtime, by)
        made = change_adapters(
            runtime, f"PEFT's {by}", lambda shares: change(runtime, adapters, shares)
        )
        guard_methods(peft_model, made.whole)
        put_methods()

    def add_adapter(
        adapter_name: str,
        peft_config: Any,
        low_cpu_mem_usage: bool = False,
        autocast_adapter_dtype: bool = True,
    ) -> None:
        _refuse_known(peft_model, adapter_name)
        config, source = _read_by_all(peft_model, peft_config)
        changed("add_adapter", _added(adapter_name, config, source, autocast_adapter_dtype))
        complete_config(peft_config, peft_model.peft_config[adapter_name])

    def load_adapter(
        model_id: Any,
        adapter_name: str,
        is_trainable: bool = False,
        torch_device: str | None = None,
        autocast_adapter_dtype: bool = True,
        **others: Any,
    ) -> Any:
        _refuse_arguments(others)
        config, source = _read_by_all(peft_model, str(model_id))
        if adapter_name in peft_model.peft_config:
            changed("load_adapter", _reread(adapter_name, str(model_id)))
        else:
            config.inference_mode = not is_trainable
            changed("load_adapter", _added(adapter_name, config, source, autocast_adapter_dtype))
            if is_trainable:
                peft_model.set_requires_grad(adapter_name)
        return SimpleNamespace(missing_keys=[], unexpected_keys=[])

    def delete(adapter_name: str) -> None:
        if adapter_name not in peft_model.peft_config:
            raise ConfigError(
                f"Adapter {adapter_name} does not exist: pass the name of an adapter of the model"
            )
        if len(peft_model.peft_config) == 1:
            raise ConfigError(
                f"{adapter_name!r} is the only adapter of a model that is sharded over ranks, and cannot be deleted: "
                "call unload() instead, which returns the stock model"
            )
        changed("delete_adapter", _without(adapter_name))

    peft_model.add_adapter = add_adapter
    peft_model.load_adapter = load_adapter
    peft_model.delete_adapter = delete


def _read_by_all(peft_model: Any, given: Any) -> tuple[Any, str | None]:
    """Read a config on every rank, or raise on every rank: each host reads its own files."""
    with all_or_none(runtime_of(peft_model).mesh, NOT_ADDED):
        return read_config(given)


def _adapters_of(runtime: Runtime, by: str) -> Adapters:
    adapters = runtime.adapters
    if not isinstance(adapters, Adapters):
        raise ConfigError(
            f"{by} needs a model with adapters, but this model's adapters were merged or unloaded: add adapters again "
            "with hfscale.get_peft_model"
        )
    return adapters


def _refuse_known(peft_model: Any, name: str) -> None:
    if name in peft_model.peft_config:  # PEFT's own message, which scripts may match
        raise ConfigError(
            f"Adapter with name {name!r} already exists. Use another name, or delete that adapter first "
            "(delete_adapter)"
        )


def _added(name: str, config: Any, source: str | None, autocast: bool) -> Any:
    def change(runtime: Runtime, adapters: Adapters, shares: LocalWeights) -> Any:
        return attach_adapters(
            runtime.model,
            adapters.whole,
            config,
            runtime.plan,
            runtime.mesh,
            shares.tensors,
            source=source,
            name=name,
            seed=None,
            autocast=autocast,
            fused=runtime.options.fused_adapters,
            beside=adapters,
        )

    return change


def _reread(name: str, directory: str) -> Any:
    def change(runtime: Runtime, adapters: Adapters, shares: LocalWeights) -> Any:
        with all_or_none(runtime.mesh, f"{directory} could not be loaded"):
            read = load_adapter(directory, adapters.whole, name, runtime.plan, runtime.mesh)
        for parameter, share in read.items():
            shares.tensors[parameter] = share.to(shares.tensors[parameter].dtype)
        return adapters, runtime.plan

    return change


def _without(name: str) -> Any:
    def change(runtime: Runtime, adapters: Adapters, shares: LocalWeights) -> Any:
        for adapter in runtime.plan.adapters:
            if adapter.adapter == name:
                shares.tensors.pop(adapter.name, None)
        left = [each for each in runtime.plan.adapters if each.adapter != name]
        for peft_model in (adapters.peft_model, adapters.whole):
            delete_adapter(peft_model, name)
        fused = runtime.options.fused_adapters
        return adapters, plan_with(adapters.whole, left, adapters.stock_plan, fused)

    return change


def _refuse_arguments(others: dict[str, Any]) -> None:
    given = sorted(name for name, value in others.items() if value)
    given = [name for name in given if name != "low_cpu_mem_usage"]
    if given:
        raise ConfigError(
            f"load_adapter reads each rank's shards itself and takes no {', '.join(given)}=...: leave that argument out"
        )
