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
from ..train.distillation import evaluating
from ..train.runtime import Runtime, runtime_of
from ..train.runtime.shards import LocalWeights
from ..train.runtime.writing import all_or_none
from ..train.step import eval_step
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
    """Add PEFT adapters to a parallelized model; call it on every rank.

    This is the counterpart of PEFT's ``get_peft_model`` for sharded models: stock weights are frozen, and the adapter's
    factors start from the values that PEFT gives them in one process. The next step of an optimizer that was created
    before this call raises an error. ``model`` itself, now with the adapters, still works in :func:`hfscale.train_step`
    and all other functions.

    In one process, PEFT's own function adds the adapters that hfscale cannot shard: other methods, prompts, a second
    adapter.

    Args:
        peft_config: a PEFT config, or the path or Hub id of a saved adapter to continue training.
        adapter_name: PEFT's name for the adapter.
        mixed: let PEFT mix adapter methods; possible only in one process.
        autocast_adapter_dtype: keep factors of 16-bit weights in 32 bits.
        revision: the base model's revision, which is written into the adapter's config.
        low_cpu_mem_usage: in one process, leave the factors without values for a later load, like PEFT does; over
            several ranks the factors are always initialized.
        seed: seed of new adapters' random values, as after ``torch.manual_seed(seed)``; by default, as in PEFT, the
            values are drawn from torch's current RNG state (of the first rank).

    Returns:
        PEFT's model around ``model``.

    Raises:
        ConfigError: over several ranks, the model already has adapters, the config uses an option that hfscale does not
            support, or ``mixed`` is true; in any layout, the config matches no module.
        CheckpointError: a saved adapter does not fit the model.
    """
    runtime = runtime_of(model)
    if seed is not None:
        check_count("seed", seed, least=0)
    if not isinstance(adapter_name, str) or not adapter_name:
        raise ConfigError(
            f"adapter_name={adapter_name!r} must be a string that is not empty: use a name, such as 'default'"
        )
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
    if not runtime.is_alone:
        put_methods(adapters.peft_model, runtime.model, merge_and_unload, _unload)
    complete_config(peft_config, adapters.peft_model.peft_config[adapter_name])
    return adapters.peft_model


def _name_revision(config: Any, revision: str) -> None:
    if config.revision not in (None, revision):
        warnings.warn(
            f"the PEFT config names revision {config.revision!r} of the base checkpoint, but the model was loaded from "
            f"revision {revision!r}: the saved config will name {revision!r}, so load the other revision if the "
            "adapter needs it",
            stacklevel=3,
        )
    config.revision = revision


def _is_left_to_peft(runtime: Runtime, config: Any, mixed: bool, empty: bool) -> bool:
    """Return whether PEFT's own function adds the adapter, because the model runs in one process and the adapter is
    ``mixed``, ``empty`` or of a method that hfscale does not shard. Over several ranks, raise :class:`ConfigError` for
    ``mixed`` methods and for a second adapter.
    """
    adapts = bool(runtime.latecomers()) or runtime.adapters is not None
    if runtime.is_alone:
        return adapts or mixed or empty or not is_known(config, runtime.plan)
    if mixed:
        raise ConfigError(
            f"mixed=True must be used in one process, got {runtime.mesh.layout.describe()}: a PEFT mixed model holds "
            "adapters of several methods, but a model over several ranks can have only one method; leave mixed=True "
            "out"
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

    The first rank prints how much merging changed the model: the largest difference of the logits of a few random
    tokens, or the difference of the loss if the model has pipeline stages. Nothing is printed for models that read
    pictures or sound.

    Args:
        dtype: the dtype to which all quantized weights are dequantized, even weights without adapters; required if the
            model has quantized weights.
        quiet: measure and print nothing; implied if adapters other than the active ones are merged.
        adapter_names: the adapters to merge, the active ones by default. All remaining adapters are dropped.

    Returns:
        the stock model.

    Raises:
        ConfigError: the model has no adapters, only one of two tied weights has an adapter, adapted layers are replicas
            of each other, or weights are quantized and no ``dtype`` is given.
    """
    runtime = runtime_of(model)
    if (stock := by_peft.found_around(runtime, model)) is not None:
        return by_peft.merged(stock, adapter_names)
    adapters = runtime.adapters
    if not isinstance(adapters, Adapters):
        raise ConfigError(
            f"{class_name(runtime.model)} has no adapters to merge: add adapters with hfscale.get_peft_model first"
        )
    quantized = runtime.plan.quantized
    if quantized is not None and dtype is None:
        raise ConfigError(
            f"merging adapters into weights {quantized.described} would round the merged weights again: pass "
            "dtype=torch.bfloat16 to merge into dequantized bfloat16 weights, or keep the base as it is and write the "
            "adapter alone with hfscale.save_pretrained"
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
        # Every rank is here. Quantized weights are not undone: stock modules already hold rounded values.
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
        if runtime.mesh.is_first:
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
            f"adapter_names must be names of the model's adapters ({', '.join(adapters.names)}), got {unknown[0]!r}: "
            "pass only such names"
        )
    return names


def _unload(model: nn.Module) -> Any:
    """Remove adapters without merging them, and return the stock model; collective. Trained copies
    (``modules_to_save``) stay.
    """
    runtime = runtime_of(model)
    adapters = runtime.adapters
    if not isinstance(adapters, Adapters):
        raise ConfigError(
            f"{class_name(runtime.model)} has no adapters to unload: add adapters with hfscale.get_peft_model first"
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
    """Return the model's output on a few random tokens, with the output's name, before the adapters ``merged`` are
    merged. Return ``None`` if other adapters are active, or if the model reads no tokens.
    """
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
            f"{class_name(runtime.model)} has no adapters: add adapters with hfscale.get_peft_model first"
        )
    return describe_coverage(runtime.plan)
