"""What the one process and the ranks of a draw build alike: configs, arguments, optimizers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedConfig

from ... import _host
from ..families import config_of
from .draw import Draw

AUTO = AutoModelForCausalLM
DECAY = 0.1


def stock_config(draw: Draw) -> PreTrainedConfig:
    """The config of the draw's model."""
    changes = {k: v for k, v in draw.config.items() if k != "pad_token_id"}
    if "pad_token_id" in draw.config:
        changes["pad_token_id"] = draw.config["pad_token_id"]
    config: PreTrainedConfig = config_of(draw.family, draw.layers, **changes)
    return config


def dtype_of(draw: Draw) -> torch.dtype:
    """The weights' type."""
    found: torch.dtype = getattr(torch, draw.dtype)
    return found


def arguments(draw: Draw) -> dict[str, Any]:
    """What both give to ``from_pretrained`` and ``from_config`` besides the type."""
    chosen: dict[str, Any] = {}
    if draw.attention is not None:
        chosen["attn_implementation"] = draw.attention
    return chosen


def quantization(draw: Draw) -> dict[str, Any]:
    """``quantization_config``, where there is one."""
    if draw.quantize is None:
        return {}
    if draw.quantize == "int8":
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    four = {"bnb_4bit_quant_type": draw.quantize, "bnb_4bit_compute_dtype": dtype_of(draw)}
    return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **four)}


def prepared(model: Any, draw: Draw) -> Any:
    """Frozen, recomputed and in training as drawn."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in draw.frozen):
            parameter.requires_grad_(False)
    _host.use_eager_experts(model)
    model.train()
    if draw.checkpointing:
        from contextlib import nullcontext

        from ..precision import keep_float64

        context = keep_float64 if draw.dtype == "float64" else nullcontext
        _host.enable_checkpointing(model, context_fn=lambda: (nullcontext(), context()))
    return model


def in_float64(model: nn.Module) -> None:
    """The host keeps some modules in float32."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float64:
            parameter.data = parameter.data.double()


def is_named(draw: Draw) -> bool:
    """Whether the optimizer is one of :func:`hfscale.create_optimizer`."""
    return not hasattr(torch.optim, draw.optimizer)


def stock_optimizer(draw: Draw, model: nn.Module) -> torch.optim.Optimizer:
    """As a script, or HF Trainer, makes it in one process."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not is_named(draw):
        found: torch.optim.Optimizer = getattr(torch.optim, draw.optimizer)(trained.values(), lr=draw.learning_rate)
        return found
    from transformers import Trainer

    decaying = Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
    args: Any = SimpleNamespace(
        optim=draw.optimizer,
        learning_rate=draw.learning_rate,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        optim_args=None,
    )
    stock, options = Trainer.get_optimizer_cls_and_kwargs(args)
    groups = [
        {"params": [p for n, p in trained.items() if n in decaying], "weight_decay": DECAY},
        {"params": [p for n, p in trained.items() if n not in decaying], "weight_decay": 0.0},
    ]
    made: torch.optim.Optimizer = stock(groups, **options)
    return made


def loses_bits(draw: Draw) -> bool:
    """Whether the optimizer makes large differences of rounding: signs, orthogonal matrices, eight bits."""
    return draw.optimizer.startswith(("lion", "muon")) or "8bit" in draw.optimizer


def adapter(directory: Path) -> str:
    """Where the adapter lies that both start from."""
    return str(directory / "adapter")
