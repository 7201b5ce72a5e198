"""hfscale: train the Hugging Face models you already have, at any scale, from the tools you already use."""

from .accelerator import Accelerator
from .adapt import coverage_report, get_peft_model, merge_and_unload
from .checkpoint import load_state, save_pretrained, save_state, verify_experts
from .checkpoint.upcycle import upcycle
from .config import ParallelConfig
from .errors import CheckpointError, ConfigError, HFScaleError, MeshError, PlanError
from .experts import ExpertLoad, ExpertLoadHistory, RoutingConfig, expert_load
from .finetune.memory import memory_estimate
from .finetune.optimizers import create_optimizer
from .parallelize import from_config, from_pretrained, parallelize, plan
from .pipeline.record import record_schedule
from .train import batch_rank, batch_world, clip_grad_norm_, drain, eval_step, train_step
from .version import __version__

__all__ = [
    "Accelerator",
    "CheckpointError",
    "ConfigError",
    "ExpertLoad",
    "ExpertLoadHistory",
    "HFScaleError",
    "MeshError",
    "ParallelConfig",
    "PlanError",
    "RoutingConfig",
    "__version__",
    "batch_rank",
    "batch_world",
    "clip_grad_norm_",
    "coverage_report",
    "create_optimizer",
    "drain",
    "eval_step",
    "expert_load",
    "from_config",
    "from_pretrained",
    "get_peft_model",
    "load_state",
    "memory_estimate",
    "merge_and_unload",
    "parallelize",
    "plan",
    "record_schedule",
    "save_pretrained",
    "save_state",
    "train_step",
    "upcycle",
    "verify_experts",
]
