"""The table of contents: from a stock model and a layout to a model that trains, in order."""

import inspect
import os
from collections.abc import Iterable
from copy import copy
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from ._host.transformers.classes import class_name, is_distributed_by_host
from ._host.transformers.loading import loading_arguments
from .adapters import attach_adapters, read_config, wrapped_by_peft
from .assemble import assemble
from .checkpoint import load_pretrained
from .checkpoint.load import materialize_buffers
from .config import ParallelConfig
from .errors import CheckpointError, ConfigError
from .mesh import build_mesh
from .parallel.data import MIXED_PRECISIONS
from .parallel.experts import RoutingConfig
from .parallel.pipeline import check_stages, leave_out, stage_places
from .parallel.tensor import cut_parameters
from .plan import Plan
from .planner.build import build_plan
from .quantization.install import check_quantization, plan_quantized, stored_quantization
from .runtime import find_runtime
from .runtime.initialize import initialize_local_weights
from .runtime.local_weights import LocalWeights

# Arguments of from_pretrained that distribute a model by other means.
_EXCLUSIVE = ("device_map", "distributed_config", "tp_plan", "tp_size", "device_mesh", "max_memory", "offload_folder")
# Arguments that choose which files to read a config from, as opposed to what it says.
_CODE = ("trust_remote_code", "code_revision")
_HUB = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "trust_remote_code")


def from_pretrained(
    path: str | os.PathLike[str],
    *,
    parallel: ParallelConfig | None = None,
    auto_class: Any = AutoModelForCausalLM,
    mixed_precision: str = "no",
    routing: RoutingConfig | None = None,
    peft_config: Any = None,
    seed: int = 0,
    **hf_kwargs: Any,
) -> Any:
    """Load a Hugging Face checkpoint, sharded, on this rank's device.

    Call it on every rank. Each rank reads only its slices.

    Args:
        path: a directory or a Hub id, as for ``AutoModel.from_pretrained``.
        parallel: the layout; one process by default.
        auto_class: the Auto class (or model class) to load with.
        mixed_precision: ``"no"``, or ``"bf16"``: compute in bfloat16 over weights kept in their own type.
        routing: how tokens find their experts, and what keeps those evenly busy; the model's own router by default.
        peft_config: a PEFT config, whose adapters are put around the model's modules, or the path or Hub id of a saved
            adapter to go on training; :func:`hfscale.save_pretrained` then writes the adapter.
        seed: for parameters that the checkpoint does not have, and for new adapters.
        hf_kwargs: whatever ``from_pretrained`` takes, except what distributes the model.

    Returns:
        an instance of the stock class, in evaluation mode like the host's.

    Raises:
        ConfigError, PlanError, MeshError, CheckpointError: before any weight is read, except for damaged files.
    """
    quantization = hf_kwargs.get("quantization_config")
    others = {key: value for key, value in hf_kwargs.items() if key != "quantization_config"}
    path, layout = str(path), _checked(parallel, mixed_precision, others, routing)
    check_quantization(quantization)
    adapting = None if peft_config is None else read_config(peft_config)
    config, rest = _load_config(path, others)
    _refuse_unknown(rest, auto_class, config)
    code = {key: hf_kwargs[key] for key in _CODE if key in hf_kwargs}
    planned = plan(
        config, layout, auto_class=auto_class, dtype=_as_dtype(hf_kwargs), quantization_config=quantization, **code
    )
    if (stored := stored_quantization(config)) is not None:
        hf_kwargs = {**hf_kwargs, "config": config, "quantization_config": stored}
    mesh = build_mesh(layout, planned.copies, planned.ties, planned.neighbours)
    model, shares, missing = load_pretrained(auto_class, path, planned, mesh, hf_kwargs)
    if missing:
        template = _on_meta(auto_class, model.config, {"dtype": model.dtype, **code})
        fresh, _ = initialize_local_weights(template, planned, mesh, seed, wanted=lambda name: name in missing)
        shares.tensors.update(fresh)
    materialize_buffers(model, {}, mesh.device)
    adapters = None
    if adapting is not None:
        template = _on_meta(auto_class, model.config, {"dtype": model.dtype, **code})
        adapters, planned = attach_adapters(
            model, template, adapting[0], planned, mesh, shares.tensors, source=adapting[1], seed=seed
        )
    assemble(model, planned, mesh, mixed_precision, routing, shares, adapters)
    return model


def from_config(
    config: PreTrainedConfig,
    *,
    parallel: ParallelConfig | None = None,
    auto_class: Any = AutoModelForCausalLM,
    mixed_precision: str = "no",
    routing: RoutingConfig | None = None,
    peft_config: Any = None,
    seed: int = 0,
    **hf_kwargs: Any,
) -> Any:
    """A model with random weights that are the same for every layout.

    The weights follow the host's own initialization, with a seed per layer made of ``seed`` and its name, so no rank
    ever holds more than its share and one whole layer. Arguments, result and errors are those of
    :func:`from_pretrained`; the model is in training mode, like the host's.
    """
    layout = _checked(parallel, mixed_precision, hf_kwargs, routing)
    adapting = None if peft_config is None else read_config(peft_config)
    _refuse_unknown(hf_kwargs, auto_class, config)
    model = _on_meta(auto_class, config, hf_kwargs)
    planned = _planned(model, layout)
    mesh = build_mesh(layout, planned.copies, planned.ties, planned.neighbours)
    template = _on_meta(auto_class, config, hf_kwargs)
    leave_out(model, planned, mesh.ranks["pp"])
    cut_parameters(model, planned, mesh)
    tensors, buffers = initialize_local_weights(template, planned, mesh, seed)
    shares = LocalWeights(tensors)
    materialize_buffers(model, buffers, mesh.device)
    adapters = None
    if adapting is not None:
        template = _on_meta(auto_class, config, hf_kwargs)
        adapters, planned = attach_adapters(
            model, template, adapting[0], planned, mesh, shares.tensors, source=adapting[1], seed=seed
        )
    assemble(model, planned, mesh, mixed_precision, routing, shares, adapters)
    return model


def parallelize(
    model: nn.Module,
    parallel: ParallelConfig | None = None,
    *,
    mixed_precision: str = "no",
    routing: RoutingConfig | None = None,
) -> Any:
    """Shard, in place, a whole stock model that is in memory and the same on every rank; returns it.

    Raises:
        ConfigError: the model is distributed already, or has adapters.
        PlanError, MeshError: the layout does not fit it, or the processes that were started.
    """
    layout = _checked(parallel, mixed_precision, {}, routing)
    reason = "hfscale already parallelized it" if find_runtime(model) else is_distributed_by_host(model)
    if reason:
        raise ConfigError(
            f"{class_name(model)} cannot be parallelized: {reason}. Load it plainly, or with hfscale.from_pretrained"
        )
    if wrapped_by_peft(model):
        raise ConfigError(
            f"{class_name(model)} has adapters of PEFT's, which the plan of a stock model knows nothing of: "
            "parallelize the model without them, and then call hfscale.get_peft_model(model, peft_config); for saved "
            "ones, hfscale.from_pretrained(path, peft_config=directory)"
        )
    planned = _planned(model, layout)
    mesh = build_mesh(layout, planned.copies, planned.ties, planned.neighbours)
    whole = list(model.modules())
    leave_out(model, planned, mesh.ranks["pp"])
    _give_up_memory(whole, kept=model)
    cut_parameters(model, planned, mesh)
    model.to(mesh.device)
    assemble(model, planned, mesh, mixed_precision, routing, None)
    return model


def plan(
    source: str | os.PathLike[str] | PreTrainedConfig,
    parallel: ParallelConfig | None = None,
    *,
    auto_class: Any = AutoModelForCausalLM,
    **hf_kwargs: Any,
) -> Plan:
    """What would become of a model under a layout: no weights, no process group, no GPU. ``print`` it for a table.

    Raises:
        PlanError: the layout does not fit; every problem is listed with the valid values.
    """
    layout, quantization = parallel or ParallelConfig(), hf_kwargs.pop("quantization_config", None)
    check_quantization(quantization)
    if isinstance(source, PreTrainedConfig):
        config, rest = source, hf_kwargs
    else:
        config, rest = _load_config(str(source), hf_kwargs)
    config = copy(config)  # which is to forget how weights are stored
    stored = stored_quantization(config)
    if stored is not None and quantization is not None:
        raise ConfigError("quantization_config= is given, and the checkpoint is quantized already: leave it out")
    model = _on_meta(auto_class, config, rest)
    return plan_quantized(_planned(model, layout), model, stored or quantization, stored is not None)


def _planned(model: nn.Module, layout: ParallelConfig) -> Plan:
    """The plan; where a schedule is a file, stages are where that says."""
    planned = build_plan(model, layout, stage_places(layout))
    check_stages(planned)
    return planned


def _give_up_memory(modules: Iterable[nn.Module], kept: nn.Module) -> None:
    """Empty those of ``modules`` that are no longer in ``kept``: stand-ins still ask them for their attributes."""
    staying = set(kept.modules())
    for module in modules:
        if module in staying:
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None:  # of a tied tensor, another module may keep the memory
                module._parameters[name] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to("meta")


def _checked(
    parallel: ParallelConfig | None, mixed_precision: str, kwargs: dict[str, Any], routing: RoutingConfig | None
) -> ParallelConfig:
    if routing is not None and not isinstance(routing, RoutingConfig):
        raise ConfigError(f"routing={routing!r} is no such choice: pass hfscale.RoutingConfig(balance_loss=...)")
    if parallel is not None and not isinstance(parallel, ParallelConfig):
        raise ConfigError(f"parallel={parallel!r} is not a layout: pass hfscale.ParallelConfig(tp_size=...)")
    clashing = [name for name in _EXCLUSIVE if kwargs.get(name) is not None]
    if clashing:
        raise ConfigError(
            f"{', '.join(clashing)} would distribute the model a second way: leave it out, and give hfscale the layout "
            "as parallel=hfscale.ParallelConfig(...)"
        )
    if kwargs.get("quantization_config") is not None:
        raise ConfigError(
            "from_config(quantization_config=...) would quantize random weights: quantize those of a checkpoint, with "
            "hfscale.from_pretrained(path, quantization_config=...)"
        )
    if mixed_precision not in MIXED_PRECISIONS:
        raise ConfigError(f"mixed_precision={mixed_precision!r} is unknown: use {', '.join(MIXED_PRECISIONS)}")
    return parallel or ParallelConfig()


def _load_config(path: str, kwargs: dict[str, Any]) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The config as the host would load it, and the arguments it did not use."""
    # The Hub knows nothing of what is written like a path; its own message would speak of repository names.
    if not os.path.exists(path) and (os.path.isabs(path) or path.startswith((".", "~")) or path.count("/") > 1):
        raise CheckpointError(
            f"{path} does not exist: give a directory with a config.json, or a Hub id like owner/name"
        )
    taken = {key: value for key, value in kwargs.items() if key not in ("dtype", "torch_dtype")}
    config, rest = AutoConfig.from_pretrained(path, return_unused_kwargs=True, **taken)
    rest = {key: value for key, value in rest.items() if key not in _HUB}
    return config, {**rest, **{key: kwargs[key] for key in ("dtype", "torch_dtype", *_CODE) if key in kwargs}}


def _refuse_unknown(kwargs: Iterable[str], auto_class: Any, config: PreTrainedConfig) -> None:
    """Of arguments that no field of the config has taken: which nobody would."""
    mapping = getattr(auto_class, "_model_mapping", None)
    if mapping is not None and type(config) not in mapping:
        return  # a class that comes with the checkpoint
    kind = auto_class if mapping is None else mapping[type(config)]
    kinds = kind if isinstance(kind, list | tuple) else [kind]
    taken = {name for kind in kinds for name in inspect.signature(kind.__init__).parameters}
    ours = inspect.signature(from_pretrained).parameters
    known = {*ours, *taken, *_HUB, *_CODE, *_EXCLUSIVE, *loading_arguments()}
    for name in kwargs:
        if name not in known:
            close = get_close_matches(name, sorted(known), n=1)
            hint = f"did you mean {close[0]}?" if close else f"hfscale takes {', '.join(list(ours)[1:-1])}"
            raise ConfigError(
                f"{name}= is no argument of hfscale's, of transformers' or of {kinds[0].__name__}: {hint}"
            )


def _as_dtype(kwargs: dict[str, Any]) -> Any:
    dtype = kwargs.get("dtype", kwargs.get("torch_dtype"))
    return None if dtype == "auto" else dtype


def _on_meta(auto_class: Any, config: PreTrainedConfig, kwargs: dict[str, Any]) -> Any:
    """The stock model without memory."""
    is_auto = hasattr(auto_class, "from_config")
    build = auto_class.from_config if is_auto else auto_class._from_config
    kwargs = {key: value for key, value in kwargs.items() if value is not None and (is_auto or key not in _CODE)}
    with torch.device("meta"):
        return build(config, **kwargs)
