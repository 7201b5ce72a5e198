"""Define the format of a saved state: its index ``state.json``, and how any shard is read from the written shards.

Tensors have the stock model's names and are described by their full shape and by how they were sharded (``cuts``). A
tensor's cuts and the arrangement of the ranks determine which ranks wrote its shards, and so which files contain them.
Only the needed bytes are read: the boxes in which the written shards overlap the wanted shard.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config.parallel import ParallelConfig
from ..distributed.files.reader import SafetensorsFile, TensorOnDisk
from ..distributed.mesh import EXPERT_AXES, MESH_AXES, Mesh
from ..errors import CheckpointError
from ..plan import Cut, Plan
from ..plan.cut import Spans, overlaps, share_spans
from ..plan.state_tensor import StateTensor

INDEX = "state.json"
_VERSION = 2
_OPEN_FILES = 64
_MOST_RANKS = 1 << 20
_SIZES = ("pp", "dp_replicate", "dp_shard", "tp", "ep", "expert_tp", "cp")


@dataclass
class StateIndex:
    """Hold the contents of ``state.json``."""

    sizes: dict[str, int]  # axis -> size, of the layout in which the state was written
    layers: list[
        str
    ]  # a description of the layers of each pipeline rank; empty without pipeline stages
    # Axes and sizes, outermost first, of the mesh and of the experts' mesh.
    axes: list[list[tuple[str, int]]]
    step: int | None = None  # the caller's step number
    batch_world: int = 1  # distinct batches in a step
    # ``weights/NAME``, ``buffers/NAME`` and ``optimizer/KEY/NAME`` -> shape and cuts
    tensors: dict[str, StateTensor] = field(default_factory=dict)
    # The optimizer's state of parameters, except tensors.
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Names of the parameters in each of the optimizer's groups, if there is one.
    groups: list[list[str]] | None = None
    # The optimizer's name and the names of its options; ``None``: not known.
    optimizer: list[Any] | None = None
    # Name of another saved object -> whether the object's state was equal on all ranks.
    others: dict[str, bool] = field(default_factory=dict)
    # Names of other saved objects whose states held different numbers on ranks with the same batch: shards, for example
    # of averaged weights.
    shards: list[str] = field(default_factory=list)
    # Name in a checkpoint or an adapter's file -> key in this index; the name is ``DIRECTORY/NAME`` for several
    # adapters.
    stored: dict[str, str] = field(default_factory=dict)
    adapter: bool = False  # whether ``stored`` contains an adapter's tensors, under PEFT's names
    # The checkpoint that was loaded, and the names of its tensors that the model's class does not load.
    carried: list[Any] | None = None
    versions: dict[str, str] = field(
        default_factory=dict
    )  # versions of the packages that wrote the state

    @classmethod
    def of_layout(cls, layout: ParallelConfig, plan: Plan) -> "StateIndex":
        """Return an index that describes a layout's axes and pipeline stages, and contains no tensors yet."""
        numbers = {name: number for number, name in enumerate(plan.layers)}
        ranks = [plan.stages.of_rank(rank) for rank in range(layout.pp)] if plan.stages else []
        axes = [(axis, layout.size(axis)) for axis in MESH_AXES]
        of_experts = [
            (axis, layout.size("expert_tp" if axis == "tp" else axis)) for axis in EXPERT_AXES
        ]
        return cls(
            {axis: layout.size(axis) for axis in _SIZES},
            [
                ", ".join(f"{numbers[s.layers[0]]}-{numbers[s.layers[-1]]}" for s in stages)
                for stages in ranks
            ],
            [axes, of_experts if layout.ep > 1 else axes],
            batch_world=layout.batch_world,
        )

    @property
    def world(self) -> int:
        """Return the number of ranks that wrote the state."""
        return prod(size for _, size in self.axes[0])

    def rank_of(
        self,
        ranks: dict[str, int],
        cuts: Sequence[Cut] = (),
    ) -> int:
        """Return the global rank, in the run that wrote the state, that had the mesh coordinates ``ranks``. For
        ``cuts`` over the expert-parallel axis, these are coordinates of the experts' mesh.
        """
        number = 0
        for axis, size in self.axes[any(cut.axis == "ep" for cut in cuts)]:
            number = number * size + ranks.get(axis, 0) % size
        return number

    def rank_with_batch(self, mesh: Mesh) -> int:
        """Return the saved rank that had this rank's batches, or the first rank if no rank had them."""
        if mesh.batch_world != self.batch_world:
            return 0
        replicate, shard = divmod(mesh.batch_rank * self.sizes["cp"], self.sizes["dp_shard"])
        return self.rank_of({"dp_replicate": replicate, "dp_shard": shard})

    def rank_with_random_states(self, mesh: Mesh) -> tuple[int, str]:
        """Return the rank of the saved run whose RNG states this rank continues in another layout, and a label. The
        label is empty if both ranks have the same data rank and pipeline stage; otherwise, new RNG states are seeded
        from the saved ones and the label.
        """
        data = mesh.data_rank
        stage = mesh.pp_rank
        there = data if data < self.sizes["dp_replicate"] * self.sizes["dp_shard"] else 0
        at = stage if stage < self.sizes["pp"] else 0
        replicate, shard = divmod(there, self.sizes["dp_shard"])
        rank = self.rank_of({"pp": at, "dp_replicate": replicate, "dp_shard": shard})
        return rank, "" if (there, at) == (data, stage) else f"{data}, stage {stage}"

    def write(self) -> bytes:
        """Return the state index as the bytes of its file."""
        told = {
            **vars(self),
            "version": _VERSION,
            "tensors": {k: t.to_dict() for k, t in self.tensors.items()},
        }
        return json.dumps(told).encode()

    def check_bytes(self, size: int) -> None:
        """Raise ValueError if tensors have more entries than files of ``size`` bytes can store, or more shards than
        ranks, or if there are impossibly many ranks.
        """
        told = sum(prod(tensor.shape) for tensor in self.tensors.values() if not tensor.own)
        pieces = max(
            (cut.size for tensor in self.tensors.values() for cut in tensor.cuts), default=1
        )
        if told > size or pieces > self.world or self.world > _MOST_RANKS:
            raise ValueError(
                f"the index lists tensors with {told:,} entries in files of {size:,} bytes, {self.world:,} ranks, and "
                f"up to {pieces:,} shards per tensor, which do not fit together"
            )

    @classmethod
    def read(cls, directory: Path) -> "StateIndex":
        """Read the index of a saved state; raise :class:`CheckpointError` if the index is missing or damaged."""
        try:
            told: dict[str, Any] = json.loads((directory / INDEX).read_bytes())
            if (version := told.pop("version")) != _VERSION:
                raise CheckpointError(
                    f"{directory} has format {version}, but this hfscale reads format {_VERSION}: load the state with "
                    f"the version of hfscale that wrote it ({told.get('versions', {}).get('hfscale', 'unknown')})"
                )
            told["tensors"] = {
                key: StateTensor.from_dict(each) for key, each in told["tensors"].items()
            }
            told["axes"] = [
                [(str(axis), int(size)) for axis, size in each] for each in told["axes"]
            ]
            index = cls(**told)
            if (
                not isinstance(index.step, int | None)
                or not isinstance(index.others, dict)
                or index.batch_world < 1
            ):
                raise ValueError(
                    "step must be a whole number or null, batch_world at least 1 and others a mapping, got "
                    f"step={index.step!r}, batch_world={index.batch_world!r}, others={index.others!r}"
                )
            index.check_bytes(
                sum(path.stat().st_size for path in directory.glob("rank-*.safetensors"))
            )
            return index
        except FileNotFoundError as error:
            earlier = (directory / "layout.json").exists()
            what = (
                "was written by an earlier hfscale, in another format"
                if earlier
                else "is not a state"
            )
            raise CheckpointError(
                f"{directory} {what}: give a directory written by hfscale.save_state, or its parent"
            ) from error
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{directory} has a damaged {INDEX} ({error}): use another state"
            ) from error


def is_written_by(mesh: Mesh, tensor: StateTensor) -> bool:
    """Return whether this rank writes its shard of ``tensor`` to disk: of all ranks with a replica of this shard, only
    the first writes it.
    """
    _, ranks = mesh.view(tensor.cuts)
    writers = {
        cut.axis: holders for cut, holders in zip(tensor.cuts, _writers(tensor), strict=True)
    }
    return ranks.pop("pp") == tensor.home and all(
        rank in writers.get(axis, (0,)) for axis, rank in ranks.items()
    )


def _writers(tensor: StateTensor) -> Iterator[range]:
    """Yield, for each cut of a tensor, the coordinates of the ranks that write a shard: the first rank of each shard's
    replicas.
    """
    for cut in tensor.cuts:
        yield range(0, cut.size, 1 if tensor.own else _copies(cut))


def _copies(cut: Cut) -> int:
    """Return how many consecutive ranks of an axis hold replicas of the same shard; 1 if this number differs between
    shards.
    """
    return cut.replicas[0] if len(set(cut.replicas)) == 1 else 1


def weights_name(rank: int) -> str:
    """Return the name of a rank's file of tensors."""
    return f"rank-{rank:05d}.safetensors"


def rest_name(rank: int) -> str:
    """Return the name of the file in which a rank writes RNG states and other data that are no tensors."""
    return f"rank-{rank:05d}.pt"


class StateReader:
    """Read the index of one saved state, and its tensors by their keys in the index. Raise :class:`CheckpointError` if
    the index is missing or damaged.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.index = StateIndex.read(directory)
        self._file = lru_cache(_OPEN_FILES)(
            lambda rank: SafetensorsFile(directory / weights_name(rank)).slices()
        )

    def read(self, key: str, wanted: StateTensor, ranks: dict[str, int]) -> Tensor:
        """Return a copy, on the CPU, of the shard of a tensor that belongs to the rank with mesh coordinates ``ranks``.
        ``wanted`` describes how this run's layout shards the tensor.
        """
        self.check(key, wanted)
        written = self.index.tensors[key]
        if written.cuts == wanted.cuts and (written.own or written.block == wanted.block):
            if not written.own and 0 in wanted.local_shape(ranks):
                return self._empty(key, wanted.local_shape(ranks))
            first = {c.axis: ranks.get(c.axis, 0) for c in written.cuts}
            if not written.own:
                first = {c.axis: first[c.axis] - first[c.axis] % _copies(c) for c in written.cuts}
            return self._piece(key, written, first)[...]
        if written.block or wanted.block:
            whole = self.whole(key)
            return whole[..., wanted.blocks(ranks)].contiguous() if wanted.block else whole
        return self._assembled(key, written, wanted.spans(ranks))

    def dtype(self, key: str) -> torch.dtype:
        """Return a tensor's dtype."""
        return self._piece(key, self.index.tensors[key], {}).dtype

    def check(self, key: str, wanted: StateTensor) -> None:
        """Raise :class:`CheckpointError` if the state has no tensor ``key``, or if the shard ``wanted`` by this run
        cannot be read from it, because the shapes differ or the saved data fit only the layout in which they were
        saved.
        """
        written = self.index.tensors.get(key)
        if written is None:
            raise CheckpointError(
                f"{self.directory} has no {key}, because it was saved from another model or optimizer: give a state of "
                "this model and optimizer"
            )
        if written.own and written.cuts != wanted.cuts:
            raise CheckpointError(
                f"{self.directory} has {key} as rank-local data, usable only in its layout {self.index.sizes}: "
                "resume in that layout, or make the optimizer with hfscale.create_optimizer, whose states resume "
                "in every layout"
            )
        if not written.own and written.shape != wanted.shape:
            raise CheckpointError(
                f"{self.directory} has {key} of shape {written.shape}, but this model needs {wanted.shape}, so the "
                "state belongs to another model: give a state of this model"
            )

    def _piece(self, key: str, written: StateTensor, ranks: dict[str, int]) -> TensorOnDisk:
        rank = self.index.rank_of({**ranks, "pp": written.home}, written.cuts)
        piece: TensorOnDisk | None = self._file(rank).get(key)
        if piece is None:
            raise CheckpointError(
                f"{self.directory}/{weights_name(rank)} has no {key}, which must contain that rank's shard: the file "
                "is damaged, use another state"
            )
        shape = (
            piece.shape
            if written.own
            else written.local_shape(dict.fromkeys(self.index.sizes, 0) | ranks)
        )
        if piece.shape != shape:
            raise CheckpointError(
                f"{self.directory}/{weights_name(rank)} has {key} of shape {piece.shape} instead of {shape}: the file "
                "is damaged or belongs to another rank, use another state"
            )
        return piece

    def _pieces(
        self,
        written: StateTensor,
        wanted: list[Spans],
    ) -> Iterator[dict[str, int]]:
        """Yield the mesh coordinates of the written shards of a tensor that overlap the shard that is ``wanted``. One
        axis that shards the tensor is compared after another, so that most shards are skipped early.
        """
        holders = list(_writers(written))

        def below(done: int, ranks: dict[str, int]) -> Iterator[dict[str, int]]:
            spans = share_spans(written.weight or written.shape, written.cuts[:done], ranks)
            if wanted and not all(
                overlaps(want, held) for want, held in zip(wanted, spans, strict=True)
            ):
                return
            if done == len(written.cuts):
                yield ranks
                return
            for rank in holders[done]:
                yield from below(done + 1, {**ranks, written.cuts[done].axis: rank})

        yield from below(0, {})

    def _assembled(self, key: str, written: StateTensor, wanted: list[Spans]) -> Tensor:
        shape = [sum(stop - start for start, stop in dim) for dim in wanted]
        tensor = self._empty(key, shape)
        if 0 in shape:
            return tensor
        covered = 0
        for ranks in self._pieces(written, wanted):
            piece = self._piece(key, written, ranks)
            meet = [
                overlaps(want, held)
                for want, held in zip(wanted, written.spans(ranks), strict=True)
            ]
            for box in product(*meet):
                place = tuple(slice(into, into + length) for into, _, length in box)
                tensor[place] = piece.read(
                    tuple((start, start + length) for _, start, length in box)
                )
                covered += prod(length for *_, length in box)
        if covered < prod(shape):
            raise CheckpointError(
                f"{self.directory} has only some of the shards of {key}: the state is damaged, use another state"
            )
        return tensor

    def whole(self, key: str) -> Tensor:
        """Return the full tensor that the state has under ``key``, assembled from all of its written shards."""
        written = self.index.tensors[key]
        if not written.block:
            return self._assembled(key, written, [[(0, size)] for size in written.shape])
        tensor = self._empty(key, written.shape)
        for ranks in self._pieces(written, []):
            numbers = written.blocks(ranks)
            if len(numbers):
                tensor[..., numbers] = self._piece(key, written, ranks)[...]
        return tensor

    def _empty(self, key: str, shape: Any) -> Tensor:
        return torch.empty(tuple(shape), dtype=self.dtype(key))
