"""Arguments that few scripts set, and trainers that few use: what :mod:`.choose` adds to a draw."""

from random import Random
from typing import Any

from .data import MIXTURES

ALL: tuple[dict[str, Any], ...] = (
    {"adam_beta1": 0.8, "adam_beta2": 0.95},
    {"optim": "adamw_torch", "optim_args": "amsgrad=true"},
    {"optim": "sgd", "optim_args": "momentum=0.9, nesterov=true"},
    {"optim": "lion_32bit", "learning_rate": 2e-4},
    {"optim": "ademamix"},
    {"optim": "rmsprop_bnb_32bit"},
    {"optim": "paged_adamw_32bit"},
    {"lr_scheduler_type": "cosine_warmup_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
    {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1e-4, "power": 2.0}},
    {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
    {"warmup_steps": 0.5},
    {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    {"use_cache": True},
    {"full_determinism": True},
    {
        "dataloader_num_workers": 2,
        "dataloader_persistent_workers": True,
        "dataloader_prefetch_factor": 1,
    },
    {"dataloader_pin_memory": False},
    {"remove_unused_columns": False},
    {"length_column_name": "size"},
    {"logging_steps": 0.5},
    {"logging_strategy": "no"},
    {"ddp_find_unused_parameters": True},
    {"debug": "underflow_overflow"},
    {"accelerator_config": {"even_batches": True, "split_batches": False}},
    {"max_grad_norm": 0.05},
    {"tf32": False},
)
_EVERY_TWO = {"save_steps": 2, "eval_steps": 2}
EVALUATED: tuple[dict[str, Any], ...] = (
    {"eval_delay": 2},
    {"prediction_loss_only": True},
    {"eval_do_concat_batches": False},
    {"include_for_metrics": ["loss"]},
    {"include_for_metrics": ["inputs"]},
    {"eval_steps": 0.5},
    {"save_strategy": "best", "metric_for_best_model": "loss"},
    {
        "load_best_model_at_end": True,
        "save_strategy": "steps",
        **_EVERY_TWO,
        "save_only_model": True,
    },
)
GOING_ON: tuple[dict[str, Any], ...] = (
    {"ignore_data_skip": True},
    {"restore_callback_states_from_checkpoint": True},
)
SFT: tuple[dict[str, Any], ...] = (
    {"truncation_mode": "keep_end", "max_length": 8},
    {"shuffle_dataset": True},
    {"packing": True, "max_length": 16, "eval_packing": False},
    {"packing": True, "max_length": 16, "packing_strategy": "bfd_split"},
    {"pad_to_multiple_of": 8},
    {"eos_token": "a"},
    {"pad_token": "unknown"},
    {"max_length": None},
    {"dataset_num_proc": 1},
)
DPO: tuple[dict[str, Any], ...] = (
    {"truncation_mode": "keep_end", "max_length": 10},
    {"padding_free": True},
    {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 4},
    {
        "loss_type": ["sigmoid"],
        "f_divergence_type": "alpha_divergence",
        "f_alpha_divergence_coef": 0.3,
    },
    {"loss_type": ["sigmoid"], "label_smoothing": 0.2},
    {"disable_dropout": False},
    {"pad_to_multiple_of": 8},
    {"max_length": None},
)
KTO: tuple[dict[str, Any], ...] = (
    {"desirable_weight": 0.5, "undesirable_weight": 2.0},
    {"precompute_ref_log_probs": True},
    {"sync_ref_model": True, "ref_model_sync_steps": 2},
    {"max_length": 10},
    {"learning_rate": 1e-2},
)
REWARD: tuple[dict[str, Any], ...] = (
    {"center_rewards_coefficient": 0.1},
    {"max_length": 10},
    {"pad_to_multiple_of": 8},
    {"disable_dropout": False},
)
_POLICY: tuple[dict[str, Any], ...] = (
    {"num_iterations": 2},
    {"steps_per_generation": 4},
    {"mask_truncated_completions": True},
    {"reward_weights": [1.0, 0.5]},
    {"epsilon": 0.1, "epsilon_high": 0.3},
    {"temperature": 0.7},
    {"sync_ref_model": True, "ref_model_sync_steps": 1, "beta": 0.1},
    {"shuffle_dataset": False},
    {"beta": 0.0},
    {"log_completions": True},
)
GRPO: tuple[dict[str, Any], ...] = (
    *_POLICY,
    *(
        {"loss_type": name}
        for name in ("grpo", "dr_grpo", "bnpo", "dapo", "cispo", "sapo", "vespo")
    ),
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"importance_sampling_level": "sequence"},
    {"delta": 1.5},
    {"top_entropy_quantile": 0.5},
    {"entropy_coef": 0.01},
    {"use_adaptive_entropy": True, "entropy_target": 4.5, "entropy_coef": 0.01},
    {"scale_rewards": "batch"},
    {"scale_rewards": "none"},
    {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]},
    {"off_policy_mask_threshold": 0.5},
    {"use_bias_correction_kl": False},
    {"cast_lm_head_to_fp32": True},
)
RLOO: tuple[dict[str, Any], ...] = (
    *_POLICY,
    {"normalize_advantages": True},
    {"reward_clip_range": [-0.5, 0.5]},
)


def widen(random: Random, draw: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Add a few."""
    own = {"SFTTrainer": SFT, "DPOTrainer": DPO, "KTOTrainer": KTO, "RewardTrainer": REWARD}.get(
        draw["trainer"], ()
    )
    own = {"GRPOTrainer": GRPO, "RLOOTrainer": RLOO}.get(draw["trainer"], own)
    groups = [(ALL, 0.5), (own, 0.6), (own, 0.3)]
    if arguments.get("eval_steps") and not draw.get("stops"):
        groups.append((EVALUATED, 0.3))
    if draw.get("resume"):
        groups.append((GOING_ON, 0.3))
    for table, likely in groups:
        if table and random.random() < likely:
            arguments |= random.choice(table)
    _fit(draw, arguments)
    if random.random() < 0.2 and not draw.get("resume"):
        draw["brings"] = random.choice(_may_bring(draw, arguments))


_BELONGS = {
    "cosine_with_min_lr": "min_lr",
    "cosine_warmup_with_min_lr": "min_lr_rate",
    "polynomial": "lr_end",
    "cosine_with_restarts": "num_cycles",
    "warmup_stable_decay": "num_decay_steps",
}
"""Schedules -> an option that no other has."""


def _fit(draw: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Without what stock code itself refuses together."""

    def without(*names: str) -> None:
        for name in names:
            arguments.pop(name, None)

    if arguments.get("activation_checkpointing"):
        without("gradient_checkpointing", "gradient_checkpointing_kwargs")
    kind = arguments.get("lr_scheduler_type")
    options = arguments.get("lr_scheduler_kwargs") or {}
    if _BELONGS.get(str(kind)) not in options:
        without("lr_scheduler_kwargs")
    if kind == "reduce_lr_on_plateau" or arguments.get("load_best_model_at_end"):
        without("eval_delay")
    if draw.get("resume"):
        _go_on(draw, arguments)
    if arguments.get("save_strategy") == "best" or arguments.get("load_best_model_at_end"):
        without("eval_on_start")
    if arguments["optim"] not in ("adamw_torch", "sgd"):
        without("optim_args")
    if draw["metrics"] == "batches" or draw["model"] == "balanced":
        without("eval_do_concat_batches")
    if arguments.get("eval_do_concat_batches") is False or arguments.get("prediction_loss_only"):
        draw["metrics"], draw["predicts"] = "", False
    if len(arguments.get("loss_weights", ())) != len(arguments.get("loss_type", ())):
        without("loss_weights")
    _fit_lengths(draw, arguments)


def _fit_lengths(draw: dict[str, Any], arguments: dict[str, Any]) -> None:
    if arguments.get("packing"):
        arguments.pop("padding_free", None)
        arguments["max_length"] = arguments.get("max_length") or 16
    if arguments.get("padding_free") and draw["trainer"] == "SFTTrainer":
        arguments["max_length"] = None


def _go_on(draw: dict[str, Any], arguments: dict[str, Any]) -> None:
    """A row of each step, at whose end a checkpoint is."""
    if arguments.get("logging_steps") == 0.5 or arguments.get("logging_strategy") == "no":
        arguments |= {"logging_steps": 1, "logging_strategy": "steps"}
    arguments |= {"save_strategy": "steps", "save_steps": 2}
    left_out = ["save_only_model", "load_best_model_at_end"]
    if draw["model"] in MIXTURES:  # held to a run that does not stop, and begins but once
        left_out += ["eval_on_start", "ignore_data_skip", "restore_callback_states_from_checkpoint"]
        left_out += [
            "sync_ref_model",
            "ref_model_sync_steps",
        ]  # a reference that follows begins anew
        # Whose row is behind the checkpoint at the end of an epoch.
        if arguments.get("eval_strategy") == "epoch":
            arguments |= {"eval_strategy": "steps", "eval_steps": 2}
    # Where stock code goes on, it reads them from a file, and draws another order than in the run that computed them.
    if "use_seedable_sampler" in str(arguments) or "group_by_length" in str(arguments):
        left_out += ["precompute_ref_log_probs", "precompute_ref_batch_size"]
    for name in left_out:
        arguments.pop(name, None)


def _may_bring(draw: dict[str, Any], arguments: dict[str, Any]) -> list[str]:
    can = ["decay", "choice", "groups"]
    if draw["adapter"] == "" and not draw.get("late"):
        can += ["optimizers", *(["class"] if draw["trainer"] == "Trainer" else [])]
    if draw["trainer"] == "Trainer" and draw["source"] != "stream":
        can += ["sampler", "loader"]
    if arguments.get("eval_steps") and draw["metrics"] == "" and "eval_loss" not in str(arguments):
        can += [] if arguments.get("load_best_model_at_end") or draw.get("stops") else ["sets"]
    if (
        draw["adapter"] == ""
        and draw["trainer"] in ("SFTTrainer", "DPOTrainer")
        and draw["model"] in ("llama", "tied")
    ):
        can += ["path", "peft", *(["reference"] if draw["trainer"] == "DPOTrainer" else [])]
    return can
