"""Refuse options of a Trainer that cannot work here, before anything is built."""

import os
from typing import Any

import torch
from torch import nn
from transformers import DataCollatorWithFlattening

from ..._compat.torch_device import accelerators
from ..._compat.transformers.classes import class_name
from ..._compat.transformers.trainer import count_processes_on_cpu, unheard_options, use_one_gpu
from ...config.environment import started_processes
from ...config.parallel import ParallelConfig
from ...config.schedules import ASYNCHRONOUS
from ...errors import ConfigError
from ...optim.catalog import find_choice, parse_arguments
from ...parallel.experts import ExpertRouting
from ...plan.offload import offloaded, refuse_aside
from ...train.guards import check_packed_rows
from ...train.runtime import Runtime

_REFUSED = {
    "torch_compile": "would compile forward passes in which ranks talk to each other: leave it out",
    "fsdp": "would shard the model a second time: use hfscale.ParallelConfig(dp_shard_size=...)",
    "deepspeed": "would shard the model a second time: use hfscale.ParallelConfig(dp_shard_size=...)",
    "parallelism_config": "would shard the model a second time: give the layout to hfscale.from_pretrained(parallel=)",
    "auto_find_batch_size": "begins anew on the rank that ran out of memory, and not on the others: set "
    "per_device_train_batch_size",
    "neftune_noise_alpha": "draws noise that ranks with one batch would not share: leave it out",
    "fp16_full_eval": "casts weights that are sharded: leave it out",
    "bf16_full_eval": "casts weights that are sharded: leave it out",
    "eval_use_gather_object": "gathers over all processes, also those that share a batch: leave it out",
    "enable_jit_checkpoint": "saves on each rank when its own signal comes, and ranks that are told at different steps "
    "would wait for each other: leave it out, and ask hfscale.preempted(model) in a callback's on_step_end, which all "
    "ranks answer alike: where it is true, control.should_save = control.should_training_stop = True",
    "use_vllm": "would give vLLM this rank's shares for whole weights: generate with an engine of yours in "
    "rollout_func, and give it the weights of hfscale.stream_weights (docs/trainer.md)",
    "save_on_each_node": "writes files on every node, and the first rank writes the only ones: save to a directory "
    "that all nodes see",
}


def check_run(arguments: Any) -> None:
    """Check ``TrainingArguments``, and correct their number of processes on CPUs.

    Raises:
        ConfigError: an argument cannot work, or they count other processes than were started.
    """
    check_arguments(arguments)
    check_optimizer(arguments)
    processes = started_processes()
    if arguments.world_size != processes and not accelerators().is_available():
        count_processes_on_cpu(arguments)
    if arguments.world_size != processes:
        raise ConfigError(
            f"TrainingArguments sees {arguments.world_size} process(es) and {processes} were started: create it, and "
            "any accelerate state, after the process group"
        )
    use_one_gpu(arguments)


def check_arguments(arguments: Any) -> None:
    """Check ``TrainingArguments``.

    Raises:
        ConfigError: one of them cannot work; it names the argument and an alternative.
    """
    for name, why in _REFUSED.items():
        if getattr(arguments, name, None):
            raise ConfigError(f"TrainingArguments({name}={getattr(arguments, name)!r}) {why}")
    if getattr(arguments, "train_sampling_strategy", None) == "batch_rebalance":
        raise ConfigError(
            "TrainingArguments(train_sampling_strategy='batch_rebalance') distributes rows by process: use "
            "'group_by_length'"
        )
    if not arguments.average_tokens_across_devices and arguments.world_size > 1:
        raise ConfigError(
            "TrainingArguments(average_tokens_across_devices=False) asks for a mean of means, and the loss here is the "
            "mean over all tokens of a step: leave it out"
        )
    if arguments.accelerator_config.dispatch_batches:
        raise ConfigError(
            "TrainingArguments(accelerator_config={'dispatch_batches': True}) slices batches over all processes, also "
            "those that share one: leave it out"
        )
    kwargs = getattr(arguments, "activation_checkpointing_kwargs", None) or arguments.gradient_checkpointing_kwargs
    if (kwargs or {}).get("use_reentrant"):
        raise ConfigError(
            "gradient_checkpointing_kwargs={'use_reentrant': True} hides layers from autograd, which then does not sum "
            "gradients over ranks: leave it out, or pass False"
        )


def check_optimizer(arguments: Any) -> None:
    """Check the optimizer that the arguments name.

    Raises:
        ConfigError: hfscale does not know it, or it does not take ``optim_args``.
    """
    name = str(getattr(arguments.optim, "value", arguments.optim))
    adam = {"betas": (arguments.adam_beta1, arguments.adam_beta2), "eps": arguments.adam_epsilon}
    choice, given = find_choice(name), parse_arguments(arguments.optim_args)
    unheard = {*unheard_options(arguments, given)} & {*choice.adam}  # these have arguments of their own
    choice.options(name, adam, {option: value for option, value in given.items() if option not in unheard})


def check_model(runtime: Runtime, arguments: Any, smoothed_by_host: bool) -> None:
    """Check the model and its layout against the arguments.

    Args:
        smoothed_by_host: whether labels would be smoothed by transformers' code.

    Raises:
        ConfigError: its precision, its kernels or its optimizer's device do not match the arguments, or its schedule
            has no flush.
    """
    if offloaded(runtime.plan).optimizer:
        refuse_aside(str(getattr(arguments.optim, "value", arguments.optim)))
    built, asked = runtime.options.around_products, str(arguments.mixed_precision)
    if built != asked:
        said = {"no": "neither bf16 nor fp16", "bf16": "bf16=True", "fp16": "fp16=True"}
        told = os.environ.get("ACCELERATE_MIXED_PRECISION") == asked != "no"
        launcher = " (accelerate launch may say so: ACCELERATE_MIXED_PRECISION, of its config file)" if told else ""
        raise ConfigError(
            f"TrainingArguments has {said[asked]}{launcher}, and the model was built with mixed_precision={built!r}: "
            f"give both the same: hfscale.from_pretrained(..., mixed_precision={asked!r}), or {said[built]}"
        )
    if arguments.use_liger_kernel and runtime.options.use_liger_kernel is False:
        raise ConfigError(
            "TrainingArguments(use_liger_kernel=True), and the model was built without Liger's kernels: build it with "
            "hfscale.from_pretrained(..., use_liger_kernel=True)"
        )
    schedule = runtime.mesh.layout.pipeline_schedule
    if schedule in ASYNCHRONOUS and runtime.plan.stages is not None:
        raise ConfigError(
            f"{schedule} hands out the gradients of earlier batches, and a Trainer steps after each: use a schedule "
            "with a flush, such as '1f1b' or 'zbv', or a loop of your own with hfscale.train_step and hfscale.drain"
        )
    if smoothed_by_host and runtime.mesh.data_world > 1:
        raise ConfigError(
            "TrainingArguments(label_smoothing_factor=...): transformers smooths the labels of this model by the name "
            "of its class, which FSDP2 changes: use dp_shard_size=1 and dp_replicate_size=1, or leave it out"
        )


def check_layout_of(model: nn.Module, layout: ParallelConfig, processes: int) -> None:
    """Check the layout of a model that is not parallelized yet.

    Raises:
        ConfigError: the layout is not for the processes that were started.
    """
    if layout.total_size != processes:
        raise ConfigError(
            f"{type(model).__name__} is a model of one process, {processes} run, and the layout is "
            f"{layout.describe()}: build the model with hfscale.from_pretrained(path, parallel=layout), or pass "
            "hfscale.Trainer(..., parallel=layout), where layout = hfscale.ParallelConfig(tp_size=...) has as many "
            "processes as run"
        )


def check_generation(trainer: Any, runtime: Runtime) -> None:
    """Check a trainer that generates its training data.

    Raises:
        ConfigError: it has context ranks, which draw different random numbers for their different tokens.
    """
    if hasattr(trainer, "reward_funcs") and runtime.mesh.layout.cp > 1:
        raise ConfigError(
            f"{runtime.mesh.layout.describe()}: {type(trainer).__name__} generates and shuffles what it trains on, and "
            "context ranks draw different random numbers; they would compute whole sequences, too: use tp_size or "
            "dp_shard_size in the place of cp_size"
        )


def check_cached(dataset: Any, processes: int) -> None:
    """Check rows whose scores the first rank is about to cache beside them for all ranks.

    Raises:
        ConfigError: they are in memory, and every rank would look for the cache in a directory of its own.
    """
    if processes > 1 and getattr(dataset, "cache_files", None) == []:
        raise ConfigError(
            f"precompute_ref_log_probs=True in {processes} processes: the first one caches the reference's scores "
            "beside the rows, which are in memory: give the trainer rows of a file, "
            "datasets.load_dataset(...), or dataset.save_to_disk(path) and datasets.load_from_disk(path)"
        )


def check_losses_of_scores(trainer: Any, runtime: Runtime) -> None:
    """Check features of TRL's trainers beside their loss, for a model cut into stages.

    Raises:
        ConfigError: it needs the full model on one rank.
    """
    layout = runtime.mesh.layout.describe()
    if hasattr(trainer, "reward_funcs"):
        raise ConfigError(
            f"{layout}: {type(trainer).__name__} generates with the model that it trains, of which a rank has some "
            "layers: use pp_size=1"
        )
    if getattr(trainer, "aux_loss_enabled", False):
        raise ConfigError(
            f"{layout}: {type(trainer).__name__} adds the router's loss, a sum over layers of which each stage has "
            f"some: use {type(trainer.args).__name__}(router_aux_loss_coef=0.0) and load the model with "
            "routing=hfscale.RoutingConfig(balance_loss=...), or use pp_size=1"
        )
    if getattr(trainer.args, "activation_offloading", False):
        raise ConfigError(f"{layout}: activation_offloading is not for passes between stages: leave it out")


def check_smoothing(trainer: Any, runtime: Runtime) -> None:
    """Check label smoothing in steps of :func:`hfscale.train_step`.

    Raises:
        ConfigError: the model computes its loss itself, where labels cannot be smoothed.
    """
    if trainer.args.label_smoothing_factor and runtime.plan.loss is None:
        name, layout = class_name(runtime.model), runtime.mesh.layout.describe()
        raise ConfigError(
            f"TrainingArguments(label_smoothing_factor={trainer.args.label_smoothing_factor}): {name} takes its loss "
            f"itself, and over {layout} nobody smooths it: leave it out, or use tensor ranks alone, where Trainer does"
        )


def check_step(trainer: Any, runtime: Runtime, uses_train_step: bool) -> None:
    """Check the microbatches that a step will have.

    Raises:
        ConfigError: the schedule cannot run them, they would add the router's loss several times, or their labels are
            to be smoothed in a loss that the model computes itself.
    """
    args = trainer.args
    if uses_train_step:
        check_smoothing(trainer, runtime)
    if trainer.train_dataset is None or (runtime.plan.stages is None and not uses_train_step):
        return
    row = torch.zeros(args.per_device_train_batch_size, 2, dtype=torch.int64)
    count = args.gradient_accumulation_steps
    given = runtime.executor.share_out([{"input_ids": row, "labels": row}] * count)
    if uses_train_step:
        routing = runtime.part(ExpertRouting)
        if routing is not None:
            routing.check_step(runtime, given)
    elif len(given) != count:
        asked = "" if runtime.mesh.layout.num_microbatches is None else "leave num_microbatches out, and "
        raise ConfigError(
            f"{runtime.mesh.layout.describe()}: a loss of {type(trainer).__name__}'s is about whole batches, so a step "
            f"has gradient_accumulation_steps={count} microbatches, and the schedule would make {len(given)} of them: "
            f"{asked}use gradient_accumulation_steps={len(given)}{_same_rows(args, len(given))}"
        )


def _same_rows(args: Any, microbatches: int) -> str:
    """Return advice on how a step keeps its number of rows."""
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    same = f" and per_device_train_batch_size={rows // microbatches}, for as many rows in a step as now"
    return "" if rows % microbatches else same


def check_scaled(trainer: Any, runtime: Runtime, own_step: bool) -> None:
    """Check that the loss of float16 will be scaled.

    Raises:
        ConfigError: it would not be: the backward pass is the trainer's own.
    """
    if runtime.options.mixed_precision == "fp16" and own_step:
        raise ConfigError(
            f"TrainingArguments(fp16=True): hfscale.train_step scales the loss, and {type(trainer).__name__} runs the "
            "backward pass of a loss of its own: use bf16=True, and mixed_precision='bf16' where the model is built"
        )


def check_packing(trainer: Any, runtime: Runtime) -> None:
    """Refuse collators that pack several documents into one row, for models that do not keep them apart.

    Raises:
        ConfigError: see :func:`hfscale.train.guards.check_packed_rows`.
    """
    collator = getattr(trainer, "data_collator", None)
    flattens = isinstance(collator, DataCollatorWithFlattening) or getattr(collator, "padding_free", False)
    if flattens:
        tokens = getattr(trainer.args, "max_length", None)  # of TRL's trainers
        check_packed_rows(runtime.model, start=getattr(collator, "position_ids_start", 0), tokens=tokens)
