"""Run bitsandbytes' optimizers (Dettmers et al. 2022) over shards, so that updates equal those of the full tensors.

If bitsandbytes treated every shard as a separate tensor, two things would differ from one process:

- whether the state has 8 bits, which depends on the tensor's size. hfscale compares ``min_8bit_size`` with the size of
  the full tensor;
- the blocks of entries with a common scale. A shard that consists of whole blocks of the full tensor is stepped in
  place. Other parameters are gathered, and stepped as full tensors.
"""

import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from .._compat.bitsandbytes import optimizers
from .._compat.transformers.classes import empty_copy
from ..cost.model.optimizer_bytes import BLOCK, MIN_8BIT_SIZE
from ..distributed.mesh import Mesh
from ..errors import ConfigError
from ..plan.quantized import flat_blocks_align
from ..train.runtime import Runtime
from .sharded import Member


def stock_class(name: str, stock: str) -> Any:
    """Return bitsandbytes' class ``stock``; raise :class:`ConfigError` if bitsandbytes is not installed."""
    try:
        return getattr(optimizers(), stock)
    except ImportError as error:
        raise ConfigError(
            f"{name!r} is an optimizer of bitsandbytes ({stock}), which is not installed: pip install "
            "'hfscale[bitsandbytes]'"
        ) from error


def without_paging(
    name: str,
    options: dict[str, Any],
    device: torch.device,
) -> dict[str, Any]:
    """Return the options, without paging if ``device`` is the CPU: only states on a GPU can be paged."""
    if options.get("is_paged") and device.type == "cpu":
        warnings.warn(
            f"{name!r} pages optimizer states between GPU and host, but this model is on the CPU, so its states are "
            "not paged",
            stacklevel=4,
        )
        return {**options, "is_paged": False}
    return options


def by_size(
    name: str,
    members: Sequence[Member],
    options: dict[str, Any],
    mesh: Mesh,
    wide: Collection[str],
) -> tuple[list[Member], list[Member], list[Member]]:
    """Divide the optimizer's parameters ``members`` into three lists: those with 8-bit states whose shards are updated
    in place, those with 8-bit states that are updated as full tensors, and those with 32-bit states. ``wide`` names
    parameters that always have 32-bit states.
    """
    narrow: list[Member] = []
    if options["optim_bits"] == 8:
        threshold = options.get("min_8bit_size", MIN_8BIT_SIZE)
        narrow = [
            member
            for member in members
            if member.planned.numel >= threshold and member.planned.name not in wide
        ]
    apart = [member for member in narrow if not flat_blocks_align(member.planned, BLOCK)]
    if apart and mesh.speaks_for_stage:
        names = [member.planned.name for member in apart]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        entries = sum(member.planned.numel for member in apart)
        largest = max(m.planned.numel * m.parameter.element_size() for m in apart)
        warnings.warn(
            f"{name!r}: the shards of {shown} are not whole blocks of {BLOCK} entries, so these parameters are stepped "
            f"as full tensors: every step gathers weights and gradients of {entries:,} entries, one parameter at a "
            f"time (up to twice {largest / 2**20:,.1f} MiB), and the full 8-bit state is on every rank. To avoid this, "
            "use a layout whose shards end between blocks, or a 32-bit optimizer",
            stacklevel=3,
        )
    return [m for m in narrow if m not in apart], apart, [m for m in members if m not in narrow]


def embedding_weights(runtime: Runtime) -> set[str]:
    """Return the names of the weights of embeddings: those of the full stock model, and the copies of embeddings that
    PEFT trains (``modules_to_save``) on this rank.
    """
    stock = empty_copy(runtime.model).named_modules()
    names = {f"{name}.weight" for name, module in stock if isinstance(module, nn.Embedding)}
    here = {
        id(module.weight) for module in runtime.model.modules() if isinstance(module, nn.Embedding)
    }
    owned = {planned.name for planned, parameter in runtime.parameters() if id(parameter) in here}
    plans = runtime.plan.by_name
    return owned | {plans[name].first_name for name in names if name in plans}


def try_step(device: torch.device) -> str:
    """Run a step of 8-bit AdamW on ``device``, and describe its state. Raise :class:`ConfigError` if bitsandbytes is
    missing, or the step did not work.
    """
    weight = torch.nn.Parameter(torch.ones(2 * MIN_8BIT_SIZE, device=device))
    optimizer = stock_class("adamw_8bit", "AdamW8bit")([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    kinds = {
        str(value.dtype)
        for value in optimizer.state[weight].values()
        if isinstance(value, torch.Tensor)
    }
    moved = bool((weight.detach() < 1).all())
    if not moved or "torch.uint8" not in kinds:
        raise ConfigError(
            f"a step of 8-bit AdamW on {device} must change its weight and keep its state in uint8, but a trial step "
            "with the installed bitsandbytes did not: install a bitsandbytes made for this device, or use "
            "optimizer='adamw_torch_fused'"
        )
    return f"AdamW on {device}, its state in uint8"
