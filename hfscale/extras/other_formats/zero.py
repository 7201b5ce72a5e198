"""Read DeepSpeed's ZeRO checkpoints: each rank has flat partitions, in which parameters follow one another.

::

    latest                                         global_step3
    global_step3/mp_rank_00_model_states.pt        stages 1 and 2: names and shapes of parameters, by group; schedule
    global_step3/zero_pp_rank_0_mp_rank_00_...     stage 3: the same contents, one file per rank
        ..._optim_states.pt                        partitions of each group, of weights and of moments, in 32 bits

    stages 1, 2    rank 0 [q q q q k] rank 1 [k v v v v]     a group may be split inside a parameter
    stage 3        rank 0 [q q k v v] rank 1 [q q k v v]     each parameter is sharded over all ranks, padded at its end

Trained weights are the 32-bit master weights. Frozen weights are in the model states, in their own dtype: in full with
stages 1 and 2; with stage 3, every rank's file has a fragment of each frozen weight. Buffers are in the model states
too. The files contain objects of DeepSpeed's classes; stand-ins replace these, and nothing of DeepSpeed is imported or
run.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..._compat.torch_files import PlaceInFile, structure_of_file
from ...distributed.files.directories import check_inside
from ...distributed.files.reader import Box, BytesOnDisk, TensorOnDisk
from ...distributed.files.torch_file import TensorInTorchFile
from ...errors import CheckpointError, first_line

LATEST = "latest"
OPTIMIZER_STATES = "*zero_pp_rank_*_mp_rank_*_optim_states.pt"
_MODEL_STATES = "*mp_rank_*_model_states.pt"
_GROUPS = {
    1: "single_partition_of_fp32_groups",
    2: "single_partition_of_fp32_groups",
    3: "fp32_flat_groups",
}
_STATES = {1: "base_optimizer_state", 2: "base_optimizer_state", 3: "optimizer_state_dict"}


@dataclass(frozen=True)
class Run:
    """Describe where consecutive values of a tensor are in one flat tensor: ``length`` values from ``begin`` on."""

    flat: TensorOnDisk  # ``[n]``
    begin: int
    length: int


class TensorInRuns(TensorOnDisk):
    """Read one tensor whose values, row after row, are the concatenation of several runs (parts of flat tensors)."""

    def __init__(self, name: str, shape: tuple[int, ...], runs: list[Run]) -> None:
        self.name = name
        self.shape = shape
        self.dtype = runs[0].flat.dtype if runs else torch.float32
        self._runs = runs
        found = sum(run.length for run in runs)
        if found != prod(shape):
            raise CheckpointError(
                f"{name} of shape {list(shape)} must have {prod(shape):,} values in the partitions of all ranks, got "
                f"{found:,}: copy the files of all ranks"
            )

    def read(self, spans: Box) -> Tensor:
        """Return a copy of the box ``spans``; only the rows of the box are read."""
        if not self.shape:
            return self._values(0, 1).view(())
        (first, last), *rest = spans
        width = prod(self.shape[1:])
        rows = self._values(first * width, last * width).view(last - first, *self.shape[1:])
        box = tuple(slice(start, stop) for start, stop in rest)
        return rows[(slice(None), *box)].contiguous()

    def _values(self, start: int, stop: int) -> Tensor:
        out = torch.empty(stop - start, dtype=self.dtype)
        at = 0
        for run in self._runs:
            low, high = max(start, at), min(stop, at + run.length)
            if low < high:
                begin = run.begin + low - at
                out[low - start : high - start] = run.flat.read(((begin, begin + high - low),))
            at += run.length
        return out


class ZeroCheckpoint:
    """Hold the contents of a DeepSpeed checkpoint; raise :class:`CheckpointError` if it cannot be read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory_of_step(directory)
        paths = sorted(self.directory.glob(OPTIMIZER_STATES), key=_rank)
        states = sorted(self.directory.glob(_MODEL_STATES), key=_rank)
        if not states or any("_mp_rank_00_" not in f"_{path.name}" for path in (*paths, *states)):
            raise CheckpointError(
                f"{self.directory} must have been written by data-parallel ranks alone (mp_rank_00), got "
                f"{[path.name for path in states]}, of model-parallel ranks, whose slices no file describes: join the "
                "weights where they were trained (DeepSpeed's engine.save_16bit_model), or with Megatron-DeepSpeed's "
                "deepspeed_to_transformers.py"
            )
        self._model = _read(states[0])
        self._model_files = states
        self._files = [BytesOnDisk(path) for path in paths]
        with self._as_written():
            self._ranks = [_read(path)["optimizer_state_dict"] for path in paths]
            counts = self._ranks[0]["partition_count"]
            count = max(counts) if isinstance(counts, list) else counts
            self.stage = 3 if _GROUPS[3] in self._ranks[0] else 2
            self.shapes = [
                {str(name): tuple(map(int, shape)) for name, shape in group.items()}
                for group in self._model["param_shapes"]
            ]
        if count != len(paths):
            raise CheckpointError(
                f"{self.directory} must have the files of {count} ranks ({OPTIMIZER_STATES}), got {len(paths)} files: "
                "copy the files of all ranks"
            )

    @contextmanager
    def _as_written(self) -> Iterator[None]:
        """Raise :class:`CheckpointError` if the ``with`` block fails because the files lack entries that DeepSpeed
        writes.
        """
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{self.directory} must hold the entries that DeepSpeed writes, but does not ({first_line(error)}, "
                f"{type(error).__name__}): copy the checkpoint again, or merge it once with DeepSpeed's zero_to_fp32.py"
            ) from error

    @property
    def step(self) -> int:
        """Return the number of optimizer steps that were done."""
        return int(self._model["global_steps"])

    @property
    def schedule(self) -> dict[str, Any] | None:
        """Return the state of the learning-rate schedule, if DeepSpeed saved one."""
        return self._model.get("lr_scheduler")

    def weights(self) -> dict[str, TensorOnDisk]:
        """Return lazy tensors of all weights, by name."""
        with self._as_written():
            partitions = [rank[_GROUPS[self.stage]] for rank in self._ranks]
            found: dict[str, TensorOnDisk] = dict(self._tensors(partitions))
            found |= self._frozen()
            shared = self._model.get("shared_params") or {}
            self._add_whole(found, shared)
            for name, source in shared.items():
                found[name] = found[source]
        return found

    def _frozen(self) -> dict[str, TensorOnDisk]:
        """Return the frozen weights: with stages 1 and 2 as stored, with stage 3 composed of a fragment in every rank's
        file.
        """
        shapes = self._model.get("frozen_param_shapes") or {}
        paths = self._model_files if shapes and self.stage == 3 else self._model_files[:1]
        if shapes and self.stage == 3 and len(paths) != len(self._ranks):
            raise CheckpointError(
                f"{self.directory} must have the model states of {len(self._ranks)} ranks, each with its fragments of "
                f"the frozen weights, got {len(paths)} files: copy the files of all ranks"
            )
        files = [BytesOnDisk(path) for path in paths]
        held = [_read(path)["frozen_param_fragments"] for path in paths] if shapes else []
        found: dict[str, TensorOnDisk] = {}
        for name, given in shapes.items():
            shape = tuple(map(int, given))
            parts = [
                TensorInTorchFile(file, name, each[name])
                for file, each in zip(files, held, strict=True)
            ]
            if self.stage == 3:
                found[name] = TensorInRuns(name, shape, _runs([*parts], 0, prod(shape)))
            elif parts[0].shape == shape:
                found[name] = parts[0]
            else:
                raise ValueError(
                    f"{name} must have the shape {shape}, but is stored with the shape {parts[0].shape}"
                )
        return found

    def _add_whole(self, found: dict[str, TensorOnDisk], shared: Collection[str]) -> None:
        """Add to ``found`` the missing tensors that the file of model states holds in full, in their own dtype: buffers
        and, with ZeRO stages 1 and 2, weights. ``shared`` names, which stand for other weights, are left out.
        """
        file = BytesOnDisk(self._model_files[0])
        buffers = self._model.get("buffer_names") or ()
        module = self._model.get("module") or {}
        places: dict[str, PlaceInFile] = {}
        for name, place in module.items():
            told = self.stage < 3 or name in buffers
            if isinstance(place, PlaceInFile) and told and name not in shared:
                places[name] = place
        # Tied weights have the same place in the file.
        known = {places[name].begin: name for name in found if name in places}
        for name, place in places.items():
            if name not in found and 0 not in place.shape and place.begin in known:
                found[name] = found[known[place.begin]]
            elif name not in found:
                found[name] = TensorInTorchFile(file, name, place)

    def optimizer(self) -> dict[str, Any]:
        """Return the optimizer's state in the form of ``state_dict()``, but with lazy tensors, and with parameters'
        names instead of their indices.
        """
        base = [rank[_STATES[self.stage]] for rank in self._ranks]
        if not isinstance(base[0], dict) or not base[0].get("state"):
            raise CheckpointError(
                f"{self.directory} must hold an optimizer's state with one entry per parameter group, but holds none: "
                "continue training from the weights alone"
            )
        names = [list(group) for group in self.shapes]
        groups = [
            {**group, "params": own}
            for group, own in zip(base[0]["param_groups"], names, strict=True)
        ]
        return {"state": self._states([each["state"] for each in base]), "param_groups": groups}

    def _states(self, by_rank: list[dict[int, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
        """Return the optimizer state of each parameter, by name, given the states of the partitions of every rank."""
        state: dict[str, dict[str, Any]] = {name: {} for group in self.shapes for name in group}
        numbers = sorted(by_rank[0])
        for key, value in by_rank[0][numbers[0]].items():
            if isinstance(value, PlaceInFile) and value.shape:
                flats = [[rank[number][key] for number in numbers] for rank in by_rank]
                found: dict[str, Any] = dict(self._tensors(flats))
            else:
                found = dict.fromkeys(state, self._scalar(value))
            for name, each in found.items():
                state[name][key] = each
        return state

    def _scalar(self, value: Any) -> Any:
        return self._flat(0, value)[...] if isinstance(value, PlaceInFile) else value

    def _tensors(self, partitions: list[list[PlaceInFile]]) -> list[tuple[str, TensorInRuns]]:
        """Return every parameter's tensor from flat partitions; each rank has one partition per parameter group."""
        by_rank = [[self._flat(n, each) for each in rank] for n, rank in enumerate(partitions)]
        return self._cut_everywhere(by_rank) if self.stage == 3 else self._one_by_one(by_rank)

    def _one_by_one(self, by_rank: list[list[TensorOnDisk]]) -> list[tuple[str, TensorInRuns]]:
        """Return every parameter's tensor, located in the concatenation of all ranks' partitions of its group (ZeRO
        stages 1 and 2).
        """
        found = []
        paddings = self._ranks[0].get("param_alignment_paddings")
        for number, group in enumerate(self.shapes):
            flats = [rank[number] for rank in by_rank]
            padded = paddings[number] if paddings else [0] * len(group)
            at = 0
            for (name, shape), padding in zip(group.items(), padded, strict=True):
                runs = _runs(flats, at, prod(shape))
                found.append((name, TensorInRuns(name, shape, runs)))
                at += prod(shape) + int(padding)
        return found

    def _cut_everywhere(self, by_rank: list[list[TensorOnDisk]]) -> list[tuple[str, TensorInRuns]]:
        """Return every parameter's tensor, located in the partitions of all ranks, each of which has a shard of it
        (ZeRO stage 3).
        """
        found = []
        at = 0
        for name, shape in ((n, shape) for group in self.shapes for n, shape in group.items()):
            part = ceil(prod(shape) / len(by_rank))
            runs = []
            left = prod(shape)
            for flats in by_rank:
                runs += _runs(flats, at, min(part, left))
                left -= min(part, left)
            found.append((name, TensorInRuns(name, shape, runs)))
            at += part
        return found

    def _flat(self, rank: int, place: PlaceInFile) -> TensorOnDisk:
        return TensorInTorchFile(self._files[rank], "a partition", place)


def directory_of_step(directory: Path) -> Path:
    """Return the directory of the step that the file ``latest`` names; ``directory`` itself without that file."""
    latest = directory / LATEST
    if not latest.is_file():
        return directory
    name = latest.read_text().strip()
    check_inside(name, latest)
    return directory / name


def open_partitions(directory: Path) -> dict[str, TensorOnDisk]:
    """Return lazy tensors of the weights, in 32 bits where they trained, by their names in the model."""
    return ZeroCheckpoint(directory).weights()


def _read(path: Path) -> dict[str, Any]:
    try:
        found = structure_of_file(path, "deepspeed")
        if not isinstance(found, dict):
            raise ValueError(f"the file contains a {type(found).__name__}, but must contain a dict")
    except Exception as error:  # of any type: damaged files, or other classes
        raise CheckpointError(
            f"{path} must be a file of DeepSpeed's, but cannot be read ({first_line(error)}): copy it again, or merge "
            "the checkpoint once with DeepSpeed's zero_to_fp32.py"
        ) from error
    return found


def _rank(path: Path) -> int:
    _, _, rest = path.name.partition("zero_pp_rank_")
    return int(rest.partition("_")[0]) if rest else 0


def _runs(flats: list[TensorOnDisk], start: int, length: int) -> list[Run]:
    """Return where the ``length`` values from ``start`` on are, in the concatenation of ``flats``: one run for each
    flat tensor that has some of them.
    """
    found = []
    at = 0
    for flat in flats:
        size = flat.shape[0]
        low, high = max(start, at), min(start + length, at + size)
        if low < high:
            found.append(Run(flat, low - at, high - low))
        at += size
    return found
