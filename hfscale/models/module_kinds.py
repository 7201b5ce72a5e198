"""Recognize projections, experts and losses in stock modules, by their classes, attributes and code."""

import inspect
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from .fields import first_count, text_config

# The loss that can be computed from sharded logits: position ``i`` predicts token ``i + 1``
SHIFTED = "ForCausalLM"

EXPERT_FIELDS = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
)
"""Config fields with the number of experts."""

_EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
)
# Attributes of modules with transformers' use_experts_implementation.
_MARKS = ("has_gate", "has_bias", "is_transposed", "num_experts")
PROJECTIONS = (nn.Linear, Conv1D)

# Size attribute of a projection -> the dim of its weight with this size. The weight of nn.Linear is [out, in], that of
# Conv1D is [in, out] = [nx, nf].
_SIZE_ATTRIBUTES = {"out_features": 0, "in_features": 1, "nx": 0, "nf": 1}
_TOKENWISE = (*PROJECTIONS, nn.Dropout, nn.Identity, nn.Embedding)
_LOSSES = {"CrossEntropyLoss", "cross_entropy", "NLLLoss", "nll_loss"}


def experts_per_token(config: Any) -> int | None:
    """Return the number of experts per token in the config; ``None`` if it has no such field."""
    return first_count(text_config(config), _EXPERTS_PER_TOKEN)


def holds_experts(module: Any) -> bool:
    """Return whether a module holds all experts' weights stacked like transformers' own experts, so that ranks can
    shard them.
    """
    return isinstance(module, nn.Module) and all(hasattr(module, mark) for mark in _MARKS)


def takes_routes(module: nn.Module) -> bool:
    """Return whether a module is called like transformers' experts: with tokens, chosen experts and weights."""
    names = list(inspect.signature(module.forward).parameters)
    return type(module).__name__.endswith("Experts") and names[1:2] in (
        ["top_k_index"],
        ["router_indices"],
    )


def has_one_per_expert(module: nn.Module, experts: int) -> bool:
    """Return whether a module has one matrix, or one child, for each of ``experts``."""
    if isinstance(module, nn.ModuleList):
        return len(module) == experts
    own = list(module.parameters(recurse=False))
    stacked = any(parameter.ndim == 3 and parameter.shape[0] == experts for parameter in own)
    return stacked or (
        "Expert" in type(module).__name__ and any(parameter.ndim > 1 for parameter in own)
    )


def is_transposed(module: Any) -> bool:
    """Return whether a module keeps its weight as ``[in, out]``."""
    return isinstance(module, Conv1D)


def weight_dims(module: Any) -> tuple[int, int]:
    """Return the dim of outputs and the dim of inputs of a projection's weight."""
    return (1, 0) if is_transposed(module) else (0, 1)


def follow_weight(module: Any) -> None:
    """Set the size attributes of a projection to the sizes of its local weight."""
    for attribute, dim in _SIZE_ATTRIBUTES.items():
        if attribute in module.__dict__ and module.weight.ndim == 2:
            setattr(module, attribute, module.weight.shape[dim])


def is_tokenwise(module: nn.Module) -> bool:
    """Return whether a module is known to compute each token by itself."""
    return isinstance(module, _TOKENWISE) or "Norm" in type(module).__name__


def has_own_loss(model: nn.Module, head: nn.Module | None) -> bool:
    """Return whether the forward of a model, or of the module that contains ``head``, computes a cross entropy itself
    instead of calling ``loss_function``.
    """
    around = (
        m for m in model.modules() if m is model or any(child is head for child in m.children())
    )
    names = {name for module in around for name in used_names(type(module))}
    return "loss_function" not in names and bool(names & _LOSSES)


def used_names(kind: type[Any]) -> tuple[str, ...]:
    """Return the names that a class's forward uses, then the names that the methods it calls use, recursively."""
    names: dict[str, None] = {}
    waiting = ["forward"]
    while waiting:
        method = inspect.getattr_static(kind, waiting.pop(), None)
        code = (
            getattr(inspect.unwrap(method), "__code__", None)
            if inspect.isfunction(method)
            else None
        )
        new = [name for name in _names_in(code) if name not in names]
        names.update(dict.fromkeys(new))
        waiting += new
    return tuple(names)


def _names_in(code: Any) -> list[str]:
    """Return the names that a code object uses, including those in its comprehensions."""
    inner = (
        inner_code for inner_code in getattr(code, "co_consts", ()) if inspect.iscode(inner_code)
    )
    return [
        *getattr(code, "co_names", ()),
        *(name for inner_code in inner for name in _names_in(inner_code)),
    ]


def looks_up_like_stock(embedding: nn.Embedding) -> bool:
    """Return whether an embedding's forward is that of ``nn.Embedding``, possibly with a scaled result."""
    forward = type(embedding).forward
    return forward is nn.Embedding.forward or "super().forward(" in inspect.getsource(forward)


def scores_by_sigmoid(router: nn.Module) -> bool:
    """Return whether a router computes scores with a sigmoid, and never with a softmax."""
    code = getattr(inspect.unwrap(type(router).forward), "__code__", None)
    names = set(code.co_names) if code is not None else set()
    return "sigmoid" in names and "softmax" not in names
