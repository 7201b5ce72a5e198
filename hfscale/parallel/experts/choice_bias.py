"""Update the biases that routers add to their scores only for choosing experts (Wang et al. 2024)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..._compat.torch import own_buffers
from ..._compat.transformers.classes import class_name, stock_class
from ...errors import ConfigError
from ...models.facts import ask
from ...models.names import wild_name
from ...plan import ExpertsPlan
from ...train.runtime import Runtime, local_tensor
from ...train.runtime.parameter_names import owner_of

_INSTEAD = "use balance_loss"


@dataclass(frozen=True)
class ChoiceBias:
    """Hold the bias of one layer's router: a buffer, which every rank has in full, or a frozen parameter, which may be
    sharded.
    """

    runtime: Runtime
    module: nn.Module
    attribute: str
    name: str  # in the stock model

    @torch.no_grad()
    def move(self, step: Tensor) -> None:
        """Add ``step [experts]``, which is equal on every rank, to the bias."""
        bias = own_buffers(self.module).get(self.attribute)
        if bias is not None:
            bias += step.to(bias).view_as(bias)
            return
        self.runtime.data.release()  # an update of a gathered copy would be lost
        planned = self.runtime.plan.by_name[self.name]
        share = local_tensor(getattr(self.module, self.attribute))
        own = planned.take(step.view(planned.shape), self.runtime.mesh.ranks)
        share += own.to(share)


def choice_biases(runtime: Runtime) -> dict[str, str]:
    """Return the name of the router's bias inside each kind of MoE block. The key is the name of the block's experts,
    with ``*`` in place of layer numbers.

    Raise :class:`ConfigError` for a model whose routers have no bias that is used only for choosing experts.
    """
    kind = stock_class(runtime.model)
    biases: dict[str, str] = ask("choice bias", runtime.model, stock=kind, kind=kind)
    if not biases:
        raise ConfigError(
            f"bias_update_rate needs a router that adds a bias to its scores only for choosing experts, but "
            f"{class_name(runtime.model)} has no such router: {_INSTEAD}"
        )
    return biases


def choice_bias(runtime: Runtime, planned: ExpertsPlan, inner: str) -> ChoiceBias | None:
    """Return the bias of one layer's router, converted to at least 32 bits, since 16 bits would lose updates of 0.001.

    ``inner`` is the bias's name in the MoE block. Return ``None`` if the router of this layer has no bias of this name.
    """
    owner = planned.name.rpartition(".")[0]
    name = f"{owner}.{inner}"
    try:
        module, attribute = owner_of(runtime.model, name)
    except AttributeError:
        return None
    held: Tensor | None = getattr(module, attribute, None)
    if held is None:
        return None
    if held.numel() != planned.count:
        raise ConfigError(
            f"bias_update_rate needs a router bias with one entry per expert, but {wild_name(name)} has "
            f"{held.numel()} entries for {planned.count} experts: {_INSTEAD}"
        )
    if held.dtype.itemsize < torch.float32.itemsize:
        if attribute not in own_buffers(module):
            raise ConfigError(
                f"bias_update_rate needs the router's bias {wild_name(name)} in 32 bits, but its dtype is "
                f"{held.dtype}, in which steps of 0.001 are lost: load the model with dtype=torch.float32, and "
                "mixed_precision='bf16'"
            )
        own_buffers(module)[attribute] = held.float()
    return ChoiceBias(runtime, module, attribute, name)
