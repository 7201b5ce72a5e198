"""Save and load adapters in PEFT's own format and names: ``adapter_config.json`` and ``adapter_model.safetensors``."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..._compat.peft import stored_weights
from ..._compat.transformers.classes import input_embedding
from ..._compat.transformers.saving import AsStored
from ...distributed.mesh import Mesh
from ...errors import CheckpointError
from ...plan import Plan
from ...train.runtime import Runtime
from ...train.runtime.full_tensors import full_parameters
from ...train.runtime.parameter_names import stock_name
from ...train.runtime.writing import Attempt, atomic_directory, is_writer, not_finite, plainly, warn_of_not_finite

_log = logging.getLogger(__name__)
WEIGHTS = "adapter_model.safetensors"


def stored_names(whole: Any, name: str, plan: Plan, embeddings: Any) -> dict[str, str]:
    """Map names of parameters in the plan to their keys in a saved adapter, by PEFT's own rules.

    Besides adapters these are trained biases, and the embeddings if they are adapted: ``embeddings`` is PEFT's
    ``save_embedding_layers``, whose ``"auto"`` reads the base model's config, maybe from the Hub.
    """
    from peft import get_peft_model_state_dict

    prefix = "base_model.model."
    # PEFT selects and renames tensors by name alone, so pass an index as each tensor's value to recognize it.
    names = list(dict(whole.get_base_model().named_parameters(remove_duplicate=False)))
    marked = {f"{prefix}{key}": torch.tensor(number) for number, key in enumerate(names)}
    adapters = {adapter.name for adapter in plan.adapters}
    found: dict[str, str] = {}
    # PEFT may return embeddings twice, the second time by a wrapper's name.
    for layers in (False,) if input_embedding(whole.get_base_model()) is None else (False, embeddings):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kept = get_peft_model_state_dict(whole, state_dict=marked, adapter_name=name, save_embedding_layers=layers)
        for key, number in kept.items():
            live = names[int(number)]
            found.setdefault(live if live in adapters else stock_name(live), key)
    return found


def load_adapter(path: str, whole: Any, name: str, plan: Plan, mesh: Mesh, **hub: Any) -> dict[str, Tensor]:
    """Return this rank's shards of a saved adapter; raise :class:`CheckpointError` if it lacks parameters of its
    config, or has others, or their shapes differ from the model's.
    """
    try:
        stored = stored_weights(path, **hub)
    except ValueError as error:
        raise CheckpointError(f"{path} is not a saved adapter: {error}") from error
    keys = stored_names(whole, name, plan, embeddings=True)
    own = {adapter.name for adapter in plan.adapters if adapter.tied_to is None}
    wanted = {parameter: key for parameter, key in keys.items() if parameter in own or key in stored}
    missing = sorted(key for key in wanted.values() if key not in stored)
    extra = sorted(stored.keys() - set(keys.values()))
    if missing or extra:
        raise CheckpointError(
            f"{path} does not fit this model: it lacks {len(missing)} of {len(wanted)} tensors ({missing[:3]}) and has "
            f"{len(extra)} others ({extra[:3]}): load it onto the model that it was trained on"
        )
    shares = {}
    for parameter, key in wanted.items():
        planned = plan.by_name[parameter]
        if tuple(stored[key].shape) != planned.shape:
            raise CheckpointError(
                f"{path}: {key} has the shape {tuple(stored[key].shape)}, and the model's is {planned.shape}: load it "
                "onto the model that it was trained on"
            )
        if plan.is_local(mesh.pp_rank, parameter):
            shares[planned.tied_to or parameter] = planned.take(stored[key], mesh.ranks).clone().to(mesh.device)
    return shares


def adapter_tensors(
    runtime: Runtime,
    whole: Any,
    name: str,
    to: Sequence[int] = (0,),
    attempt: Attempt = plainly,
    factors_only: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an adapter's file by their keys, full, on the ranks ``to``; every rank must exhaust it.

    Args:
        factors_only: leave out the trained biases and the embeddings, which are weights of the model too.
    """
    plan, names = runtime.plan, {}
    if is_writer(runtime.mesh):
        _warn_of_experts(runtime)
        names = stored_names(whole, name, plan, False if factors_only else "auto")
    factors = {adapter.name for adapter in plan.adapters}
    owned: dict[str, list[str]] = {}
    for parameter, key in runtime.mesh.all_gather_object(names)[0].items():
        if parameter in factors or not factors_only:
            owned.setdefault(plan.by_name[parameter].tied_to or parameter, []).append(key)
    for parameter, tensor in full_parameters(runtime, lambda planned: planned.name in owned, attempt, to):
        for key in owned[parameter] if runtime.mesh.rank in to else ():
            yield key, tensor


def save_adapter(runtime: Runtime, whole: Any, name: str, target: Path) -> None:
    """Write the adapter; collective, like :func:`hfscale.save_pretrained`. Raise :class:`CheckpointError`, with
    ``target`` unchanged, if it could not be written.
    """
    with atomic_directory(target, runtime.mesh) as staging:
        found = adapter_tensors(runtime, whole, name, attempt=staging.attempt)
        tensors = {key: tensor.clone() for key, tensor in found}
        if is_writer(runtime.mesh) and staging.failure is None:
            save_file(tensors, staging.path / WEIGHTS, metadata={"format": "pt"})
            write_adapter_config(whole, name, staging.path)
    warn_of_not_finite(runtime.mesh, not_finite(tensors), str(target))


def _warn_of_experts(runtime: Runtime) -> None:
    """Warn if engines would ignore the adapters of experts, since they look for each expert's under its own name."""
    stacked = next((adapter.base for adapter in runtime.plan.adapters if adapter.experts), None)
    if stacked is None:
        return
    whole = torch.empty(runtime.plan.by_name[stacked].shape, device="meta")
    if AsStored(runtime.model, {stacked: whole}).layout.keys() != {stacked}:
        _log.warning(
            "PEFT loads these adapters of experts, stacked as in %s, and vLLM and SGLang ignore them: for an engine, "
            "rewrite the saved adapter with `hfscale convert ADAPTER OUT --adapter-for vllm --base CHECKPOINT`", stacked
        )  # fmt: skip


def write_adapter_config(whole: Any, name: str, directory: Path) -> None:
    """Write ``adapter_config.json``."""
    config = whole.peft_config[name]
    training, config.inference_mode = config.inference_mode, True
    try:
        config.save_pretrained(str(directory))
    finally:
        config.inference_mode = training
