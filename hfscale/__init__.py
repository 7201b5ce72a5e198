"""hfscale: train the Hugging Face models you already have, at any scale, from the tools you already use."""

import importlib
import sys
from types import ModuleType
from typing import Any

from .errors import CheckpointError, ConfigError, HFScaleError, MeshError, PlanError
from .extensions import added, provided

__version__ = "0.1.0"

# Names whose modules import torch are imported on first use, so that the CLI parses, or refuses, a command at once.
# Type checkers and editors read them in ``__init__.pyi``; a test compares the two.
_MODULES = {
    ".integrations.accelerator": ["Accelerator"],
    ".api.adapt": ["coverage_report", "get_peft_model", "merge_and_unload"],
    ".checkpoint.checksums": ["verify_experts"],
    ".checkpoint.foreign_optimizer": ["load_optimizer"],
    ".checkpoint.save": ["save_pretrained"],
    ".checkpoint.state": ["SaveCheck", "check_save", "load_state", "save_state", "wait_for_saves"],
    ".checkpoint.stream": ["stream_weights"],
    ".config.parallel": ["ParallelConfig"],
    ".config.float8": ["Float8Config"],
    ".cost.tools.estimate": ["estimate"],
    ".parallel.experts.load_report": ["ExpertLoad", "ExpertLoadHistory", "expert_load"],
    ".parallel.experts.replay": ["record_routes"],
    ".parallel.experts.engine_routes": ["routes_from_sglang", "routes_from_vllm"],
    ".distributed.processes": ["fitting_layout"],
    ".config.routing": ["RoutingConfig"],
    ".cost.tools.memory_report": ["memory_estimate"],
    ".config.memory": ["MemoryConfig"],
    ".distributed.ops.token_scores": ["TokenScores"],
    ".optim": ["create_optimizer"],
    ".api.build": ["from_config", "from_pretrained", "parallelize", "plan"],
    ".integrations.trainer": [
        "Seq2SeqTrainer",
        "Trainer",
        "TrainerMixin",
    ],
    ".train.balanced_batches": ["balanced_batches"],
    ".train.gradient_norm": ["BadStepError", "BadSteps", "clip_grad_norm_"],
    ".train.preemption": ["Preempted", "preempted"],
    ".train.step": ["batch_rank", "batch_world", "drain", "eval_step", "metrics", "train_step"],
    ".train.teacher": ["Teacher"],
    ".train.user_loss": ["token_scores"],
    ".train.watchdog": ["watchdog"],
}
_SUBMODULES = ("trl",)
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
_ERRORS = ["CheckpointError", "ConfigError", "HFScaleError", "MeshError", "PlanError"]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    if name == "__all__":
        return sorted(["__version__", *_ERRORS, *_MODULE_OF, *added("exports")])
    if name not in _MODULE_OF and (name.startswith("__") or name not in added("exports")):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module("._compat.versions", __name__).check_versions()
    if name not in _MODULE_OF:
        return provided("exports", name)
    value = getattr(importlib.import_module(_MODULE_OF[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})


class _Package(ModuleType):
    """Keep ``hfscale.plan`` and similar names functions, even after a submodule of the same name is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system sets each imported submodule as an attribute of the package.
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
