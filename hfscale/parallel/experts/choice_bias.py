"""Move the biases that routers add to their scores for the choice of experts alone (Wang et al. 2024)."""

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
    """The bias of one layer's router: a buffer, the same on every rank, or a frozen parameter, as others sharded."""

    runtime: Runtime
    module: nn.Module
    attribute: str
    name: str  # in the stock model

    @torch.no_grad()
    def move(self, step: Tensor) -> None:
        """Add ``step [experts]``, the same on every rank."""
        bias = own_buffers(self.module).get(self.attribute)
        if bias is not None:
            bias += step.to(bias).view_as(bias)
            return
        self.runtime.data.release()  # a gathered copy would be dropped
        planned = self.runtime.plan.by_name[self.name]
        share = local_tensor(getattr(self.module, self.attribute))
        own = planned.take(step.view(planned.shape), self.runtime.mesh.ranks)
        share += own.to(share)


def choice_biases(runtime: Runtime) -> dict[str, str]:
    """Return, by wild name of experts, the name of their router's bias within their block; refuse a model without."""
    kind = stock_class(runtime.model)
    biases: dict[str, str] = ask("choice bias", runtime.model, stock=kind, kind=kind)
    if not biases:
        raise ConfigError(
            f"bias_update_rate needs a router that adds a bias to its scores for the choice of experts alone, and "
            f"{class_name(runtime.model)} has none: {_INSTEAD}"
        )
    return biases


def choice_bias(runtime: Runtime, planned: ExpertsPlan, inner: str) -> ChoiceBias | None:
    """Return a layer's bias, in 32 bits at least, since 16 bits would lose steps of 0.001; ``None`` if its router, of
    another kind than other layers', has none of this name.
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
            f"bias_update_rate needs one entry per expert, and {wild_name(name)} has {held.numel()} for "
            f"{planned.count} experts, of which the others have no load to balance: {_INSTEAD}"
        )
    if held.dtype.itemsize < torch.float32.itemsize:
        if attribute not in own_buffers(module):
            raise ConfigError(
                f"bias_update_rate needs {wild_name(name)} in 32 bits, and it is in {held.dtype}, in which steps of "
                "0.001 are lost: load with dtype=torch.float32, and mixed_precision='bf16'"
            )
        own_buffers(module)[attribute] = held.float()
    return ChoiceBias(runtime, module, attribute, name)
