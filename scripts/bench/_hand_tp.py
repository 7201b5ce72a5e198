"""Llama over two tensor ranks by hand, as Megatron-LM's first paper does it: nothing of hfscale.

Stock layers with half of the heads and half of the MLP, ``f`` and ``g`` around them as plain autograd functions with a
blocking all-reduce each (Shoeybi et al. 2019, section 3), and the vocabulary cut in the embedding, the head and the
loss. Nothing is checked, overlapped or kept apart: what is left is the host's time that torch itself takes.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        summed = grads[0].clone()
        dist.all_reduce(summed)
        return summed


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        summed = x.clone()
        dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class HandTP:
    """This rank's half of a Llama; ``step`` runs forward and backward."""

    def __init__(self, config: Any) -> None:
        size = dist.get_world_size()
        self._rank = dist.get_rank()
        own = copy.deepcopy(config)
        for name in (
            "num_attention_heads",
            "num_key_value_heads",
            "intermediate_size",
            "vocab_size",
        ):
            setattr(own, name, getattr(config, name) // size)
        self.model: Any = AutoModelForCausalLM.from_config(own, dtype=torch.float32).train()
        self._vocabulary = own.vocab_size
        for layer in self.model.model.layers:
            for block, last in (
                (layer.self_attn, layer.self_attn.o_proj),
                (layer.mlp, layer.mlp.down_proj),
            ):
                block.register_forward_pre_hook(_entered, with_kwargs=True)
                last.register_forward_hook(lambda module, args, output: _Reduce.apply(output))

    def step(self, ids: Tensor, labels: Tensor) -> None:
        """Leave gradients of the mean loss in ``.grad``."""
        mine, inside = self._own(ids)
        embedded = _Reduce.apply(self.model.model.embed_tokens(mine) * inside[..., None])
        hidden = self.model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        logits = self.model.lm_head(_Copy.apply(hidden[:, :-1])).flatten(0, 1).float()
        targets, inside = self._own(labels[:, 1:].flatten())
        most = logits.detach().amax(-1)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        shifted = logits - most[:, None]
        of_target = shifted.gather(1, targets[:, None])[:, 0] * inside
        sums = _Reduce.apply(torch.stack((shifted.exp().sum(-1), of_target)))
        (sums[0].log() - sums[1]).mean().backward()

    def _own(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids within this rank's slice of the vocabulary, and which of them are in it."""
        local = ids - self._rank * self._vocabulary
        inside = (local >= 0) & (local < self._vocabulary)
        return F.relu(local).clamp(max=self._vocabulary - 1), inside


def _entered(
    _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (_Copy.apply(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": _Copy.apply(kwargs["hidden_states"])}
