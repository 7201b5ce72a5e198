"""Track the forward passes of a model, so that its layers can find batch and loss of each."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...errors import ConfigError
from ...train.runtime.forward_passes import ForwardPasses


@dataclass
class Pass:
    """Hold the state of one forward pass.

    Attributes:
        real: ``[b, s]``, which tokens are none of padding.
        tokens: how many real tokens its losses are a mean over.
        seed: for what is drawn in it; ``None`` in evaluation.
        scale: gradient of the step's loss, once the backward pass has come by; ``None``: there is no loss.
        shapes: samples and tokens of the batch of every rank whose tokens meet this one's, once somebody asked.
        loss: what its layers add to the loss, without a graph.
    """

    real: Tensor
    tokens: Tensor
    seed: int | None = None
    scale: Tensor | float | None = None
    shapes: list[tuple[int, int]] = field(default_factory=list)
    loss: Tensor | None = None

    def add(self, share: Tensor) -> None:
        """Add a layer's term of the loss."""
        self.loss = share.detach() if self.loss is None else self.loss + share.detach()


class ForwardContexts:
    """Track the latest forward passes of a model.

    Attributes:
        tokens: real tokens of the whole step under way; ``None`` in loops of one's own.
        draws: whether layers draw random numbers in training.
    """

    def __init__(self, draws: bool) -> None:
        self.tokens: Tensor | None = None
        self.draws = draws
        self._passes = ForwardPasses[Pass]()
        self._with_labels = False

    def install(self, model: nn.Module) -> None:
        """Hook the model."""
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after)

    def current(self) -> Pass:
        """Return the forward pass that the current computation, or recomputation, belongs to."""
        return self._passes.current()

    @property
    def latest(self) -> Pass:
        """The pass that began last."""
        return self._passes.latest

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}
        self._with_labels = given.get("labels") is not None
        real = real_tokens(given)
        seed = int(torch.randint(2**31, ())) if self.draws and model.training else None
        tokens = real.sum() if self.tokens is None else self.tokens
        self._passes.begin(Pass(real, tokens.clamp(min=1), seed))

    def _after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        current = self.latest
        if not self._with_labels or current.loss is None:
            return output
        # A step reports the mean over tokens alone, which other runs can be compared with.
        share = current.loss if self.tokens is None else torch.zeros_like(current.loss)
        if isinstance(output, tuple):
            return (_Added.apply(output[0], share, current), *output[1:])
        if getattr(output, "loss", None) is not None:
            output.loss = _Added.apply(output.loss, share, current)
        return output


def real_tokens(batch: Mapping[str, Any]) -> Tensor:
    """Return ``[b, s]``: which tokens of a batch are not padding, by its attention mask.

    Of a mask of four dims ``[b, 1, s, s]``, boolean or to be added to scores, those that attend to themselves.

    Raises:
        ConfigError: it has neither token ids nor embeddings, or its mask is of another kind.
    """
    ids = batch.get("input_ids")
    tokens = batch.get("inputs_embeds") if ids is None else ids
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        raise ConfigError("routing= looks at whole sequences and found neither input_ids nor inputs_embeds in a batch")
    samples, length = tokens.shape[:2]
    mask = batch.get("attention_mask")
    if isinstance(mask, Mapping):  # by kind of layer
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    if mask is None:
        return torch.ones(samples, length, dtype=torch.bool, device=tokens.device)
    if mask.ndim == 2 and mask.shape[1] >= length:  # longer with a cache
        return mask[:, mask.shape[1] - length :].to(tokens.device, torch.bool)
    if mask.ndim == 4 and mask.shape[-2] == length <= mask.shape[-1]:
        itself = mask[:, 0].diagonal(mask.shape[-1] - length, -2, -1).to(tokens.device)
        attends = itself > -1.0 if itself.is_floating_point() else itself.bool()
        return attends.expand(samples, length)
    raise ConfigError(
        f"an attention mask of shape {tuple(mask.shape)} does not say which of {samples} x {length} tokens are "
        "padding: pass one of shape [samples, tokens], or [samples, 1, tokens, tokens]"
    )


class _Added(torch.autograd.Function):
    """Add the layers' losses to the model's loss; in backward, record the loss gradient for them."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, share: Tensor, current: Pass) -> Tensor:
        ctx.current = current
        return loss + share.to(loss.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.current.scale = grads[0]
        return grads[0], None, None


class _Attached(torch.autograd.Function):
    """Return ``x`` unchanged; in backward, give ``share``, a term of the loss, its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Tensor, current: Pass, times: float) -> Tensor:
        ctx.current, ctx.times, ctx.like = current, times, share.detach()
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        scale = ctx.current.scale
        return grads[0], None if scale is None else torch.ones_like(ctx.like) * scale * ctx.times, None, None


def attach(x: Tensor, share: Tensor, current: Pass, times: float) -> Tensor:
    """Return the activation ``x``, with the gradient of ``share`` (a scalar term of the loss) added in backward.

    So it needs no way of its own to the loss: not out of layers that are recomputed, and not out of pipeline stages.

    Args:
        times: factor of the gradient, where several ranks give the same one.
    """
    return _Attached.apply(x, share, current, times)
