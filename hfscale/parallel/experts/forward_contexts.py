"""Track the forward passes of a model, so that each MoE layer, also when recomputed, finds the padding and the loss of
its pass.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...distributed.ops.collectives import apply_mapping, tied
from ...errors import ConfigError
from ...train.runtime.forward_passes import ForwardPasses


@dataclass
class Pass:
    """Hold the state of one forward pass that MoE layers read and update."""

    real: Tensor  # ``[b, s]``, true for tokens that are not padding
    tokens: Tensor  # the number of tokens, without padding, by which router losses of this pass are divided
    seed: int | None = None  # seed of the routers' random numbers; ``None``: routers draw none
    # the gradient of the step's loss, set in the backward pass; ``None`` without a loss
    scale: Tensor | float | None = None
    # batch size and tokens per sequence on each expert rank; empty until a layer needs them
    shapes: list[tuple[int, int]] = field(default_factory=list)
    loss: Tensor | None = None  # the sum of the layers' router losses in this pass, detached

    def add(self, share: Tensor) -> None:
        """Add ``share``, a layer's router loss, to ``loss``."""
        self.loss = share.detach() if self.loss is None else self.loss + share.detach()


class ForwardContexts(ForwardPasses[Pass]):
    """Keep, for the latest forward passes of a model, the data that their MoE layers read and update."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        # the number of real tokens in the current step, over all ranks; ``None`` outside ``train_step``
        self.tokens: Tensor | None = None
        self.draws = draws
        self._with_labels = False

    def install(self, model: nn.Module) -> None:
        """Install hooks on the model that make a :class:`Pass` for each forward pass, and add its router losses to the
        model's loss.
        """
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after)

    def _before(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        given = {
            **dict(zip(inspect.signature(model.forward).parameters, args, strict=False)),
            **kwargs,
        }
        self._with_labels = given.get("labels") is not None
        real = real_tokens(given)
        seed = int(torch.randint(2**31, ())) if self.draws and model.training else None
        tokens = real.sum() if self.tokens is None else self.tokens
        self.begin(Pass(real, tokens.clamp(min=1), seed))

    def _after(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        output: Any,
    ) -> Any:
        current = self.latest
        if not self._with_labels or current.loss is None:
            return output
        # ``train_step`` reports the mean over tokens without router losses, so that runs can be compared.
        share = current.loss if self.tokens is None else torch.zeros_like(current.loss)
        if isinstance(output, tuple):
            return (_added(output[0], share, current), *output[1:])
        if getattr(output, "loss", None) is not None:
            output.loss = _added(output.loss, share, current)
        return output


def real_tokens(batch: Mapping[str, Any]) -> Tensor:
    """Return ``[b, s]``: True for tokens that are not padding, according to the attention mask of ``batch``. With a 4-D
    mask ``[b, 1, s, s]``, boolean or additive, tokens that attend to themselves count as not padding.

    Raises:
        ConfigError: the mask has another shape, or the batch has neither token ids nor embeddings.
    """
    ids = batch.get("input_ids")
    tokens = batch.get("inputs_embeds") if ids is None else ids
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        raise ConfigError(
            "routing= needs input_ids or inputs_embeds in every batch, but this batch has neither: add one of them"
        )
    samples, length = tokens.shape[:2]
    mask = batch.get("attention_mask")
    if isinstance(mask, Mapping):  # one mask for each kind of layer
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    if mask is None:
        return torch.ones(samples, length, dtype=torch.bool, device=tokens.device)
    if mask.ndim == 2 and mask.shape[1] >= length:  # a mask is longer with a cache
        return mask[:, mask.shape[1] - length :].to(tokens.device, torch.bool)
    if mask.ndim == 4 and mask.shape[-2] == length <= mask.shape[-1]:
        itself = mask[:, 0].diagonal(mask.shape[-1] - length, -2, -1).to(tokens.device)
        attends = itself > -1.0 if itself.is_floating_point() else itself.bool()
        return attends.expand(samples, length)
    raise ConfigError(
        f"attention_mask must have the shape [samples, tokens] or [samples, 1, tokens, tokens] for {samples} x "
        f"{length} tokens, got {tuple(mask.shape)}: give such a mask, because routing= must know which tokens are "
        "padding"
    )


def _added(loss: Tensor, share: Tensor, current: Pass) -> Tensor:
    """Add ``share``, the sum of the layers' router losses, to the model's ``loss``.

    In the backward pass, store the gradient of the loss in ``current.scale``: the layers multiply the gradients of
    their router losses by it.
    """

    def record(grad: Tensor) -> Tensor:
        current.scale = grad
        return grad

    return apply_mapping(loss, lambda loss: loss + share.to(loss.device), record)


def attach(x: Tensor, share: Tensor, current: Pass, times: float) -> Tensor:
    """Return the activation ``x`` unchanged, but make its backward pass also run the backward pass of ``share``, a
    scalar term of the loss.

    The gradient of the term is ``current.scale * times``. In this way a layer's router loss needs no autograd path to
    the model's loss, which recomputed layers and pipeline stages do not have.
    """

    def backward(grad: Tensor) -> Any:
        return None if current.scale is None else torch.ones_like(grad) * current.scale * times

    return tied(x, [apply_mapping(share, None, backward)])
