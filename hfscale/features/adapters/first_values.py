"""Initialization of adapters: PEFT's own initial values, in every layout.

Every rank lets PEFT initialize the adapters of one full module at a time, on the CPU, in PEFT's order and with the same
random numbers, and keeps its shard; adapters of other stages are initialized too, to advance the RNG. If the values
depend on the adapted weight (PiSSA, Meng et al. 2024; OLoRA, Buyukakyuz 2024; DoRA's magnitudes), it is gathered.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.peft import COPY
from ...distributed.mesh import Mesh
from ...plan import AdapterParameter, Plan
from ...train.runtime.parameter_names import unwrapped
from ...train.runtime.shards import gather_full
from .adapter_structure import narrowed, targets_of
from .storage import needs_weights


def initialize_adapters(
    whole: Any,
    config: Any,
    name: str,
    plan: Plan,
    mesh: Mesh,
    shares: dict[str, Tensor],
    seed: int | None,
    dequantized: Callable[[str], Tensor],
) -> dict[str, Tensor]:
    """Return this rank's shards of all of its adapters, and of weights that their initialization has changed: ``whole``
    is PEFT's model around the full stock model, on the meta device; ``shares`` are this rank's final shards, those of
    quantized weights by ``dequantized``; without a ``seed`` torch's current RNG state is used.
    """
    made: dict[str, Tensor] = {}
    by_module: dict[str, list[AdapterParameter]] = {}
    for adapter in plan.adapters:
        if adapter.kept_in != COPY:
            by_module.setdefault(adapter.base.rpartition(".")[0], []).append(adapter)
        elif plan.is_local(mesh.pp_rank, adapter.name):
            made[adapter.name] = shares[plan.by_name[adapter.base].tied_to or adapter.base].clone()
    stock = whole.get_base_model()
    with _random_numbers(seed, mesh):
        for path in sorted(by_module, key=lambda each: any(adapter.experts for adapter in by_module[each])):
            adapters = by_module[path]
            module = copy.deepcopy(unwrapped(stock.get_submodule(path))).to_empty(device="cpu")
            if not plan.is_local(mesh.pp_rank, adapters[0].name):
                _draw_alone(module, path, config, name, adapters)
                continue
            weights = _fill(module, path, plan, mesh, shares, dequantized) if needs_weights(config) else {}
            before = {key: getattr(module, key).detach().clone() for key in weights}
            values = _made_alone(module, path, config, name, adapters)
            for adapter in adapters:
                planned = plan.by_name[adapter.name]
                if planned.tied_to is None:
                    made[adapter.name] = planned.take(values[adapter.name].detach(), mesh.ranks).clone().to(mesh.device)
            for key, old in before.items():
                new = getattr(module, key).detach()
                if not torch.equal(new, old):
                    planned = plan.by_name[f"{path}.{key}"]
                    owner, kept = planned.tied_to or planned.name, weights[key]
                    changed = kept + (new - old).to(kept.dtype) if new.dtype != kept.dtype else new
                    made[owner] = planned.take(changed, mesh.ranks).clone().to(mesh.device)
    return made


@contextmanager
def _random_numbers(seed: int | None, mesh: Mesh) -> Iterator[None]:
    """Use the same RNG state on every rank inside the `with` block; without a seed the first rank's, which advances."""
    own = torch.random.get_rng_state()
    start = mesh.all_gather_object(own if seed is None else torch.Generator().manual_seed(seed).get_state())[0]
    torch.random.set_rng_state(start)
    try:
        yield
        if seed is None and torch.equal(own, start):
            own = torch.random.get_rng_state()
    finally:
        torch.random.set_rng_state(own)


def _draw_alone(module: nn.Module, path: str, config: Any, name: str, adapters: list[AdapterParameter]) -> None:
    """Advance the RNG by the random numbers of a module's adapters that are on another stage."""
    config = copy.deepcopy(config)
    config.use_dora = False  # computed from weights, without random numbers
    if getattr(config, "init_lora_weights", True) in ("olora", "pissa"):
        config.init_lora_weights = False  # the same
    if needs_weights(config):
        for parameter in module.parameters():
            parameter.data.zero_()
    _made_alone(module, path, config, name, adapters)


def _fill(
    module: nn.Module,
    path: str,
    plan: Plan,
    mesh: Mesh,
    shares: dict[str, Tensor],
    dequantized: Callable[[str], Tensor],
) -> dict[str, Tensor]:
    """Gather the real weights into ``module``; return its own parameters among them, in their own dtype."""
    weights = {}
    for key, parameter in module.named_parameters(recurse=False):
        planned = plan.by_name[f"{path}.{key}"]
        quantized = plan.quantized is not None and planned.name in plan.quantized.weights
        share = dequantized(planned.name) if quantized else shares[planned.tied_to or planned.name]
        weights[key] = gather_full(share.contiguous(), planned.shape, planned.cuts, mesh).cpu()
        # PEFT's decompositions do not support float64.
        narrow = torch.float32 if share.dtype == torch.float64 else share.dtype
        parameter.data = weights[key].to(narrow, copy=True)
    return weights


def _made_alone(
    module: nn.Module, path: str, config: Any, name: str, adapters: list[AdapterParameter]
) -> dict[str, Tensor]:
    """Return PEFT's initial values of the adapters of ``module``, in a model that holds this module alone."""
    import peft

    root = holder = nn.Module()
    *owners, child = path.split(".")
    for owner in owners:
        holder.add_module(owner, nn.Module())
        holder = holder.get_submodule(owner)
    holder.add_module(child, module)
    modules, parameters, _ = targets_of(adapters)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.inject_adapter_in_model(narrowed(config, modules, parameters, ()), root, adapter_name=name)
    return dict(root.named_parameters(remove_duplicate=False))
