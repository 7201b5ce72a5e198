"""Prove that a model's attention scores can be scaled, head by head, by weights and biases of its projections."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.transformers.experts import use_eager_experts
from ...models.clone import layers_of_every_kind
from ...models.fields import HEAD_FIELDS, first_count
from ...models.precision import keep_float64
from ..proofs.probe import apart, perturb, tiny_model_of, without_cache
from .clip import PROJECTIONS, LargestScores, along_outputs, scale_scores

_TOLERANCE = 1e-9


def prove_score_scaling(model: Any, kind: Any) -> tuple[dict[str, str], bool]:
    """Map each class of attention modules (called through transformers' attention functions) to the reason why its
    scores cannot be scaled; empty if they can. The model, of the stock class ``kind``, may be parallelized.
    """
    answers = dict[str, str]()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad(), keep_float64():
        torch.manual_seed(0)
        clone: Any = tiny_model_of(
            kind, model.config, torch.float64, layers=layers_of_every_kind(model.config)
        )
        ids = torch.randint(3, 60, (2, 7))
        if clone is None:
            return {}, True
        perturb(clone.double().train(), 3.0)  # so that clipping models clip
        use_eager_experts(clone)
        scores = LargestScores(clone, clone.modules())

        def measured() -> dict[nn.Module, Tensor]:
            with torch.enable_grad():  # as in training
                clone(input_ids=ids, **without_cache(clone))
            return scores.take()

        try:
            modules = list(measured())
        except Exception:  # stock code may need more than tokens
            return {}, True
        for module in modules:
            answers[type(module).__name__] = answers.get(type(module).__name__) or _why_not(
                module, measured
            )
    return answers, True


def _why_not(module: Any, measured: Callable[[], dict[nn.Module, Tensor]]) -> str:
    """Scale the projections of a module's heads by random factors; return why the attention scores do not scale by the
    same factors, or an empty string if they do.
    """
    if not all(isinstance(getattr(module, each, None), nn.Linear) for each in PROJECTIONS):
        return f"has no linear layers {' and '.join(PROJECTIONS)} (it has latent attention or fused projections)"
    projections = [getattr(module, each) for each in PROJECTIONS]
    before = measured()[module]
    gamma = torch.rand_like(before) + 0.1
    if len(gamma) != first_count(module.config, HEAD_FIELDS):
        return "has another number of heads than its config says"
    outputs = [len(each.weight) for each in projections]
    for projection, factors in zip(projections, scale_scores(gamma, outputs), strict=True):
        for parameter in projection.parameters():
            parameter.mul_(along_outputs(factors, parameter.shape))
    follows = apart(measured()[module], before * gamma) <= _TOLERANCE
    return (
        "" if follows else "normalizes, clips or changes queries or keys behind their projections"
    )
