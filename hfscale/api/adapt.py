"""Attach adapters to a parallelized model, and merge them into its weights."""

import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.peft import COPY
from .._compat.transformers.classes import class_name, empty_copy
from ..errors import CheckpointError, ConfigError, check_count
from ..features.adapters import (
    Adapters,
    attach_adapters,
    by_peft,
    complete_config,
    describe_coverage,
    is_known,
    merge_local_weights,
    read_config,
)
from ..features.adapters.attach import NOT_ADDED
from ..features.adapters.merge_adapters import (
    dequantized_weights,
    put_plain_modules,
    refuse_not_finite,
    refuse_tied,
    unload_local_weights,
)
from ..plan.feature_plans import OwnLossPlan
from ..train import eval_step
from ..train.distillation import evaluating
from ..train.runtime import Runtime, runtime_of
from ..train.runtime.shards import LocalWeights
from ..train.runtime.writing import all_or_none
from .assemble import assemble, take_apart
from .peft_methods import put_methods
from .samples import answer_to, reads_tokens
from .several_adapters import change_adapters, replaced_by

_SAMPLE = (2, 16)  # rows and tokens of the batch that measures the change by merging


def get_peft_model(
    model: nn.Module,
    peft_config: Any,
    adapter_name: str = "default",
    mixed: bool = False,
    autocast_adapter_dtype: bool = True,
    revision: str | None = None,
    low_cpu_mem_usage: bool = False,
    *,
    seed: int | None = None,
) -> Any:
    """Put adapters around the modules of a parallelized model; call it on every rank.

    The counterpart of PEFT's ``get_peft_model`` over shards: stock weights are frozen, and the adapter's factors start
    from the values that PEFT gives them in one process. Optimizers made before are refused at their next
    step. The model itself still works, with the adapters, in :func:`hfscale.train_step` and everywhere else.

    In one process PEFT's own function takes what hfscale does not shard: other methods, prompts, a second adapter.

    Args:
        peft_config: a PEFT config, or the path or Hub id of a saved adapter to go on training.
        adapter_name: PEFT's name for the adapter.
        mixed: let PEFT mix methods, in one process alone.
        autocast_adapter_dtype: keep factors of 16-bit weights in 32 bits.
        revision: the base model's, which the adapter's config names.
        low_cpu_mem_usage: in one process leave values to a later load, as PEFT does; ranks draw them in any case.
        seed: seed of new adapters' random values, as after ``torch.manual_seed(seed)``; by default, as in PEFT, they
            are drawn from torch's current RNG state, that of the first rank.

    Returns:
        PEFT's model around ``model``.

    Raises:
        ConfigError: over ranks, the model has adapters already, the config asks for something unknown to hfscale, or
            ``mixed`` is true; anywhere, the config matches no module.
        CheckpointError: a saved adapter does not fit the model.
    """
    runtime = runtime_of(model)
    if seed is not None:
        check_count("seed", seed, least=0)
    if not isinstance(adapter_name, str) or not adapter_name:
        raise ConfigError(f"adapter_name={adapter_name!r} is invalid: use a name, as 'default'")
    with all_or_none(runtime.mesh, NOT_ADDED):  # each host reads its own files
        config, source = read_config(peft_config)
    if revision is not None:
        _name_revision(config, revision)
    if _is_left_to_peft(runtime, config, mixed, low_cpu_mem_usage):
        around = by_peft.around(
            model,
            config,
            source,
            adapter_name,
            seed,
            mixed=mixed,
            autocast_adapter_dtype=autocast_adapter_dtype,
            low_cpu_mem_usage=low_cpu_mem_usage,
        )
        complete_config(peft_config, around.peft_config[adapter_name])
        return around
    template = empty_copy(runtime.model)
    adapters = change_adapters(
        runtime,
        "hfscale.get_peft_model",
        lambda shares: attach_adapters(
            runtime.model,
            template,
            config,
            runtime.plan,
            runtime.mesh,
            shares.tensors,
            source=source,
            name=adapter_name,
            seed=seed,
            autocast=autocast_adapter_dtype,
            fused=runtime.options.fused_adapters,
        ),
    )
    if runtime.mesh.layout.total_size > 1:
        put_methods(adapters.peft_model, runtime.model, merge_and_unload, _unload)
    complete_config(peft_config, adapters.peft_model.peft_config[adapter_name])
    return adapters.peft_model


def _name_revision(config: Any, revision: str) -> None:
    if config.revision not in (None, revision):
        warnings.warn(
            f"the PEFT config names the base's revision {config.revision!r}: it is {revision!r} from here",
            stacklevel=3,
        )
    config.revision = revision


def _is_left_to_peft(runtime: Runtime, config: Any, mixed: bool, empty: bool) -> bool:
    """Return whether PEFT's own function puts an adapter, of ``mixed`` methods or ``empty``, around a model of one
    process; over ranks, refuse methods that mix, and a second adapter.
    """
    adapts = bool(runtime.latecomers()) or runtime.adapters is not None
    if runtime.mesh.layout.total_size == 1:
        return adapts or mixed or empty or not is_known(config, runtime.plan)
    if mixed:
        raise ConfigError(
            f"mixed=True must be used in one process, got {runtime.mesh.layout.describe()}: PEFT's mixed models hold "
            "adapters of several methods, and a model over ranks has one; leave it out"
        )
    if (existing := runtime.adapters) is not None:
        raise ConfigError(
            f"{class_name(runtime.model)} has the adapter {existing.name!r} already: add another by "
            "peft_model.add_adapter(name, config), merge it first (hfscale.merge_and_unload), or load the model again"
        )
    return False


def merge_and_unload(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    quiet: bool = False,
    adapter_names: Sequence[str] | None = None,
) -> Any:
    """Merge adapters into the weights that they adapt, each rank into its shards, and remove them; collective.

    The first rank prints how much merging changed: the largest difference of the logits of a few random tokens, or of
    the loss if the model runs in stages; nothing of models that read pictures or sound.

    Args:
        dtype: the type of weights that were quantized, including those without adapters; required if there are any.
        quiet: measure and print nothing; so it is where others than the active adapters are merged.
        adapter_names: which of several adapters to merge; by default the active ones. The others are dropped.

    Returns:
        the stock model.

    Raises:
        ConfigError: the model has no adapters, or adapters around one of two tied weights, or quantized weights and no
            ``dtype`` is given.
    """
    runtime = runtime_of(model)
    if (stock := by_peft.found_around(runtime, model)) is not None:
        return stock.merge_and_unload(adapter_names=adapter_names)
    adapters = runtime.adapters
    if not isinstance(adapters, Adapters):
        raise ConfigError(
            f"{class_name(runtime.model)} has no adapters to merge: see hfscale.get_peft_model"
        )
    quantized = runtime.plan.quantized
    if quantized is not None and dtype is None:
        raise ConfigError(
            f"adapters cannot be added to weights {quantized.described} without rounding them again: pass "
            "dtype=torch.bfloat16 to merge into weights of that type, or keep the base as it is and write the adapter "
            "alone with hfscale.save_pretrained"
        )
    refuse_tied(adapters, runtime.plan)
    refuse_not_finite(runtime)
    names = _names_to_merge(adapters, adapter_names)
    before = None if quiet else _output_before(runtime, adapters, names)
    training = runtime.model.training
    wanted = [adapter for adapter in runtime.plan.adapters if adapter.adapter in names]
    merged = len({adapter.base for adapter in wanted})
    plan = adapters.stock_plan
    plain = {} if dtype is None else dequantized_weights(runtime, dtype)
    replaced = replaced_by(runtime, "hfscale.merge_and_unload")
    shares = take_apart(runtime)
    tensors = {**shares.tensors, **plain}
    if quantized is not None:
        plan = put_plain_modules(adapters, runtime, plain)
    try:
        stock, tensors = merge_local_weights(adapters, runtime, tensors, names)
    except CheckpointError:
        # Of every rank; over quantized weights, stock modules hold rounded values by now.
        if quantized is None:
            again = assemble(
                runtime.model, runtime.plan, runtime.mesh, runtime.options, shares, adapters
            )
            replaced.hand_over(again)
        raise
    replaced.hand_over(assemble(stock, plan, runtime.mesh, runtime.options, LocalWeights(tensors)))
    stock.train(training)
    if before is not None:
        what, expected = before
        logits = _sample_output(runtime_of(stock))[1]
        difference = float((logits - expected).abs().max())
        scale = float(expected.abs().max())
        if not any(runtime.mesh.ranks.values()):
            into = "" if dtype is None else f" into {str(dtype).removeprefix('torch.')}"
            print(
                f"merged the adapters of {merged} weights{into}: largest difference of the {what} "
                f"{difference:.1e} (largest of the {what} {scale:.3g})",
                file=sys.stderr,
            )
    return stock


def _names_to_merge(adapters: Adapters, asked: Sequence[str] | None) -> list[str]:
    names = list(asked or adapters.active)
    if unknown := [name for name in names if name not in adapters.names]:
        raise ConfigError(
            f"adapter_names must be of the model's, {', '.join(adapters.names)}, got {unknown[0]!r}"
        )
    return names


def _unload(model: nn.Module) -> Any:
    """Remove adapters without merging them, and return the stock model; collective. Trained copies of modules stay."""
    runtime = runtime_of(model)
    adapters = runtime.adapters
    if not isinstance(adapters, Adapters):
        raise ConfigError(
            f"{class_name(runtime.model)} has no adapters to unload: see hfscale.get_peft_model"
        )
    refuse_tied(adapters, runtime.plan, kinds=(COPY,))
    training = runtime.model.training
    replaced = replaced_by(runtime, "unload")
    shares = take_apart(runtime)
    stock, tensors = unload_local_weights(adapters, runtime, shares.tensors)
    kept = LocalWeights(tensors, shares.quantized)
    replaced.hand_over(assemble(stock, adapters.stock_plan, runtime.mesh, runtime.options, kept))
    stock.train(training)
    return stock


@torch.no_grad()
def _output_before(
    runtime: Runtime, adapters: Adapters, merged: Sequence[str]
) -> tuple[str, Tensor] | None:
    """Return what the model computes with the adapters to be ``merged``; ``None`` where others are active."""
    computes = set(merged) == set(adapters.active) and reads_tokens(runtime.model)
    return _sample_output(runtime) if computes else None


def _sample_output(runtime: Runtime) -> tuple[str, Tensor]:
    """Return the model's logits, or its loss, on a few random tokens in evaluation mode, with its name."""
    model = runtime.model
    vocabulary = int(model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, _SAMPLE, generator=generator).to(runtime.mesh.device)
    with evaluating(model):
        if runtime.plan.stages is not None:
            batch = {"input_ids": ids.repeat(int(runtime.mesh.layout.num_microbatches or 1), 1)}
            if runtime.plan.feature(OwnLossPlan) is not None:  # its labels are not tokens
                _, output = eval_step(
                    model, batch, lambda out, _: (0.0 * out.logits.sum(), 1.0), return_outputs=True
                )
                return "logits", output.logits.double().cpu()
            return "loss", eval_step(
                model, {**batch, "labels": batch["input_ids"]}
            ).detach().clone()
        return "logits", answer_to(model, ids).double().cpu()


def coverage_report(model: nn.Module) -> str:
    """Return how many parameters have adapters, in lines like ``100.0% of the parameters of layers have adapters``.

    Raises:
        ConfigError: the model has no adapters.
    """
    runtime = runtime_of(model)
    if runtime.adapters is None:
        raise ConfigError(
            f"{class_name(runtime.model)} has no adapters: see hfscale.get_peft_model"
        )
    return describe_coverage(runtime.plan)
