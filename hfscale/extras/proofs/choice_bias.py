"""Prove which tensors a router adds to its scores only to choose experts, not to weight them (Wang et al. 2024)."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.transformers.classes import from_config
from ..._compat.transformers.experts import use_eager_experts
from ...models.clone import layers_of_every_kind
from ...models.fields import text_config
from ...models.module_kinds import holds_experts
from ...models.names import wild_name
from .probe import end_texts, perturb, tiny_model_of, without_cache

_LITTLE = 1e-3
_MUCH = 100.0
_CALLED = ("bias", "biases")
Routes = tuple[Tensor, Tensor]  # indices and weights of the chosen experts


def prove_choice_bias(model: Any, kind: Any) -> tuple[dict[str, str], bool]:
    """Find the biases that affect only the choice of experts, not their routing weights. Return a map from the name of
    each experts module to the name of its bias within the enclosing module, and whether the answer holds for all sizes
    (always true).

    A tensor is such a bias if a small change that leaves the choice as it is changes no routing weight, and if one
    large entry makes its expert chosen. If no tiny copy of the model can be made, a tensor of the right shape whose
    name ends in "bias" is taken. The model, of the stock class ``kind``, may be parallelized.
    """
    biases: dict[str, str] = {}
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        with torch.device("meta"):
            whole = from_config(kind, model.config, dtype=torch.float32)
        layers = max(layers_of_every_kind(model.config), _layers_of_every_block(whole))
        clone: Any = tiny_model_of(kind, model.config, torch.float32, layers=layers)
        if clone is not None:
            perturb(clone.eval(), 0.1)
            use_eager_experts(clone)
        for name, block, experts in _mixtures(whole if clone is None else clone):
            for inner, tensor in _candidates(block, experts):
                if (
                    inner.endswith(_CALLED)
                    if clone is None
                    else _is_for_the_choice(clone, block, experts, tensor)
                ):
                    biases.setdefault(wild_name(name), inner)
    return biases, True


def _mixtures(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield (name, enclosing module, module) for each module that holds a layer's experts."""
    for name, module in model.named_modules():
        if holds_experts(module):
            yield name, model.get_submodule(name.rpartition(".")[0]), module


def _layers_of_every_block(whole: nn.Module) -> int:
    """Return how many layers, from the first on, include an MoE layer of each structure: some families begin with dense
    layers.
    """
    firsts: dict[frozenset[str], int] = {}
    for name, block, experts in _mixtures(whole):
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        firsts.setdefault(
            frozenset(dict(_candidates(block, experts))), numbers[0] if numbers else 0
        )
    return 1 + max(firsts.values(), default=0)


def _candidates(block: nn.Module, experts: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, vector) for the vectors in an MoE layer ``block``, outside of its experts, that its class does not
    train and that have at least one entry per expert.
    """
    inside = {id(tensor) for tensor in (*experts.parameters(), *experts.buffers())}
    frozen = (
        (name, parameter)
        for name, parameter in block.named_parameters()
        if not parameter.requires_grad
    )
    for name, tensor in (*block.named_buffers(), *frozen):
        is_vector = (
            tensor.is_floating_point() and tensor.ndim > 0 and tensor.numel() == max(tensor.shape)
        )
        if is_vector and tensor.numel() >= experts.num_experts and id(tensor) not in inside:
            yield name, tensor


def _is_for_the_choice(clone: Any, block: nn.Module, experts: Any, tensor: Tensor) -> bool:
    before = tensor.clone()
    first = _routes(clone, block, experts)
    tensor.add_(torch.rand_like(tensor) * _LITTLE)
    little = _routes(clone, block, experts)
    tensor.copy_(before)
    tensor.view(-1)[0] += _MUCH
    much = _routes(clone, block, experts)
    tensor.copy_(before)
    if first is None or little is None or much is None:
        return False
    same = (first[0] == little[0]).all(-1)
    weighs = not torch.equal(first[1][same], little[1][same])
    chooses = bool((much[0] == 0).any(-1).all()) and not torch.equal(much[0], first[0])
    return bool(same.any()) and chooses and not weighs


def _routes(clone: Any, block: nn.Module, experts: nn.Module) -> Routes | None:
    """Return the indices and weights ``[n, k]`` of the ``k`` experts of each token, with which a clone's ``block``
    calls its ``experts``.

    The block runs within the model, or alone if the model needs more inputs than tokens. Return ``None`` if neither can
    run.
    """
    taken: list[Routes] = []

    def take(
        _: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        index, weights = [*args, *kwargs.values()][1:3]
        taken.append((index.clone(), weights.clone()))

    ids = torch.randint(
        3,
        60,
        (2, 7),
        generator=torch.Generator().manual_seed(1),
    )
    end_texts(ids, clone.config)
    given = {"decoder_input_ids": ids} if clone.config.is_encoder_decoder else {}
    hidden = torch.randn(
        2, 7, text_config(clone.config).hidden_size, generator=torch.Generator().manual_seed(1)
    )
    handle = experts.register_forward_pre_hook(take, with_kwargs=True)
    try:
        for run in (
            lambda: clone(input_ids=ids, **given, **without_cache(clone)),
            lambda: block(hidden),
        ):
            with suppress(Exception):  # stock code may need more inputs
                run()
            if taken:
                return taken[0]
    finally:
        handle.remove()
    return None
