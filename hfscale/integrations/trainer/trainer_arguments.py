"""Complete the arguments of a Trainer: give names to positional arguments, add TRL's default config, and shard
reference and teacher models.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..._compat.trl import default_config
from ...config.parallel import ParallelConfig
from ...train.runtime import find_runtime

SECOND_MODELS = ("ref_model", "teacher_model")


def by_name(
    init: Callable[..., Any], given: Sequence[Any], named: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional arguments after the model by their names in ``init``; arguments without a name stay
    positional.
    """
    names = [
        name
        for name, parameter in inspect.signature(init).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    own = names[1 : len(given) + 1]
    if len(own) < len(given) or set(own) & set(named):
        return list(given), named  # the call itself will raise the right error
    return [], dict(zip(own, given, strict=True)) | named


def with_default_config(
    kind: type, init: Callable[..., Any], model: Any, named: dict[str, Any]
) -> dict[str, Any]:
    """Return arguments with the config that TRL would create, in the precision of a model that has been built."""
    if (
        model is None
        or named.get("args") is not None
        or "args" not in inspect.signature(init).parameters
    ):
        return named
    runtime = find_runtime(model) if isinstance(model, nn.Module) else None
    precision = {}
    if runtime is not None:
        built = runtime.options.around_products
        precision = {name: name == built for name in ("bf16", "fp16")}
    config = default_config(kind, model, **precision)
    return named if config is None else {**named, "args": config}


def with_second_models(
    named: dict[str, Any], layout: ParallelConfig, cut: Callable[[nn.Module], Any]
) -> dict[str, Any]:
    """Return arguments in which stock references and teachers are sharded in place like the trained model."""
    given = {name: named[name] for name in SECOND_MODELS if isinstance(named.get(name), nn.Module)}
    stock = {name: model for name, model in given.items() if find_runtime(model) is None}
    if layout.total_size == 1:
        stock.pop("ref_model", None)  # in one process, stock code runs unchanged
    return named | {name: cut(model) for name, model in stock.items()}
