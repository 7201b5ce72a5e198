"""A frozen base model in 4 or 8 bits, in any layout (QLoRA, Dettmers et al. 2023; LLM.int8(), Dettmers et al. 2022).

``quantization_config=BitsAndBytesConfig(...)`` is transformers' own. Here quantized weights are planned, checked before
any weight is read, and installed at the end; :mod:`hfscale.features.quantization.arrival` quantizes them while they are
loaded.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

from ..._compat import bitsandbytes
from ..._compat.torch import own_parameters
from ..._compat.transformers.classes import class_name
from ..._compat.transformers.loading import quantizes
from ...distributed.ops.grouped_linear import frozen_linear
from ...distributed.ops.quantized_weights import (
    Encoding,
    encodings_of,
    gathered,
    read_quantized,
    register_quantized,
)
from ...distributed.ops.shared_casts import autocasted
from ...errors import ConfigError
from ...models.module_kinds import is_transposed
from ...plan import Plan
from ...plan.quantized import AS_STORED, QuantizedPlan
from ...train.runtime.parameter_names import owner_of

ROWS = "ShardedLinear8bitLt"


def check_quantization(config: Any) -> None:
    """Raise :class:`ConfigError`, saying what to change, if hfscale cannot quantize a model as ``config`` says."""
    if config is None or config == AS_STORED:
        return
    if not isinstance(config, BitsAndBytesConfig) or not (
        config.load_in_4bit or config.load_in_8bit
    ):
        raise ConfigError(
            f"quantization_config={config!r} is not one that hfscale can shard: pass "
            "transformers.BitsAndBytesConfig(load_in_4bit=True, ...) or BitsAndBytesConfig(load_in_8bit=True), or "
            "'as_stored' for a checkpoint of quantized weights, or leave it out, and load the weights in 16 or 32 bits"
        )
    if config.load_in_8bit and config.llm_int8_has_fp16_weight:
        raise ConfigError(
            "llm_int8_has_fp16_weight=True keeps the weights in 16 bits and quantizes them in every pass: leave "
            "it out, or use load_in_4bit=True"
        )
    if config.llm_int8_enable_fp32_cpu_offload:
        raise ConfigError(
            "llm_int8_enable_fp32_cpu_offload=True splits the model over devices: leave it out"
        )
    with suppress(ImportError):  # import it before transformers, which reports if it is missing
        importlib.import_module("bitsandbytes")


def check_trainable(planned: Plan, adapters: bool) -> None:
    """Raise :class:`ConfigError` if weights stay as they are stored and there are no adapters to train."""
    quantized = planned.quantized
    if quantized is not None and quantized.as_stored and not adapters:
        raise ConfigError(
            f"quantization_config='as_stored' keeps {len(quantized.weights)} weights in {quantized.kind}, which do not "
            "train: add adapters (peft_config=LoraConfig(...)), or leave it out, and train plain values"
        )


def split_quantization(config: Any) -> tuple[Any, BitsAndBytesConfig | None]:
    """Return a config without bitsandbytes' description of stored weights, and that; or itself, and ``None``."""
    quantization = getattr(config, "quantization_config", None)
    values = (
        quantization
        if isinstance(quantization, dict) or quantization is None
        else quantization.to_dict()
    )
    if (
        values is None
        or values.get("quant_method") != "bitsandbytes"
        or not values.get("load_in_4bit")
    ):
        return config, None
    plain = copy(config)
    del plain.quantization_config
    return plain, BitsAndBytesConfig.from_dict(values)


def packable(planned: Plan, model: nn.Module) -> list[str]:
    """Return the full ``model``'s weights that can stay as stored: projections' and experts', no head or tied one."""
    linear = [
        f"{name}.weight" for name, module in model.named_modules() if type(module) is nn.Linear
    ]
    named = {
        *linear,
        *_weights_of_experts(planned, model, lambda name: True),
    } - _vocabulary_weights(planned)
    return [parameter.name for parameter in planned.parameters if parameter.name in named]


def _weights_of_experts(
    planned: Plan, model: nn.Module, chosen: Callable[[str], bool]
) -> Iterator[str]:
    for mixture in planned.mixtures:
        if chosen(mixture.name):
            held = model.get_submodule(mixture.name).named_parameters(prefix=mixture.name)
            yield from (name for name, parameter in held if parameter.ndim == 3)


def _vocabulary_weights(planned: Plan) -> set[str | None]:
    """Return the weights of the head and the embedding, and tied ones."""
    vocabulary = {
        planned.by_name[f"{name}.weight"]
        for name in (planned.head, planned.embedding)
        if name is not None
    }
    kept = {name for parameter in vocabulary for name in (parameter.name, parameter.tied_to)}
    return kept | {
        name for p in planned.parameters if p.tied_to is not None for name in (p.name, p.tied_to)
    }


def _refuse_shared(planned: Plan, weights: list[str], config: Any) -> None:
    """Refuse to quantize the head, the embedding, and tied weights."""
    kept = _vocabulary_weights(planned)
    for name in weights:
        if name in kept:
            raise ConfigError(
                f"{name} cannot be quantized, since it is the head's or tied to another module: add "
                f"{name.removesuffix('.weight')!r} to llm_int8_skip_modules={config.llm_int8_skip_modules} (by "
                "default transformers skips it)"
            )


def plan_quantized(
    planned: Plan,
    model: nn.Module,
    config: Any,
    stored: bool = False,
) -> Plan:
    """Return the plan with the weights of the full stock ``model`` that ``config`` quantizes.

    These are the weights that transformers quantizes (every ``nn.Linear`` and ``Conv1D`` but its exceptions), and in 4
    bits the experts of every mixture, each matrix by itself, unless ``llm_int8_skip_modules`` names them. If the
    checkpoint holds them quantized (``stored``), experts are as transformers stores them, in 16 bits. Raise
    :class:`ConfigError` if a weight of an embedding or the head, or a tied one, would be quantized.
    """
    if config is None:
        return planned
    chosen = quantizes(model, config)
    linear = {
        f"{name}.weight": is_transposed(module)
        for name, module in model.named_modules()
        if (is_transposed(module) or type(module) is nn.Linear) and chosen(name)
    }
    weights = list(linear)
    transposed = {name for name, turned in linear.items() if turned}
    _refuse_shared(planned, weights, config)
    if config.load_in_8bit and transposed and planned.layout.dp_shard > 1:
        raise ConfigError(
            f"load_in_8bit=True cannot be used with {planned.layout.describe()} in {class_name(model)}, whose "
            "Conv1D weights are sharded over data ranks across the rows that have a scale each: use load_in_4bit=True, "
            "or dp_shard_size=1"
        )
    if config.load_in_4bit and not stored:
        weights += _weights_of_experts(planned, model, chosen)
    order = {parameter.name: place for place, parameter in enumerate(planned.parameters)}
    quantized = QuantizedPlan(
        bits=4 if config.load_in_4bit else 8,
        kind=config.bnb_4bit_quant_type if config.load_in_4bit else "int8",
        double=bool(config.load_in_4bit and config.bnb_4bit_use_double_quant and not stored),
        weights=tuple(sorted(weights, key=order.__getitem__)),
        transposed=frozenset(transposed),
        stored=stored,
    )
    return replace(planned, quantized=quantized)


def is_quantized(module: nn.Module, name: str = "weight") -> bool:
    """Return whether a direct parameter of ``module`` is held in 4 or 8 bits."""
    stock = bitsandbytes.is_stock_parameter(own_parameters(module).get(name))
    return (
        stock
        or name in encodings_of(module)
        or (name == "weight" and type(module).__name__ == ROWS)
    )


def dequantized(module: nn.Module, name: str = "weight") -> Tensor:
    """Return a local module's quantized weight in the dtype it came from; raise :class:`ConfigError` if it is not one.

    If data ranks shard it, all of them call this, and each gets the tensor gathered over the data axes: this rank's
    shard over the tensor, expert and pipeline axes. It is ``[out, in]`` for a projection (also a ``Conv1D``, which is
    stored transposed), and ``[experts, ...]`` for experts, as their module holds it.
    """
    parameter: Any = own_parameters(module).get(name)
    encoding = encodings_of(module).get(name)
    if encoding is not None:
        whole = encoding.decode(gathered(parameter))
        return whole if name != "weight" else whole[0]
    if not is_quantized(module, name):
        raise ConfigError(
            f"{type(module).__name__}.{name} is not quantized: it is {type(parameter).__name__}"
        )
    with torch.no_grad():
        if type(module).__name__ == ROWS:
            from .sharded_linears import float_scales

            rows: Any = own_parameters(module)["scales"]
            return bitsandbytes.functional().int8_vectorwise_dequant(
                gathered(parameter), float_scales(gathered(rows))
            )
        return bitsandbytes.dequantized_stock(module, parameter)


def beside_quantized(model: nn.Module) -> Iterator[Any]:
    """Yield what is needed beside ``model``'s quantized weights to read them; ``None`` for missing tensors."""
    for module in model.modules():
        if type(module).__name__ == ROWS:
            yield own_parameters(module)["scales"]
        yield from bitsandbytes.tensors_beside_weight(module)


class StoredLinear(nn.Linear):
    """Compute an ``nn.Linear`` of stored bytes: ``weight``, ``uint8 [data ranks, bytes]``, is decoded in each pass."""

    def forward(self, x: Tensor) -> Tensor:
        """Project ``x [..., in]`` to ``[..., out]``."""
        x = autocasted(x)
        return frozen_linear(
            x,
            None if self.bias is None else self.bias.to(x.dtype),
            self._product,
            self._read,
            by_values=True,
        )

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(x, self._read(x.dtype), bias)

    def _read(self, dtype: torch.dtype) -> Tensor:
        return read_quantized(self, "weight", dtype)[0]


def hold_quantized(model: nn.Module, name: str, encoding: Encoding) -> None:
    """Let the module of the parameter ``name`` compute with stored bytes; the parameter is on the meta device."""
    module, attribute = owner_of(model, name)
    if isinstance(module, nn.Linear):
        module.__class__ = StoredLinear
    register_quantized(module, attribute, encoding)
