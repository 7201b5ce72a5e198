"""Compare the checksum of every expert on the model's ranks with its checksum in the checkpoint.

If by mistake all ranks loaded the same experts, training runs without an error, but badly. Equal experts alone are no
sign of this mistake, because experts are equal after upcycling. So all ranks together read the checkpoint once more,
through transformers' converters and without the plan, and compare its experts with the experts of each rank, in the
numbering of token dispatch.

A tensor's checksum is the sum, modulo 2**64, of its entries' bits times a weight that depends on the entry's index. The
checksums of an expert's shards therefore add up to the checksum of the expert, so that an expert that is sharded over
several ranks is compared without being gathered.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._compat.transformers.stored import convert, loaded_targets
from ..distributed.files.replace import finish_move
from ..distributed.files.sources import open_weights
from ..errors import CheckpointError, ConfigError, check_path
from ..plan.cut import share_spans
from ..train.runtime import Runtime, local_tensor, runtime_of
from ..train.runtime.batches import odd_numbers
from .stored_forms.forms import as_plain, load_weights_as
from .stored_forms.scheme import form_in

_INTEGERS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}
_BLOCK = 1 << 20
_MODULUS = 1 << 64

Sums = dict[int, int]  # index of an expert -> its checksum


def verify_experts(model: nn.Module, directory: str | Path) -> dict[str, Sums]:
    """Compare every expert, on the ranks that hold it, with the checkpoint that was loaded or saved last.

    Call it on every rank, before a step changes the weights. All ranks together read the experts' weights once; no rank
    holds more than one full parameter.

    Returns:
        the checksums of the experts of each parameter that ``ep_size`` shards, by name.

    Raises:
        CheckpointError: on every rank, if any expert differs; the message names an equal expert of the checkpoint, if
            one exists.
        ConfigError: the experts are held in 4 bits.
    """
    runtime = runtime_of(model)
    check_path("directory", directory)
    quantized = runtime.plan.quantized
    if quantized is not None and any(
        runtime.plan.by_name[name].cut_over("ep") for name in quantized.weights
    ):
        raise ConfigError(
            "verify_experts cannot compare experts that the model holds in 4 bits with those of the checkpoint: load "
            "the model without quantization_config, or with the experts in llm_int8_skip_modules"
        )
    held = runtime.mesh.all_gather_object(_held(runtime))
    types = {name: dtype for rank in held for name, (dtype, _, _) in rank.items()}
    try:
        own = _stored(runtime, Path(directory), types)
        failure = ""
    except (CheckpointError, OSError) as error:
        own = {}
        failure = str(error)
    answers = runtime.mesh.all_gather_object((own, failure))
    stored: dict[str, Sums] = {
        name: sums for sums_of_rank, _ in answers for name, sums in sums_of_rank.items()
    }
    problems = [text for _, text in answers if text] or _differences(held, stored)
    if problems:
        raise CheckpointError(
            f"{directory} differs from this model's weights: {'; '.join(dict.fromkeys(problems))}. Give the checkpoint "
            "that the model was loaded from, or load the model again"
        )
    return stored


def checksum(
    part: Tensor,
    spans: Sequence[Sequence[tuple[int, int]]],
    shape: Sequence[int],
) -> int:
    """Return the checksum of a slice of a tensor of ``shape``. The checksums of a tensor's slices add up to the
    tensor's own. ``spans`` are the slice's index ranges ``(start, stop)`` in the tensor, per dim.
    """
    places = [_places(dim, part.device) for dim in spans]
    rows = max(1, _BLOCK // max(1, prod(part.shape[1:])))
    total = 0
    for first in range(0, part.shape[0], rows):
        index = places[0][first : first + rows]
        for size, place in zip(shape[1:], places[1:], strict=True):
            index = index.unsqueeze(-1) * size + place
        bits = part[first : first + rows].contiguous().view(_INTEGERS[part.dtype.itemsize]).long()
        total += int((bits * odd_numbers(index)).sum())
    return total % _MODULUS


def _places(spans: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    return torch.tensor(
        list(chain.from_iterable(range(*span) for span in spans)), dtype=torch.long, device=device
    )


def _held(runtime: Runtime) -> dict[str, tuple[torch.dtype, Any, Sums]]:
    """Return, for each parameter of experts on this rank: its dtype; this rank's coordinates on the axes that do not
    shard it, which tell replicas from one another; and a checksum of this rank's shard of each expert, by the expert's
    index.
    """
    result: dict[str, tuple[torch.dtype, Any, Sums]] = {}
    group = runtime.mesh.group("ep")
    adapters = {adapter.name for adapter in runtime.plan.adapters}  # not in the checkpoint
    for planned, parameter in runtime.parameters():
        if planned.cut_over("ep") is None or group is None or planned.name in adapters:
            continue
        _, own = runtime.mesh.view(planned.cuts)
        ranks = {**own, "ep": dist.get_rank(group)}
        share = local_tensor(parameter.detach())
        experts, *spans = share_spans(planned.shape, planned.cuts, ranks)
        numbers = _places(experts, torch.device("cpu")).tolist()
        sums = {n: checksum(share[i], spans, planned.shape[1:]) for i, n in enumerate(numbers)}
        cut = {cut.axis for cut in planned.cuts}
        copy = tuple(rank for axis, rank in ranks.items() if axis not in cut)
        result[planned.name] = (parameter.dtype, copy, sums)
    return result


def _stored(
    runtime: Runtime,
    directory: Path,
    types: dict[str, torch.dtype],
) -> dict[str, Sums]:
    """Return the checksums of the checkpoint's experts, for this rank's parameters: ranks divide the reading."""
    by_name = runtime.plan.by_name
    finish_move(directory)
    stored = as_plain(open_weights(directory), form_in(directory))
    if not stored:
        raise CheckpointError(
            f"{directory} has no safetensors files: give the directory of the checkpoint"
        )
    targets = loaded_targets(runtime.model, list(stored), by_name)
    load_weights_as(stored, targets, types)
    keys: dict[str, list[str]] = {}
    for key, destination in targets.items():
        keys.setdefault(destination.name, []).append(key)
    like = SimpleNamespace(
        get_parameter=lambda name: torch.empty(by_name[name].shape, device="meta")
    )
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    result = {}
    for name in [name for name in by_name if name in types and name in keys][rank::world]:
        tensors = {key: stored[key][...].to(types[name]) for key in keys[name]}
        whole = convert(tensors, targets, like, runtime.model.config)[name]
        del tensors
        everything = [[(0, size)] for size in whole.shape[1:]]
        result[name] = {
            n: checksum(expert, everything, whole.shape[1:]) for n, expert in enumerate(whole)
        }
    return result


def _differences(
    held: list[dict[str, tuple[torch.dtype, Any, Sums]]], stored: dict[str, Sums]
) -> list[str]:
    """Describe the differences: one entry per expert of a parameter, with the ranks that hold a replica of it."""
    sums: dict[tuple[str, int, Any], int] = defaultdict(int)
    ranks: dict[tuple[str, int, Any], list[int]] = defaultdict(list)
    copies: dict[str, set[Any]] = defaultdict(set)
    for rank, parameters in enumerate(held):
        for name, (_, copy, own) in parameters.items():
            copies[name].add(copy)
            for number, value in own.items():
                sums[name, number, copy] = (sums[name, number, copy] + value) % _MODULUS
                ranks[name, number, copy].append(rank)
    problems = []
    for name, expected in stored.items():
        for number, value in expected.items():
            for copy in sorted(copies[name]):
                here = sums.get((name, number, copy))
                if here == value:
                    continue
                where = ", ".join(map(str, ranks[name, number, copy])) or "none"
                same = next((n for n, other in expected.items() if other == here), None)
                whose = "" if same is None else f" but expert {same}"
                problems.append(
                    f"expert {number} of {name} (rank {where}) is not the checkpoint's{whose}"
                )
    return problems
