"""Turn a stock model and a layout into a model that trains: the order of all steps, in one place."""

import copy
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import GradScalerKwargs
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from .._compat.peft import adapted_model, is_a_hosts, wrapped_by_peft
from .._compat.transformers.classes import class_name, is_distributed_by_host, model_class
from .._compat.transformers.loading import FILE
from ..checkpoint.stored_forms.scheme import check_asked_form
from ..config.float8 import Float8Config
from ..config.memory import MemoryConfig
from ..config.options import Options
from ..config.parallel import ParallelConfig
from ..config.routing import RoutingConfig
from ..distributed.process_groups import build_mesh
from ..errors import ConfigError, check_count, check_path
from ..features.added_layers import asked_for
from ..features.quantization.plan import check_quantization, check_trainable, split_quantization
from ..plan import Plan
from ..train.runtime import find_runtime, runtime_of
from ..train.runtime.handover import Replaced
from ..train.watchdog import watch_by_default
from . import arguments
from .assemble import assemble
from .located import located, reachable
from .sources import Adapted, FromCheckpoint, FromSeed, InMemory, Outline, Source

Adapter = tuple[Any, str | None]  # a PEFT config, and the saved adapter's path, if any


def build(
    source: Source,
    layout: ParallelConfig,
    options: Options,
    adapter: Adapter | None = None,
    seed: int = 0,
) -> Any:
    """Build the model: plan, form the mesh, load this rank's shards, attach adapters, install the features of the
    layout.
    """
    options.check_fits(layout)
    plan = source.plan(layout, options)
    check_trainable(plan, adapter is not None)
    mesh = build_mesh(layout, plan.replicas, plan.ties, plan.neighbours)
    options.check_device(mesh.device)
    if options.use_liger_kernel is not False:
        from ..features.precision.liger_kernels import check_kernels

        check_kernels(options.use_liger_kernel, plan.family, mesh.device)
    replaced = Replaced(source.named_parameters(), "hfscale.parallelize", with_gradients=True)
    model, weights = source.load(plan, mesh)
    if weights is not None:
        plan = weights.plan or plan
    attached = None
    left_to_peft = False
    if adapter is not None:
        from ..features import adapters

        config, saved = adapter
        left_to_peft = layout.total_size == 1 and not adapters.is_known(config, plan)
        if not left_to_peft:
            assert weights is not None  # a model in memory
            assert not isinstance(source, InMemory)  # gets its adapters later, by get_peft_model
            attached, plan = adapters.attach_adapters(
                model,
                source.template(model),
                config,
                plan,
                mesh,
                weights.tensors,
                source=saved,
                seed=seed,
                fused=options.fused_adapters,
            )
    replaced.hand_over(assemble(model, plan, mesh, options, weights, attached))
    watch_by_default(mesh)
    return adapters.by_peft.around(model, config, saved, seed=seed) if left_to_peft else model


def _adapter(peft_config: Any) -> Adapter | None:
    if peft_config is None:
        return None
    from ..features.adapters import read_config

    return read_config(peft_config)


def from_pretrained(
    path: str | os.PathLike[str],
    *,
    parallel: ParallelConfig | None = None,
    auto_class: Any = AutoModelForCausalLM,
    mixed_precision: str = "no",
    routing: RoutingConfig | None = None,
    memory: MemoryConfig | None = None,
    loss_scaling: GradScalerKwargs | None = None,
    float8: Float8Config | None = None,
    use_liger_kernel: bool | Mapping[str, bool] = False,
    mtp_loss_weight: float | None = None,
    compile: bool | str = False,
    fused_adapters: bool = True,
    peft_config: Any = None,
    resize_token_embeddings: int | None = None,
    seed: int = 0,
    **hf_kwargs: Any,
) -> Any:
    """Load a Hugging Face checkpoint, sharded, on this rank's device. Call it on every rank; each rank reads only its
    shards.

    Args:
        path: a directory or a Hub id, as for ``AutoModel.from_pretrained``, or a GGUF file.
        parallel: the layout; one process by default.
        auto_class: the Auto class (or model class) to load with, or its name in transformers.
        mixed_precision: ``"no"``, or compute in ``"bf16"`` or ``"fp16"`` while weights keep their dtype;
            ``"bf16_params"`` casts parameters where they are used, so that hidden states are in bfloat16, too;
            ``"fp8"`` is ``"bf16"`` with matrix products in 8 bits. ``"fp16"`` scales the loss; after an overflow, the
            step has no gradients.
        routing: the router of mixture-of-experts layers and its balancing; the model's own router by default.
        memory: activation checkpointing, offloading to the CPU, and activations in 8 bits; none by default.
        loss_scaling: scaling of the loss under ``"fp16"``; torch's defaults by default.
        float8: scaling of matrix products under ``"fp8"``, and modules to exclude; tensorwise scaling by default.
        use_liger_kernel: Liger's kernels for norms, gated activations and rotary embeddings; or ``{"rope": False}``.
        mtp_loss_weight: weight of the loss of multi-token-prediction layers, such as 0.1; ``None``: the layers do not
            train.
        compile: compile each dense layer separately at its first forward pass (seconds, once); ``"auto"``: only on GPUs
            that Triton supports; or the name of a torch.compile backend.
        fused_adapters: compute LoRA with one fused operator, which has PEFT's arithmetic and needs less memory and
            time.
        peft_config: a PEFT config, or the path or Hub id of an adapter to continue training; saves then contain only
            adapters.
        resize_token_embeddings: ``len(tokenizer)``; rows of new tokens are the mean of the old rows, in the head, too.
        seed: seed of parameters that the checkpoint does not have, and of new adapters.
        hf_kwargs: further arguments of transformers' ``from_pretrained``; ``quantization_config="as_stored"`` keeps
            quantized weights in their stored bytes.

    Returns:
        an instance of the stock class, in evaluation mode as in transformers. For an adapter that hfscale does not
        shard, such as a prompt, PEFT's model around this instance is returned (only in one process).

    Raises:
        ConfigError, PlanError, MeshError, CheckpointError: an argument, the layout, the processes or the checkpoint are
        wrong. All but damaged files are detected before any weight is read.
    """
    layout = arguments.check_layout(parallel, hf_kwargs)
    auto_class = model_class(auto_class)
    options = Options(
        mixed_precision=mixed_precision,
        routing=routing,
        memory=memory,
        loss_scaling=loss_scaling,
        float8=float8,
        use_liger_kernel=use_liger_kernel,
        mtp_loss_weight=mtp_loss_weight,
        compile=compile,
        fused_adapters=fused_adapters,
    )
    check_count("seed", seed, least=0)
    given = str(path)
    path, hf_kwargs = located(path, hf_kwargs)
    arguments.check_place(path, hf_kwargs.get("subfolder") or "")
    hf_kwargs = reachable(str(path), hf_kwargs)
    quantization = hf_kwargs.get("quantization_config")
    adapter = _adapter(peft_config)
    config, rest = arguments.load_config(
        str(path), {k: v for k, v in hf_kwargs.items() if k != "quantization_config"}
    )
    arguments.refuse_unknown(
        rest, auto_class, config, inspect.signature(from_pretrained).parameters
    )
    named = {"dtype": arguments.known_dtype(hf_kwargs), **arguments.code_arguments(hf_kwargs)}
    outline, resized = _outline(config, auto_class, named, quantization, options).resized(
        resize_token_embeddings
    )
    if outline.config is not config:
        hf_kwargs = arguments.arguments_with_config(
            hf_kwargs, rest, outline.config, outline.quantization
        )
    source = FromCheckpoint(outline, seed, str(path), hf_kwargs, resized)
    # For a file on the Hub: the path is in a cache that other machines do not have.
    if FILE in hf_kwargs and not Path(given).exists():
        source.call(given)
    return build(source, layout, options, adapter, seed)


def from_config(
    config: PreTrainedConfig,
    *,
    parallel: ParallelConfig | None = None,
    auto_class: Any = AutoModelForCausalLM,
    mixed_precision: str = "no",
    routing: RoutingConfig | None = None,
    memory: MemoryConfig | None = None,
    loss_scaling: GradScalerKwargs | None = None,
    float8: Float8Config | None = None,
    use_liger_kernel: bool | Mapping[str, bool] = False,
    mtp_loss_weight: float | None = None,
    compile: bool | str = False,
    fused_adapters: bool = True,
    peft_config: Any = None,
    seed: int = 0,
    **hf_kwargs: Any,
) -> Any:
    """Build a model with random weights that are the same for every layout.

    Weights follow the class's own initialization, with a seed per layer that is derived from ``seed`` and the layer's
    name. A rank thus never holds more than its shards and one full layer. Arguments, result and errors are the same as
    in :func:`from_pretrained`, but the model is in training mode, as in transformers.
    """
    layout = arguments.check_layout(parallel, hf_kwargs)
    auto_class = model_class(auto_class)
    options = Options(
        mixed_precision=mixed_precision,
        routing=routing,
        memory=memory,
        loss_scaling=loss_scaling,
        float8=float8,
        use_liger_kernel=use_liger_kernel,
        mtp_loss_weight=mtp_loss_weight,
        compile=compile,
        fused_adapters=fused_adapters,
    )
    if hf_kwargs.get("quantization_config") is not None:
        raise ConfigError(
            "from_config(quantization_config=...) would quantize random weights: quantize a checkpoint's weights "
            "instead, with hfscale.from_pretrained(path, quantization_config=...)"
        )
    check_count("seed", seed, least=0)
    adapter = _adapter(peft_config)
    if not isinstance(config, PreTrainedConfig):
        raise ConfigError(
            f"config={_shown(config)} must be a config of transformers: pass one (LlamaConfig(...), or "
            "AutoConfig.from_pretrained(path)), or load weights with hfscale.from_pretrained(path)"
        )
    arguments.known_dtype(hf_kwargs)
    arguments.refuse_unknown(
        hf_kwargs, auto_class, config, inspect.signature(from_config).parameters
    )
    arguments.check_sizes(config)
    outline = Outline(config, auto_class, hf_kwargs, added=asked_for(options))
    return build(FromSeed(outline, seed), layout, options, adapter, seed)


def parallelize(
    model: nn.Module,
    parallel: ParallelConfig | None = None,
    *,
    mixed_precision: str = "no",
    routing: RoutingConfig | None = None,
    memory: MemoryConfig | None = None,
    loss_scaling: GradScalerKwargs | None = None,
    float8: Float8Config | None = None,
    use_liger_kernel: bool | Mapping[str, bool] = False,
    compile: bool | str = False,
    fused_adapters: bool = True,
) -> Any:
    """Shard a full stock model in place, and return it; the model must be in memory with the same values on every rank.

    Raises:
        ConfigError: the model is already distributed, or has adapters and the layout has several ranks.
        PlanError: the layout does not fit the model.
        MeshError: the layout does not fit the processes that were started.
    """
    layout = arguments.check_layout(parallel, {})
    options = Options(
        mixed_precision=mixed_precision,
        routing=routing,
        memory=memory,
        loss_scaling=loss_scaling,
        float8=float8,
        use_liger_kernel=use_liger_kernel,
        compile=compile,
        fused_adapters=fused_adapters,
    )
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"parallelize takes a model of transformers, got {_shown(model)}: load the model first"
        )
    reason = (
        "hfscale already parallelized it"
        if find_runtime(model)
        else is_distributed_by_host(model, layout.total_size > 1)
    )
    if not reason and not is_a_hosts(model):
        raise ConfigError(
            f"parallelize takes a model of transformers (a PreTrainedModel), and got {class_name(model)}: train other "
            "modules with accelerate, or parallelize the inner transformers model before you wrap it"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        reason = reason or "some of its weights are on the meta device and have no values to shard"
    if reason:
        raise ConfigError(
            f"{class_name(model)} cannot be parallelized: {reason}. Load the model again with its full weights and not "
            "yet distributed, or use hfscale.from_pretrained"
        )
    from .._compat.transformers.gguf import forget_gguf

    forget_gguf(model)
    if not wrapped_by_peft(model):
        return build(InMemory(model), layout, options)
    if layout.total_size > 1:
        raise ConfigError(
            f"{class_name(model)} already has PEFT adapters, which cannot be sharded over {layout.describe()}: "
            "parallelize the model without them, and then call hfscale.get_peft_model(model, peft_config); for a "
            "saved adapter, call hfscale.from_pretrained(path, peft_config=directory)"
        )
    build(Adapted(adapted_model(model)), layout, options)
    runtime_of(model)  # from here on, the runtime tracks wrappers around the model
    return model


def plan(
    source: str | os.PathLike[str] | PreTrainedConfig,
    parallel: ParallelConfig | None = None,
    *,
    auto_class: Any = AutoModelForCausalLM,
    mixed_precision: str = "no",
    memory: MemoryConfig | None = None,
    float8: Float8Config | None = None,
    mtp_loss_weight: float | None = None,
    compile: bool | str = False,
    fused_adapters: bool = True,
    peft_config: Any = None,
    **hf_kwargs: Any,
) -> Plan:
    """Plan a model under a layout, without weights, process group or GPU. ``print`` the plan for a table.

    The plan includes the adapters of ``peft_config``, except adapters that PEFT's own functions add in one process.

    Raises:
        ConfigError: hfscale does not support an argument, the adapters or the quantization, or the adapters match no
            module.
        PlanError: the layout does not fit the model; the message lists every problem with its valid values.
    """
    layout = arguments.check_layout(parallel, hf_kwargs)
    auto_class = model_class(auto_class)
    options = Options(
        mixed_precision=mixed_precision,
        memory=memory,
        float8=float8,
        mtp_loss_weight=mtp_loss_weight,
        compile=compile,
        fused_adapters=fused_adapters,
    )
    quantization = hf_kwargs.pop("quantization_config", None)
    if isinstance(source, PreTrainedConfig):
        config = source
        rest = hf_kwargs
    else:
        check_path("source", source)
        config, rest = arguments.load_config(str(source), hf_kwargs)
    arguments.known_dtype(rest)
    arguments.refuse_unknown(rest, auto_class, config, inspect.signature(plan).parameters)
    outline = _outline(config, auto_class, rest, quantization, options)
    planned = outline.plan(layout, options)
    check_trainable(planned, peft_config is not None)
    if peft_config is None:
        return planned
    from ..features.adapters import is_known, plan_with_adapters, read_config

    adapter, saved = read_config(peft_config)
    if layout.total_size == 1 and not is_known(adapter, planned):
        return planned
    template = copy.deepcopy(outline.model)
    return plan_with_adapters(template, adapter, planned, saved is None, fused_adapters)


def _shown(given: object) -> str:
    return repr(given) if isinstance(given, str | int | None) else f"a {type(given).__name__}"


def _outline(
    config: PreTrainedConfig,
    auto_class: Any,
    kwargs: dict[str, Any],
    quantization: Any,
    options: Options,
) -> Outline:
    arguments.check_sizes(config)
    quantization = check_asked_form(config, quantization)
    check_quantization(quantization)
    config, stored = split_quantization(config)
    if stored is not None and quantization is not None:
        raise ConfigError(
            "quantization_config= was given for a checkpoint that is quantized already: leave quantization_config out"
        )
    return Outline(
        config,
        auto_class,
        kwargs,
        stored or quantization,
        stored is not None,
        added=asked_for(options),
    )
