"""What the one process and the ranks of a draw build alike: configs, arguments, optimizers."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedConfig

import hfscale
from hfscale._compat.transformers.computing import enable_checkpointing
from hfscale._compat.transformers.experts import use_eager_experts
from hfscale.models.precision import WIDENS_INSIDE, keep_float64
from hfscale.optim.factory import owners_of
from hfscale.optim.muon import is_hidden_matrix
from hfscale.testing.parity import plain_name
from hfscale.train.runtime import runtime_of

from ..families import config_of
from .draw import Draw
from .levers import COMPUTES, computes_in, planned_by, scaled_by

AUTO = AutoModelForCausalLM
DECAY = 0.1
EPS = 1e-5
"""Of optimizers that divide by the gradient: what is rounding in it must not become an update."""


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


def is_autocast(draw: Draw) -> bool:
    """Whether torch's autocast makes its mixed precision; data axes cast weights by themselves."""
    return (
        draw.mixed_precision in COMPUTES
        and draw.dtype != "float64"
        and draw.routing is None
        and (draw.parallel().data_world == 1 or draw.family in WIDENS_INSIDE)
    )


def narrow_type(draw: Draw) -> torch.dtype:
    """The type of the weights of stock code in the draw's precision."""
    return dtype_of(draw) if is_autocast(draw) else computes_in(draw)


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


def round_experts(model: Any, draw: Draw) -> None:
    """Experts, which the host leaves as they are and hfscale quantizes, with the values of bitsandbytes' bits.

    Without this, one process has another model than the layout.
    """
    planned = hfscale.plan(
        stock_config(draw), dtype=dtype_of(draw), **arguments(draw), **quantization(draw)
    )
    if draw.quantize not in ("nf4", "fp4") or planned.quantized is None:
        return
    from bitsandbytes import functional

    for name in planned.quantized.weights:
        parameter = model.get_parameter(name)
        if not parameter.is_floating_point():
            continue  # which the host has quantized
        for matrix in parameter.data:
            # Block after block: on CPUs bitsandbytes misreads matrices whose rows are no whole blocks.
            row = matrix.reshape(1, -1)
            packed, state = functional.quantize_4bit(row, blocksize=64, quant_type=draw.quantize)
            matrix.copy_(functional.dequantize_4bit(packed, state).view_as(matrix))
        parameter.requires_grad_(False)


def rectifies(draw: Draw) -> bool:
    """Whether an activation's derivative jumps."""
    return not {"relu", "relu6", "leaky_relu"}.isdisjoint(
        value
        for value in stock_config(draw).get_text_config().to_dict().values()
        if isinstance(value, str)
    )


def options(draw: Draw) -> dict[str, Any]:
    """What the layout is built with beside the type, and stock code knows nothing of."""
    memory = {} if draw.memory is None else {"memory": hfscale.MemoryConfig(**draw.memory)}
    routing = {} if draw.routing is None else {"routing": hfscale.RoutingConfig(**draw.routing)}
    return {**planned_by(draw), **scaled_by(draw), **memory, **routing}


def prepared(model: Any, draw: Draw, dtype: torch.dtype) -> Any:
    """Frozen, recomputed and in training as drawn."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in draw.frozen):
            parameter.requires_grad_(False)
    use_eager_experts(model)
    model.train()
    if draw.checkpointing:
        # The recomputation runs outside of the block in which the forward pass ran.
        enable_checkpointing(model, context_fn=lambda: (nullcontext(), exact(dtype)))
    return model


def exact(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Within: float64 stays float64."""
    return keep_float64() if dtype == torch.float64 else nullcontext()


def in_float64(model: nn.Module) -> None:
    """The host keeps some modules in float32."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float64:
            parameter.data = parameter.data.double()


def is_named(draw: Draw) -> bool:
    """Whether the optimizer is one of :func:`hfscale.create_optimizer`."""
    return not hasattr(torch.optim, draw.optimizer)


def torch_options(draw: Draw) -> dict[str, Any]:
    """Of a class of ``torch.optim``."""
    return {"lr": draw.learning_rate, **({} if draw.optimizer == "SGD" else {"eps": EPS})}


def named_options(draw: Draw) -> dict[str, Any]:
    """Of a name: arguments of :func:`hfscale.create_optimizer`."""
    own: dict[str, Any] = {"adamw_torch": {"eps": EPS}, "adagrad": {"optim_args": {"eps": EPS}}}
    own |= {
        "rmsprop": {"optim_args": {"eps": EPS}},
        "adafactor": {"optim_args": {"eps": (EPS**2, 1e-3)}},
    }
    by_chance = {"stochastic_rounding": True} if draw.stochastic_rounding else {}
    return {
        "lr": draw.learning_rate,
        "weight_decay": DECAY,
        **own.get(draw.optimizer, {}),
        **by_chance,
    }


def most_gain(draw: Draw) -> float:
    """The most that one update makes of an error in a gradient: of one that divides by its size, where that is zero."""
    return draw.learning_rate if draw.optimizer in ("SGD", "sgd") else draw.learning_rate / EPS


def stock_optimizers(draw: Draw, model: nn.Module, directory: Path) -> list[torch.optim.Optimizer]:
    """As a script, or HF Trainer, makes them in one process; two of them for Muon."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not is_named(draw):
        return [getattr(torch.optim, draw.optimizer)(trained.values(), **torch_options(draw))]
    from transformers import Trainer

    decaying = Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
    if draw.optimizer == "muon":
        return _muon(draw, trained, decaying, directory)
    args: Any = SimpleNamespace(
        optim=draw.optimizer,
        learning_rate=draw.learning_rate,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        optim_args=None,
    )
    stock, options = Trainer.get_optimizer_cls_and_kwargs(args)
    own = named_options(draw)
    options |= own.get("optim_args", {}) | ({"eps": own["eps"]} if "eps" in own else {})
    return [stock(_by_decay(trained, decaying), **options)]


def _by_decay(named: dict[str, Any], decaying: list[str]) -> list[dict[str, Any]]:
    return [
        {"params": [p for n, p in named.items() if n in decaying], "weight_decay": DECAY},
        {"params": [p for n, p in named.items() if n not in decaying], "weight_decay": 0.0},
    ]


def _muon(
    draw: Draw, trained: dict[str, Any], decaying: list[str], directory: Path
) -> list[torch.optim.Optimizer]:
    """Muon over the matrices of the layers, AdamW over the rest: the division is hfscale's own."""
    layers = hfscale.plan(stock_config(draw), **arguments(draw)).layers
    model = hfscale.from_pretrained(str(directory / "start"), **arguments(draw))
    owners = owners_of(model)
    plans = runtime_of(model)
    hidden = {
        p.name
        for p, live in plans.parameters()
        if is_hidden_matrix(p, owners.get(id(live), []), layers)
    }
    chosen = {n: p for n, p in trained.items() if plain_name(n) in hidden}
    rest = {n: p for n, p in trained.items() if n not in chosen}
    return [
        torch.optim.Muon(_by_decay(chosen, decaying), lr=draw.learning_rate),
        torch.optim.AdamW(_by_decay(rest, decaying), lr=draw.learning_rate),
    ]


def loses_bits(draw: Draw) -> bool:
    """Whether the optimizer makes large differences of rounding: signs, orthogonal matrices, eight bits."""
    return draw.optimizer.startswith(("lion", "muon")) or "8bit" in draw.optimizer


def adapter(draw: Draw, directory: Path) -> Any:
    """What the layout is given for ``peft_config``."""
    if draw.peft is not None and (draw.peft_fresh or "prompt" in draw.peft):
        return peft_config(draw)
    return str(directory / "adapter")


@contextmanager
def prompts_drawn(draw: Draw) -> Iterator[None]:
    """Within: PEFT draws prompts in the draw's type where that is float64, as data axes can give them no other."""
    before = torch.get_default_dtype()
    if "prompt" in (draw.peft or {}) and dtype_of(draw) == torch.float64:
        torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def peft_config(draw: Draw) -> Any:
    """PEFT's config of the draw's adapter or prompt."""
    import peft

    fields = dict(draw.peft or {})
    return getattr(peft, fields.pop("prompt", "LoraConfig"))(**fields)
