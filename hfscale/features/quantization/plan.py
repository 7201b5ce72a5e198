"""Plan which weights a frozen base model holds in 4 or 8 bits. Raise for unsupported options before any weight is
read.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import BitsAndBytesConfig

from ..._compat.transformers.classes import class_name
from ..._compat.transformers.loading import quantizes
from ...errors import ConfigError
from ...extensions import added
from ...models.module_kinds import is_transposed
from ...plan import Plan
from ...plan.drafting.draft import Planned
from ...plan.quantized import QuantizedPlan


def holds_quantized(model: Planned) -> bool:
    """Return whether weights are held quantized."""
    return model.plan.quantized is not None


def holds_4_bits(model: Planned) -> bool:
    """Return whether weights are held in bitsandbytes' 4 bits."""
    quantized = model.plan.quantized
    return quantized is not None and quantized.bits == 4 and quantized.by_bitsandbytes


def check_quantization(config: Any) -> None:
    """Raise :class:`ConfigError` if hfscale does not support the ``quantization_config``."""
    names = [*added("quantizations")]
    if config is None or config in names:
        return
    if not isinstance(config, BitsAndBytesConfig) or not (
        config.load_in_4bit or config.load_in_8bit
    ):
        raise ConfigError(
            f"quantization_config={config!r} is not one that hfscale can shard: pass "
            "transformers.BitsAndBytesConfig(load_in_4bit=True, ...), or BitsAndBytesConfig(load_in_8bit=True), or "
            f"one of {names} for a checkpoint of quantized weights; or leave it out to load weights in 16 or 32 bits"
        )
    if config.load_in_8bit and config.llm_int8_has_fp16_weight:
        raise ConfigError(
            "llm_int8_has_fp16_weight=True keeps the weights in 16 bits and quantizes them in every forward pass, "
            "which hfscale cannot shard: leave llm_int8_has_fp16_weight out, or use load_in_4bit=True"
        )
    if config.llm_int8_enable_fp32_cpu_offload:
        raise ConfigError(
            "llm_int8_enable_fp32_cpu_offload=True splits the model over devices, but each rank uses one device: "
            "leave llm_int8_enable_fp32_cpu_offload out"
        )
    with suppress(ImportError):  # import it before transformers, which reports if it is missing
        importlib.import_module("bitsandbytes")


def check_trainable(planned: Plan, adapters: bool) -> None:
    """Raise :class:`ConfigError` if an extension's quantization keeps weights, and there are no ``adapters`` to
    train.
    """
    quantized = planned.quantized
    if quantized is not None and not quantized.by_bitsandbytes and not adapters:
        raise ConfigError(
            f"quantization_config keeps {len(quantized.weights)} weights in {quantized.kind}, which do not train: add "
            "adapters (peft_config=LoraConfig(...)), or leave quantization_config out, and train dequantized weights"
        )


def split_quantization(config: Any) -> tuple[Any, BitsAndBytesConfig | None]:
    """Separate a model config from the ``quantization_config`` of weights that are stored in bitsandbytes' 4 bits.

    Return a copy of ``config`` without ``quantization_config``, and the ``BitsAndBytesConfig``; or ``config`` itself
    and ``None`` if its weights are not stored in 4 bits.
    """
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


def weights_of_experts(
    planned: Plan, model: nn.Module, chosen: Callable[[str], bool]
) -> Iterator[str]:
    """Yield the names of the experts' weights in those mixtures whose names are ``chosen``."""
    for mixture in planned.mixtures:
        if chosen(mixture.name):
            held = model.get_submodule(mixture.name).named_parameters(prefix=mixture.name)
            yield from (name for name, parameter in held if parameter.ndim == 3)


def vocabulary_weights(planned: Plan) -> set[str | None]:
    """Return the names of the weights of the head and the embedding, and of all tied weights."""
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
    """Raise :class:`ConfigError` if ``weights`` contains the head, the embedding, or a tied weight."""
    kept = vocabulary_weights(planned)
    for name in weights:
        if name in kept:
            raise ConfigError(
                f"{name} cannot be quantized, since it belongs to the head or the embedding, or is tied to another "
                f"module: add {name.removesuffix('.weight')!r} to "
                f"llm_int8_skip_modules={config.llm_int8_skip_modules} (by default transformers skips it)"
            )


def plan_quantized(
    planned: Plan,
    model: nn.Module,
    config: Any,
    stored: bool = False,
) -> Plan:
    """Return ``planned`` with the plan of the weights of the full stock ``model`` that ``config`` quantizes.

    These are the weights that transformers quantizes: every ``nn.Linear`` and ``Conv1D`` except
    ``llm_int8_skip_modules``. In 4 bits, the experts of every MoE layer are quantized too, each matrix by itself,
    unless ``llm_int8_skip_modules`` names them.

    Args:
        stored: whether the checkpoint's weights are quantized. Experts then stay in 16 bits, as transformers stores
            them.

    Raises:
        ConfigError: a weight of the embedding or the head, or a tied weight, would be quantized.
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
            f"load_in_8bit=True cannot be used with {planned.layout.describe()} in {class_name(model)}: data ranks "
            "would split the rows of Conv1D weights, but 8-bit weights have one scale per row: use "
            "load_in_4bit=True, or dp_shard_size=1"
        )
    if config.load_in_4bit and not stored:
        weights += weights_of_experts(planned, model, chosen)
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
