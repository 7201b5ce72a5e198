"""First values of adapters that do not depend on the layout.

PEFT makes the adapter of one whole module at a time, on the CPU, from a seed made of the run's seed and the module's
name; every rank keeps its share. Where the values are made of the weights that are adapted (PiSSA, Meng et al. 2024;
OLoRA, Buyukakyuz 2024; DoRA's magnitudes), that one weight is put together first.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._host.peft import COPY
from ..mesh import Mesh
from ..plan import AdapterParameter, Plan
from ..runtime.initialize import seed_of
from ..runtime.names import unwrapped
from ..runtime.unshard import gather_full
from .peft_config import needs_weights
from .structure import narrowed, targets_of


def initialize_adapters(
    whole: Any,
    config: Any,
    name: str,
    plan: Plan,
    mesh: Mesh,
    shares: dict[str, Tensor],
    seed: int,
    dequantized: Callable[[str], Tensor],
) -> dict[str, Tensor]:
    """This rank's shares of all adapters that it holds, and of weights that their making has changed.

    Args:
        whole: PEFT's model around the whole stock model, on the meta device.
        shares: this rank's final shares of the stock model's parameters.
        dequantized: gives this rank's share of a quantized weight.
    """
    made: dict[str, Tensor] = {}
    by_module: dict[str, list[AdapterParameter]] = {}
    for adapter in plan.adapters:
        if not plan.is_local(mesh.ranks["pp"], adapter.name):
            continue
        if adapter.kept_in == COPY:
            made[adapter.name] = shares[plan.by_name[adapter.base].tied_to or adapter.base].clone()
        else:
            by_module.setdefault(adapter.base.rpartition(".")[0], []).append(adapter)
    stock = whole.get_base_model()
    for path, adapters in by_module.items():
        module = copy.deepcopy(unwrapped(stock.get_submodule(path))).to_empty(device="cpu")
        weights = _fill(module, path, plan, mesh, shares, dequantized) if needs_weights(config) else {}
        before = {key: getattr(module, key).detach().clone() for key in weights}
        values = _made_alone(module, path, config, name, adapters, seed)
        for adapter in adapters:
            planned = plan.by_name[adapter.name]
            if planned.tied_to is None:
                made[adapter.name] = planned.take(values[adapter.name].detach(), mesh.ranks).clone().to(mesh.device)
        for key, old in before.items():
            new = getattr(module, key).detach()
            if not torch.equal(new, old):
                planned = plan.by_name[f"{path}.{key}"]
                owner = planned.tied_to or planned.name
                changed = weights[key] + (new - old).to(weights[key].dtype) if new.dtype != weights[key].dtype else new
                made[owner] = planned.take(changed, mesh.ranks).clone().to(mesh.device)
    return made


def _fill(
    module: nn.Module,
    path: str,
    plan: Plan,
    mesh: Mesh,
    shares: dict[str, Tensor],
    dequantized: Callable[[str], Tensor],
) -> dict[str, Tensor]:
    """Put the real weights into ``module``; returns those of its parameters, in their own type."""
    weights = {}
    for key, parameter in module.named_parameters(recurse=False):
        planned = plan.by_name[f"{path}.{key}"]
        quantized = plan.quantized is not None and planned.name in plan.quantized.weights
        share = dequantized(planned.name) if quantized else shares[planned.tied_to or planned.name]
        weights[key] = gather_full(share.contiguous(), planned.shape, planned.cuts, mesh).cpu()
        # PEFT's decompositions take no wider type.
        narrow = torch.float32 if share.dtype == torch.float64 else share.dtype
        parameter.data = weights[key].to(narrow, copy=True)
    return weights


def _made_alone(
    module: nn.Module, path: str, config: Any, name: str, adapters: list[AdapterParameter], seed: int
) -> dict[str, Tensor]:
    """The values that PEFT gives the adapters of ``module``, alone in a model in which it has the same name."""
    import peft

    root = holder = nn.Module()
    *owners, child = path.split(".")
    for owner in owners:
        holder.add_module(owner, nn.Module())
        holder = holder.get_submodule(owner)
    holder.add_module(child, module)
    modules, parameters, _ = targets_of(adapters)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(seed_of(seed, path))
        peft.inject_adapter_in_model(narrowed(config, modules, parameters, ()), root, adapter_name=name)
    return dict(root.named_parameters(remove_duplicate=False))
