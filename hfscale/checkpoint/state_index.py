"""The index of a saved state, ``state.json``, readable in every layout.

Tensors have the stock model's names and are described by their full shape and the cuts that they were written with. The
ranks that wrote a tensor's shards, and so the files they are in, follow from its cuts and the arrangement of the ranks.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config.parallel import ParallelConfig
from ..distributed.mesh import EXPERT_AXES, MESH_AXES
from ..errors import CheckpointError
from ..plan import Cut, Plan
from ..plan.state_tensor import StateTensor

INDEX = "state.json"
_VERSION = 2
_SIZES = ("pp", "dp_replicate", "dp_shard", "tp", "ep", "expert_tp", "cp")


@dataclass
class StateIndex:
    """The contents of ``state.json``.

    Attributes:
        sizes: axis -> size, of the layout that it was written in.
        layers: the layers of each pipeline rank, in words; empty without stages.
        axes: axes and sizes, outermost first: of the mesh, and of the mesh that experts see.
        step: the caller's step number.
        batch_world: distinct batches in a step.
        tensors: ``weights/NAME``, ``buffers/NAME`` and ``optimizer/KEY/NAME`` -> shape and cuts.
        numbers: name of a parameter -> its optimizer state besides tensors.
        groups: names of the parameters in each of the optimizer's groups; ``None`` without an optimizer.
        optimizer: its name, and the names of its options; ``None`` in states that were written without them.
        others: name of another saved object -> whether its state was the same on every rank.
        stored: name of a tensor in a checkpoint, or in an adapter's file -> its key here.
        adapter: whether these are an adapter's, in PEFT's names.
        versions: of the packages that wrote it.
    """

    sizes: dict[str, int]
    layers: list[str]
    axes: list[list[tuple[str, int]]]
    step: int | None = None
    batch_world: int = 1
    tensors: dict[str, StateTensor] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[list[str]] | None = None
    optimizer: list[Any] | None = None
    others: dict[str, bool] = field(default_factory=dict)
    stored: dict[str, str] = field(default_factory=dict)
    adapter: bool = False
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, layout: ParallelConfig, plan: Plan) -> "StateIndex":
        """Return an index of a layout, without contents."""
        return cls(
            {axis: layout.size(axis) for axis in _SIZES},
            layers_by_rank(layout, plan),
            [_axes(layout, experts) for experts in (False, True)],
            batch_world=layout.batch_world,
        )

    @property
    def world(self) -> int:
        """The number of ranks that wrote it."""
        return math.prod(size for _, size in self.axes[0])

    def rank_of(self, cuts: Sequence[Cut], ranks: dict[str, int]) -> int:
        """Return the global rank at coordinates ``ranks``, in the mesh that these ``cuts`` refer to."""
        number = 0
        for axis, size in self.axes[any(cut.axis == "ep" for cut in cuts)]:
            number = number * size + ranks.get(axis, 0) % size
        return number

    def placed_alike(self, other: "StateIndex") -> bool:
        """Return whether another layout has the same axes, sizes and layers per rank."""
        return (self.sizes, self.layers) == (other.sizes, other.layers)

    def write(self) -> bytes:
        """Return the bytes of the file."""
        told = {**vars(self), "version": _VERSION, "tensors": {k: t.told() for k, t in self.tensors.items()}}
        return json.dumps(told).encode()

    @classmethod
    def read(cls, directory: Path) -> "StateIndex":
        """Read the index of a saved state.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        try:
            told: dict[str, Any] = json.loads((directory / INDEX).read_bytes())
            if (version := told.pop("version")) != _VERSION:
                raise CheckpointError(
                    f"{directory} has format {version} and this hfscale reads format {_VERSION}: read it with the "
                    f"hfscale that wrote it ({told.get('versions', {}).get('hfscale', 'unknown')})"
                )
            told["tensors"] = {key: StateTensor.hear(each) for key, each in told["tensors"].items()}
            told["axes"] = [[(str(axis), int(size)) for axis, size in each] for each in told["axes"]]
            index = cls(**told)
            if not isinstance(index.step, int | None) or not isinstance(index.others, dict) or index.batch_world < 1:
                raise ValueError(f"step={index.step!r}, batch_world={index.batch_world!r}, others={index.others!r}")
            return index
        except FileNotFoundError as error:
            earlier = (directory / "layout.json").exists()
            what = "was written by an earlier hfscale, in a format of its own" if earlier else "is not a state"
            raise CheckpointError(
                f"{directory} {what}: give what hfscale.save_state wrote, or the directory that its states are in"
            ) from error
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{directory} has a damaged {INDEX} ({error}): use another state") from error


def _axes(layout: ParallelConfig, experts: bool) -> list[tuple[str, int]]:
    """Return axes and sizes, outermost first, of the mesh, or of the mesh that experts see."""
    if experts and layout.ep > 1:
        return [(axis, layout.size("expert_tp" if axis == "tp" else axis)) for axis in EXPERT_AXES]
    return [(axis, layout.size(axis)) for axis in MESH_AXES]


def layers_by_rank(layout: ParallelConfig, plan: Plan) -> list[str]:
    """Return the layers of each pipeline rank, in words."""
    if plan.stages is None:
        return []
    numbers = {name: number for number, name in enumerate(plan.layers)}
    return [
        ", ".join(f"{numbers[s.layers[0]]}-{numbers[s.layers[-1]]}" for s in plan.stages.of_rank(rank))
        for rank in range(layout.pp)
    ]


def writers(tensor: StateTensor) -> Iterator[range]:
    """Yield, for each cut of a tensor, the coordinates of the ranks that write a shard: the first of each replica."""
    for cut in tensor.cuts:
        yield range(0, cut.size, 1 if tensor.own else _copies(cut))


def writer_of(tensor: StateTensor, ranks: dict[str, int]) -> dict[str, int]:
    """Return the coordinates of the rank that writes the shard of the rank at ``ranks``."""
    return {
        cut.axis: (rank := ranks.get(cut.axis, 0)) - (0 if tensor.own else rank % _copies(cut)) for cut in tensor.cuts
    }


def _copies(cut: Cut) -> int:
    """Return how many consecutive ranks hold the same shard, if that is the same for all shards; else 1."""
    return cut.replicas[0] if len(set(cut.replicas)) == 1 else 1


def weights_name(rank: int) -> str:
    """Return the name of a rank's file of tensors."""
    return f"rank-{rank:05d}.safetensors"


def rest_name(rank: int) -> str:
    """Return the name of a rank's file of other data."""
    return f"rank-{rank:05d}.pt"
