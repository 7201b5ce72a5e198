"""Refuse options of a Trainer that cannot work with a parallelized model, before anything is built or trained.

Every function raises :class:`~hfscale.ConfigError` with a message that names the option and an alternative.
"""

import os
from contextlib import nullcontext
from typing import Any

from torch import nn
from transformers import DataCollatorWithFlattening

from ..._compat import liger
from ..._compat.torch_device import accelerators
from ..._compat.transformers.classes import class_name, is_causal_lm
from ..._compat.transformers.trainer import count_processes_on_cpu, has_stock_loss, use_one_gpu
from ..._compat.trl import DistillationHooks, distils, has_engine
from ...config.environment import started_processes
from ...config.options import Options
from ...config.parallel import UNCUT_SEQUENCES, ParallelConfig
from ...errors import ConfigError
from ...parallel.experts.part import ExpertRouting
from ...plan.feature_plans import offloaded, refuse_aside
from ...train.packed_rows.guard import check_packed_rows
from ...train.runtime import Runtime
from .seams import compiler_of
from .trainer_batches import blank_batches, rebalances
from .trainer_optimizers import check_optimizer, optimizer_name

_OF_SEVERAL_RANKS = frozenset(
    {"auto_find_batch_size", "neftune_noise_alpha", "eval_use_gather_object"}
)
_SHARDS = "would shard the model a second time: use hfscale.ParallelConfig(dp_shard_size=...)"
_REFUSED = {
    "torch_compile_mode": "is for full models, and most modes record CUDA graphs, which reuse the addresses of one "
    "batch: leave it out; torch_compile=True compiles each layer in torch's default mode",
    "fsdp": _SHARDS,
    "deepspeed": _SHARDS,
    "parallelism_config": "would shard the model a second time: give the layout to hfscale.from_pretrained(parallel=)",
    "auto_find_batch_size": "restarts only the rank that ran out of memory: set per_device_train_batch_size",
    "neftune_noise_alpha": "adds noise that each rank draws by itself, so ranks with one batch would not "
    "share it, and ranks with other batches would draw other noise than one process: leave it out",
    "fp16_full_eval": "casts weights that are sharded: leave it out",
    "bf16_full_eval": "casts weights that are sharded: leave it out",
    "eval_use_gather_object": "gathers over all processes, even processes that share a batch: leave it out",
    "enable_jit_checkpoint": "saves on each rank when that rank gets a signal, so ranks signalled at different steps "
    "would wait for each other: leave it out, and call hfscale.preempted(model) in a "
    "callback's on_step_end, on all ranks: if it returns True, set "
    "control.should_save = control.should_training_stop = True",
    "save_on_each_node": "writes files on every node, but here only the first rank writes files: save to a directory "
    "that all nodes see",
}


def check_run(arguments: Any) -> None:
    """Check ``TrainingArguments``, and correct their number of processes on CPUs."""
    _check_arguments(arguments)
    check_optimizer(arguments)
    processes = started_processes()
    if arguments.world_size != processes and not accelerators().is_available():
        count_processes_on_cpu(arguments)
    if arguments.world_size != processes:
        raise ConfigError(
            f"TrainingArguments sees {arguments.world_size} process(es), but {processes} were started: create "
            "TrainingArguments, and Accelerate's states (such as accelerate.PartialState), only after the process "
            "group is initialized"
        )
    use_one_gpu(arguments)


def _check_arguments(arguments: Any) -> None:
    alone = started_processes() == 1  # in one process, stock code runs unchanged
    for name, why in _REFUSED.items():
        if getattr(arguments, name, None) and not (alone and name in _OF_SEVERAL_RANKS):
            raise ConfigError(f"TrainingArguments({name}={getattr(arguments, name)!r}) {why}")
    Options(compile=compiler_of(arguments))  # raises if the backend is invalid
    if not arguments.average_tokens_across_devices and arguments.world_size > 1:
        raise ConfigError(
            "TrainingArguments(average_tokens_across_devices=False) asks for a mean of per-rank means, but hfscale's "
            "loss is the mean over all tokens of a step: leave it out"
        )
    if alone:
        return
    if arguments.dataloader_num_workers and not getattr(arguments, "dataloader_in_order", True):
        raise ConfigError(
            "TrainingArguments(dataloader_in_order=False) yields batches as workers finish, so ranks with one batch "
            "would get different ones, and no rank knows which batch is padded: leave it out"
        )
    kwargs = (
        getattr(arguments, "activation_checkpointing_kwargs", None)
        or arguments.gradient_checkpointing_kwargs
    )
    if (kwargs or {}).get("use_reentrant"):
        raise ConfigError(
            "gradient_checkpointing_kwargs={{'use_reentrant': True}} hides layers from autograd, which then does not "
            "sum gradients over ranks: leave use_reentrant out, or set it to False"
        )


def check_dispatch(arguments: Any) -> None:
    """Raise for ``dispatch_batches=True``, which sends slices of batches to several processes."""
    if started_processes() > 1 and arguments.accelerator_config.dispatch_batches:
        raise ConfigError(
            "TrainingArguments(accelerator_config={'dispatch_batches': True}) gives every process another slice of a "
            "batch, even processes that must get the same batch, such as tensor ranks: leave dispatch_batches out"
        )


def check_engine(kind: type, arguments: Any) -> None:
    """Raise :class:`ConfigError` for a TRL trainer whose own code would treat this rank's shards as full weights: to
    send weights to vLLM, or to compute a distillation loss from full output heads.
    """
    if distils(kind) and not issubclass(kind, DistillationHooks):
        raise ConfigError(
            f"{kind.__name__} computes its loss from the full output heads of student and teacher, but hfscale may "
            "shard heads: subclass hfscale.trl.DistillationTrainer instead"
        )
    if getattr(arguments, "use_vllm", False) and not has_engine(kind):
        raise ConfigError(
            f"{kind.__name__} (use_vllm=True) would give vLLM this rank's shards as full weights: use GRPOTrainer or "
            "RLOOTrainer of hfscale.trl, with TRL 1.16 or later, or your own engine, with weights from "
            "hfscale.stream_weights (docs/grpo.md)"
        )


def check_layout_of(model: nn.Module, layout: ParallelConfig) -> None:
    """Check that the layout for a stock model fits the number of processes that were started."""
    processes = started_processes()
    if layout.total_size != processes:
        raise ConfigError(
            f"{type(model).__name__} is not parallelized, but {processes} processes run with the layout "
            f"{layout.describe()}: build the model with hfscale.from_pretrained(path, parallel=layout), or pass "
            "hfscale.Trainer(..., parallel=layout), where layout = hfscale.ParallelConfig(tp_size=...) has as many "
            "ranks as there are processes"
        )


def check_model(runtime: Runtime, arguments: Any) -> None:
    """Check the model's precision, kernels, schedule and optimizer's device against the arguments."""
    if offloaded(runtime.plan).optimizer:
        refuse_aside(optimizer_name(arguments))
    built = runtime.options.around_products
    asked = str(arguments.mixed_precision)
    if built != asked:
        said = {"no": "neither bf16 nor fp16", "bf16": "bf16=True", "fp16": "fp16=True"}
        told = os.environ.get("ACCELERATE_MIXED_PRECISION") == asked != "no"
        launcher = (
            " (possibly set by accelerate launch: ACCELERATE_MIXED_PRECISION, of its config file)"
            if told
            else ""
        )
        raise ConfigError(
            f"TrainingArguments has {said[asked]}{launcher}, but the model was built with mixed_precision={built!r}: "
            f"give both the same: hfscale.from_pretrained(..., mixed_precision={asked!r}), or {said[built]}"
        )
    if arguments.use_liger_kernel and runtime.options.use_liger_kernel is False:
        _check_kernels(runtime)
    layout = runtime.mesh.layout
    if runtime.plan.stages is not None and not layout.flushes:
        raise ConfigError(
            f"{layout.pipeline_schedule} returns the gradients of earlier batches, but a Trainer steps the optimizer "
            "after each batch: use a schedule with a flush, such as '1f1b' or 'zbv', or write a loop with "
            "hfscale.train_step and hfscale.drain"
        )
    smoothed_by_host = bool(arguments.label_smoothing_factor) and runtime.plan.loss is None
    if smoothed_by_host and is_causal_lm(class_name(runtime.model)) and runtime.mesh.data_world > 1:
        raise ConfigError(
            "TrainingArguments(label_smoothing_factor=...): transformers smooths the labels of this model only if it "
            "knows the name of its class, which FSDP2 changes: use dp_shard_size=1 and dp_replicate_size=1, or leave "
            "label_smoothing_factor out"
        )


def _check_kernels(runtime: Runtime) -> None:
    """Raise for a model that was built without the kernels that the Trainer's arguments request.

    In one process, a Trainer can be created without an installed Liger, but its ``train`` raises an error.
    """
    built = "TrainingArguments(use_liger_kernel=True) is set, but the model was built without Liger's kernels"
    again = "build it with hfscale.from_pretrained(..., use_liger_kernel=True)"
    if liger.is_installed():
        raise ConfigError(f"{built}: {again}")
    if not runtime.is_alone:
        raise ConfigError(
            f"{built}, which are not installed: pip install liger-kernel, and {again}"
        )


def check_trainer(trainer: Any, scores_tokens: bool) -> None:
    """Check a created Trainer: its data, its microbatches, and its loss. ``scores_tokens`` is whether the loss is
    computed from log-probabilities and similar numbers per token, which TRL's fused head returns.
    """
    runtime: Runtime = trainer.runtime
    name = type(trainer).__name__
    collator = getattr(trainer, "data_collator", None)
    if isinstance(collator, DataCollatorWithFlattening) or getattr(collator, "padding_free", False):
        tokens = getattr(trainer.args, "max_length", None)  # of TRL's trainers
        check_packed_rows(
            runtime.model, start=getattr(collator, "position_ids_start", 0), tokens=tokens
        )
    if hasattr(trainer, "reward_funcs"):
        _check_generation(trainer, runtime)
    elif hasattr(trainer, "generation_config") and _is_partial(runtime.mesh.layout):
        raise ConfigError(
            f"{runtime.mesh.layout.describe()}: {name} generates with the model that it trains and needs the full "
            "output head, but each rank has only some of the layers, or only some tokens of each sequence: use "
            f"pp_size=1 and {UNCUT_SEQUENCES}"
        )
    if runtime.plan.stages is not None:
        _check_stages(trainer, runtime, scores_tokens)
    elif runtime.options.mixed_precision == "fp16" and not trainer.uses_train_step:
        raise ConfigError(
            f"TrainingArguments(fp16=True): only hfscale.train_step scales the loss for fp16, but {name} runs the "
            "backward pass of its own loss: use bf16=True, and build the model with mixed_precision='bf16'"
        )
    _check_step(trainer, runtime)


def _is_partial(layout: ParallelConfig) -> bool:
    """Return whether a rank holds only some layers, or only some tokens of each sequence."""
    return layout.pp > 1 or layout.cuts_sequences


def _check_generation(trainer: Any, runtime: Runtime) -> None:
    """Raise :class:`ConfigError` for a trainer that generates (GRPO, RLOO) if its generation needs a full model that no
    rank has, or if its loss compares the entropies of all tokens of a step, which pipeline stages do not have.
    """
    args = trainer.args
    layout = runtime.mesh.layout
    own = not getattr(args, "use_vllm", False) and getattr(trainer, "rollout_func", None) is None
    if own and _is_partial(layout):
        raise ConfigError(
            f"{layout.describe()}: {type(trainer).__name__} generates with the model that it trains, but each rank "
            "has only some of its layers, or only some tokens of each sequence: set use_vllm=True, pass a "
            f"rollout_func, or use tp_size or dp_shard_size with pp_size=1 and {UNCUT_SEQUENCES}"
        )
    tools = getattr(trainer, "tools", None) or getattr(args, "environment_factory", None)
    if tools and getattr(args, "vllm_enable_sleep_mode", False) and runtime.mesh.batch_world > 1:
        raise ConfigError(
            "vllm_enable_sleep_mode sends weights before every generation, in which all ranks must take part, but "
            "ranks whose completions call no tools generate less often than other ranks: leave "
            "vllm_enable_sleep_mode out, or use a layout in which all ranks get the same batch"
        )
    adapts = getattr(args, "use_adaptive_entropy", False)
    quantile = getattr(args, "top_entropy_quantile", 1.0)
    if runtime.plan.stages is not None and (adapts or quantile < 1.0):
        given = "use_adaptive_entropy=True" if adapts else f"top_entropy_quantile={quantile}"
        raise ConfigError(
            f"{layout.describe()}: {given} compares the entropies of tokens over all ranks, but only the last "
            "pipeline stage has these entropies when the loss is computed: leave this option out, or use pp_size=1"
        )


def _check_stages(trainer: Any, runtime: Runtime, scores_tokens: bool) -> None:
    """Raise for options that need the full model on one rank."""
    layout = runtime.mesh.layout.describe()
    name = type(trainer).__name__
    count = trainer.args.gradient_accumulation_steps
    if rebalances(trainer.args) and runtime.mesh.layout.num_microbatches not in (None, count):
        raise ConfigError(
            f"{layout}: train_sampling_strategy='batch_rebalance' makes batches with different numbers of rows, which "
            "cannot be split into equal microbatches, so each batch must be one microbatch: set "
            f"num_microbatches={count}, equal to gradient_accumulation_steps, or leave num_microbatches out"
        )
    if getattr(trainer, "aux_loss_enabled", False):
        raise ConfigError(
            f"{layout}: {name} adds the router's loss, which is a sum over all layers, but each stage has only some "
            f"layers: use {type(trainer.args).__name__}(router_aux_loss_coef=0.0) and load the model with "
            "routing=hfscale.RoutingConfig(balance_loss=...), or use pp_size=1"
        )
    if getattr(trainer.args, "activation_offloading", False):
        raise ConfigError(
            f"{layout}: activation_offloading does not support pipeline stages: leave it out"
        )
    own = not has_stock_loss(trainer)
    if (own and not scores_tokens) or runtime.loss is None:
        whose = f"{name}.compute_loss, or compute_loss_func," if own else class_name(runtime.model)
        raise ConfigError(
            f"{layout}: {whose} needs the model's full output, which only the last stage has: use pp_size=1, or keep "
            "the loss of transformers; in your own loop, hfscale.train_step(model, batch, score_loss=...) computes a "
            "loss of the labels' log-probabilities on that stage"
        )


def _check_step(trainer: Any, runtime: Runtime) -> None:
    """Check the microbatches of a step, and whether their labels can be smoothed."""
    args = trainer.args
    layout = runtime.mesh.layout
    if trainer.uses_train_step and args.label_smoothing_factor and runtime.plan.loss is None:
        raise ConfigError(
            f"TrainingArguments(label_smoothing_factor={args.label_smoothing_factor}): {class_name(runtime.model)} "
            f"computes its own loss, which cannot be smoothed over {layout.describe()}: leave label_smoothing_factor "
            "out, or use tensor ranks alone, where Trainer smooths the loss"
        )
    if trainer.train_dataset is None or (
        runtime.plan.stages is None and not trainer.uses_train_step
    ):
        return
    count = args.gradient_accumulation_steps
    uneven = runtime.plan.stages is not None and rebalances(args)
    rows = 1 if uneven else args.per_device_train_batch_size
    with runtime.executor.uncut() if uneven else nullcontext():
        given = runtime.executor.share_out(blank_batches(rows, count))
    if trainer.uses_train_step:
        if (routing := runtime.part(ExpertRouting)) is not None:
            routing.check_step(runtime, given)
    elif len(given) != count:
        asked = "" if layout.num_microbatches is None else "leave num_microbatches out, and "
        rows, left = divmod(args.per_device_train_batch_size * count, len(given))
        same = (
            "" if left else f" and per_device_train_batch_size={rows}, for the same rows per step"
        )
        raise ConfigError(
            f"{layout.describe()}: the loss of {type(trainer).__name__} is computed from whole batches, of which a "
            f"step has gradient_accumulation_steps={count}, but the pipeline schedule would split them into "
            f"{len(given)} microbatches: {asked}use gradient_accumulation_steps={len(given)}{same}"
        )


def check_cached(dataset: Any, processes: int) -> None:
    """Raise :class:`ConfigError` in several processes for a data set in memory: the first rank would cache the
    reference's log-probabilities where other ranks cannot find them.
    """
    if processes > 1 and getattr(dataset, "cache_files", None) == []:
        raise ConfigError(
            f"precompute_ref_log_probs=True in {processes} processes needs a data set that is read from a file, "
            "because the first process caches the reference model's log-probabilities next to that file: use "
            "datasets.load_dataset(...), or dataset.save_to_disk(path) and datasets.load_from_disk(path)"
        )
