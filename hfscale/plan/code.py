"""What the source of a stock class says that its config does not."""

import inspect

from torch import nn


def has_own_loss(model: nn.Module) -> bool:
    """Whether the model's forward takes a cross entropy of its own, and never the host's ``loss_function``."""
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    names = set(code.co_names) if code is not None else set()
    return "loss_function" not in names and bool(names & {"CrossEntropyLoss", "cross_entropy"})


def looks_up_like_stock(embedding: nn.Embedding) -> bool:
    """Whether the lookup itself is ``nn.Embedding``'s, with or without something (a scale) around it."""
    forward = type(embedding).forward
    return forward is nn.Embedding.forward or "super().forward(" in inspect.getsource(forward)


def scores_by_sigmoid(router: nn.Module) -> bool:
    """Whether a router makes scores of its logits with a sigmoid, and never with a softmax."""
    code = getattr(inspect.unwrap(type(router).forward), "__code__", None)
    names = set(code.co_names) if code is not None else set()
    return "sigmoid" in names and "softmax" not in names
