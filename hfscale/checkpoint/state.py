"""Stop a run and go on with it, bit by bit as if it had not stopped, in the same layout.

Every rank writes what it holds, and nothing is gathered: its random streams, and, for the first replica, its shares of
weights, buffers and optimizer state under the parameters' names. (:func:`hfscale.save_pretrained` writes weights that
load anywhere, in any layout.) Files grow beside the directory and move into place when all are whole::

    DIRECTORY/layout.json            sizes and layers per pipeline rank that a resumed run must have
    DIRECTORY/shares-00-00-00.pt     pp, dp_shard, tp rank: weights, buffers, optimizer
    DIRECTORY/rank-00000.pt          random streams, scheduler, whatever else was given
"""

import json
import random
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import guards
from ..errors import CheckpointError
from ..mesh import Mesh
from ..parallel.tensor.random import default_generator
from ..plan import ParameterPlan
from ..runtime import Runtime, like_sharded, runtime_of
from ..runtime.atomic_directory import atomic_directory
from ..runtime.runtime import local_tensor
from ..runtime.writing import everyone_arrives, is_writer

_COUNTED = ("step", "mu_product")  # in the states of torch's optimizers
_SIZES = ("pp", "dp_replicate", "dp_shard", "tp", "ep", "expert_tp", "cp")


def save_state(
    model: nn.Module,
    directory: str | Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    timeout: timedelta = timedelta(minutes=2),
    check_replicas: bool = True,
    **others: Any,
) -> None:
    """Write all that a run needs to go on; call it on every rank, between two steps.

    Args:
        directory: replaced, if it exists, once everything is written.
        optimizer: over parameters of ``model``.
        check_replicas: compare, bit by bit, what several ranks hold together.
        others: anything with ``state_dict`` and ``load_state_dict`` (``scheduler=...``), whose states are plain data.

    Raises:
        CheckpointError: a rank did not arrive, or could not write, ranks have drifted apart, or a schedule without a
            flush has microbatches under way; what ``directory`` held is then still there.
    """
    runtime, target = runtime_of(model), Path(directory)
    _refuse_under_way(runtime, "save_state")
    mesh = runtime.mesh
    everyone_arrives(mesh, timeout, f"save_state({str(target)!r})")
    if check_replicas:
        guards.check_replicas(runtime, f"save_state({str(target)!r})")
    for part in runtime.parts:
        part.before_state(runtime, resumed=False)
    shares = _shares(runtime, optimizer)
    with atomic_directory(target, mesh, replace=True) as staging:
        if is_writer(mesh):
            (staging.path / "layout.json").write_text(json.dumps(_layout(runtime)))
        if mesh.ranks["dp_replicate"] == _replica(mesh):
            torch.save(shares, staging.path / _shares_name(mesh))
        states = {name: other.state_dict() for name, other in others.items()}
        torch.save({"random": _random_states(mesh), "others": states}, staging.path / _rank_name(mesh))


def load_state(
    model: nn.Module, directory: str | Path, *, optimizer: torch.optim.Optimizer | None = None, **others: Any
) -> None:
    """Put a run back where :func:`save_state` wrote it down: weights, buffers, optimizer, random streams, ``others``.

    Raises:
        CheckpointError: it was written in another layout, by another optimizer or model, or is incomplete.
    """
    runtime, source = runtime_of(model), Path(directory)
    _refuse_under_way(runtime, "load_state")
    mesh = runtime.mesh
    try:
        written = json.loads((source / "layout.json").read_text())
        _check_layout(runtime, written, source)
        # Mapped, and copied one by one: a second model never lies in the device's memory, nor in the host's.
        shares = torch.load(source / _shares_name(mesh), map_location="cpu", weights_only=True, mmap=True)
        own = torch.load(source / _rank_name(mesh), map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{source} is not a state that hfscale.save_state wrote: {error}") from error
    _put_back(runtime, shares, source)
    if optimizer is not None:
        _put_back_optimizer(runtime, optimizer, shares["optimizer"], source)
    for name, other in others.items():
        if name not in own["others"]:
            raise CheckpointError(f"{source} holds {', '.join(own['others']) or 'nothing else'}, and no {name!r}")
        other.load_state_dict(own["others"][name])
    _restore_random_states(mesh, own["random"])
    for part in runtime.parts:
        part.before_state(runtime, resumed=True)


def _refuse_under_way(runtime: Runtime, call: str) -> None:
    if runtime.executor.under_way:
        raise CheckpointError(
            f"{call} knows nothing of the microbatches that {runtime.mesh.layout.pipeline_schedule} has under way: "
            "take their gradients first (for loss in hfscale.drain(model): optimizer.step()), or they would be lost"
        )


def _layout(runtime: Runtime) -> dict[str, Any]:
    """What decides which rank writes which file, and what is in it; the same on every rank."""
    layout, plan = runtime.mesh.layout, runtime.plan
    layers = []
    if plan.stages is not None:
        numbers = {name: number for number, name in enumerate(plan.layers)}
        for rank in range(layout.size("pp")):
            own = plan.stages.of_rank(rank)
            layers.append(", ".join(f"{numbers[s.layers[0]]}-{numbers[s.layers[-1]]}" for s in own))
    return {"sizes": {axis: layout.size(axis) for axis in _SIZES}, "layers": layers}


def _check_layout(runtime: Runtime, written: dict[str, Any], source: Path) -> None:
    here, otherwise = _layout(runtime), "or load weights written by hfscale.save_pretrained, which fit every layout"
    sizes = dict(written.get("sizes", written))
    sizes.setdefault("cp", 1)  # states of versions that had no such axis
    if sizes != here["sizes"]:
        raise CheckpointError(
            f"{source} was written in the layout {sizes} and this run has {here['sizes']}: resume in the same layout, "
            f"{otherwise}"
        )
    if written["layers"] != here["layers"]:
        raise CheckpointError(
            f"{source} was written with the layers {_by_rank(written['layers'])}, and this run has "
            f"{_by_rank(here['layers'])}: resume with the pipeline_schedule, virtual_stages and stage_layers of then, "
            f"{otherwise}"
        )


def _by_rank(layers: list[str]) -> str:
    return "; ".join(f"{spans} on pipeline rank {rank}" for rank, spans in enumerate(layers))


def _shares_name(mesh: Mesh) -> str:
    replica = f"{_replica(mesh):02d}-" if _replica(mesh) else ""
    return f"shares-{replica}" + "{pp:02d}-{dp_shard:02d}-{tp:02d}.pt".format(**mesh.ranks)


def _replica(mesh: Mesh) -> int:
    """The replica of the data axes whose shares this rank's are equal to: the first, or, where experts are spread over
    replicas, its own.
    """
    return mesh.ranks["dp_replicate"] if mesh.layout.expert_batches > mesh.layout.size("dp_shard") else 0


def _rank_name(mesh: Mesh) -> str:
    return f"rank-{dist.get_rank() if dist.is_initialized() else 0:05d}.pt"


def _shares(runtime: Runtime, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    names = {id(parameter): planned.name for planned, parameter in runtime.parameters()}
    state, groups = {}, []
    given = {id(p) for group in optimizer.param_groups for p in group["params"]} if optimizer is not None else set()
    if given - names.keys():
        raise CheckpointError(
            f"the optimizer has {len(given - names.keys())} parameters that are not the model's: keep them in an "
            "optimizer of their own, and pass it to save_state under a name"
        )
    if optimizer is not None:
        for parameter, values in optimizer.state.items():
            state[names[id(parameter)]] = {key: _plain(value) for key, value in values.items()}
        for group in optimizer.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append({**options, "names": [names[id(parameter)] for parameter in group["params"]]})
    return {
        "weights": {planned.name: local_tensor(parameter.detach()) for planned, parameter in _written(runtime)},
        "buffers": dict(runtime.model.named_buffers()),
        "optimizer": {"state": state, "groups": groups},
    }


def _plain(value: Any) -> Any:
    return local_tensor(value).detach() if isinstance(value, Tensor) else value


def _put_back(runtime: Runtime, shares: dict[str, Any], source: Path) -> None:
    more = sorted(shares["weights"].keys() - {planned.name for planned, _ in _written(runtime)})
    if more:
        raise CheckpointError(
            f"{source} has {len(more)} parameters that this model has not, {more[0]} for one: it is of another "
            "model, or of this one with adapters, so build the model as it was built then"
        )
    with torch.no_grad():
        for name, tensor in _paired(runtime, shares):
            found = shares["weights" if name in shares["weights"] else "buffers"].get(name)
            if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
                raise CheckpointError(f"{source} has no {name} of shape {tuple(tensor.shape)}: it is of another model")
            tensor.copy_(found)


def _paired(runtime: Runtime, shares: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    yield from ((planned.name, local_tensor(parameter)) for planned, parameter in _written(runtime))
    yield from runtime.model.named_buffers()


def _written(runtime: Runtime) -> list[tuple[ParameterPlan, Tensor]]:
    """Not weights in 4 or 8 bits, which are frozen: they are those of the checkpoint that the model is loaded from."""
    frozen = runtime.plan.quantized.weights if runtime.plan.quantized is not None else ()
    return [(planned, parameter) for planned, parameter in runtime.parameters() if planned.name not in frozen]


def _put_back_optimizer(
    runtime: Runtime, optimizer: torch.optim.Optimizer, written: dict[str, Any], source: Path
) -> None:
    parameters = {planned.name: parameter for planned, parameter in runtime.parameters()}
    names = {id(parameter): name for name, parameter in parameters.items()}
    here = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    if here != [group["names"] for group in written["groups"]]:
        raise CheckpointError(
            f"{source} was written by an optimizer over other parameters or groups: build it as it was built then"
        )
    for group, options in zip(optimizer.param_groups, written["groups"], strict=True):
        group.update({key: value for key, value in options.items() if key != "names"})
    optimizer.state.clear()
    plain = getattr(optimizer, "keeps_plain_state", False)  # hfscale's own: some states are of other shapes than shares
    options = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for name, values in written["state"].items():
        parameter = parameters[name]
        here_again = {
            key: _placed(key, value, local_tensor(parameter), optimizer, options[id(parameter)])
            for key, value in values.items()
        }
        optimizer.state[parameter] = {k: v if plain else _like(v, parameter) for k, v in here_again.items()}


def _placed(key: str, value: Any, parameter: Tensor, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Any:
    """A value of an optimizer's state where the optimizer itself would have made it."""
    if not isinstance(value, Tensor):
        return value
    if key in _COUNTED and not (group.get("fused") or group.get("capturable")):
        return value.clone()  # torch reads them on the host, which would wait for a device
    if getattr(optimizer, "is_paged", False) and value.shape == parameter.shape:
        paged: Any = optimizer
        buffer: Tensor = paged.get_state_buffer(parameter.detach(), dtype=value.dtype)
        return buffer.copy_(value)
    return value.to(parameter.device, copy=True)


def _like(value: Any, parameter: Tensor) -> Any:
    """An optimizer's value, as a sharded tensor where it has the shape of a sharded parameter's share."""
    if not isinstance(value, Tensor) or value.ndim == 0 or value.shape != local_tensor(parameter).shape:
        return value
    return like_sharded(value, parameter)


def _random_states(mesh: Mesh) -> dict[str, Any]:
    version, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # type: ignore[misc]
    states = {
        "torch": torch.random.get_rng_state(),
        "python": random.getstate(),
        "numpy": (str(version), torch.as_tensor(np.asarray(keys, dtype=np.int64)), position, has_gauss, gauss),
    }
    if mesh.device.type != "cpu":
        states["device"] = default_generator(mesh.device).get_state()
    return states


def _restore_random_states(mesh: Mesh, states: dict[str, Any]) -> None:
    torch.random.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    if mesh.device.type != "cpu":
        default_generator(mesh.device).set_state(states["device"])
