"""Run Muon (Jordan et al. 2024) over shards, with the arithmetic of ``torch.optim.Muon``.

The update is the momentum, replaced by the nearest orthogonal matrix. Momentum is elementwise and sharded like the
gradient. The orthogonal matrix needs the full matrix: one of the ranks that hold shards or replicas of a matrix gets
all shards, orthogonalizes the matrix, and sends each rank its shard of the result. This takes two all-to-alls per
axis for all matrices together (one for replicas), in bfloat16. Matrices are assigned to ranks by cost::

    4 matrices over 2 ranks     rank 0: [a0 b0 c0 d0]  -->  [a0 a1] [d0 d1]  -->  [a0' b0' c0' d0']
                                rank 1: [a1 b1 c1 d1]  -->  [b0 b1] [c0 c1]  -->  [a1' b1' c1' d1']

Each expert of a stack is a separate matrix. So is each matrix that is fused in a projection, if ``split`` names the
projection.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, chain, pairwise, product
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.mesh import Mesh
from ..distributed.ops.collectives import all_to_all
from ..errors import ConfigError
from ..models.module_kinds import is_transposed
from ..plan import Cut, ParameterPlan
from ..plan.cost_shares import share_by_cost
from ..plan.cut import cut_shape, share_spans, write_share
from ..plan.parameter import MODEL_AXES
from .sharded import Groups, Member, State, Stepper, gradients_present, stock_defaults

DEFAULTS: dict[str, Any] = stock_defaults(torch.optim.Muon)
_EPS = DEFAULTS.pop("eps")
ADJUSTMENTS = {
    **dict.fromkeys((None, "original"), lambda rows, columns: math.sqrt(max(1, rows / columns))),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""``adjust_lr_fn`` -> function from rows and columns of a matrix to the factor on its learning rate."""
NS_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
Split = Mapping[str, int | Sequence[int]]
"""Name of a projection -> the number of equal matrices fused in it along its outputs (like heads), or their lengths."""


def is_hidden_matrix(
    planned: ParameterPlan,
    owners: Sequence[nn.Module],
    layers: Sequence[str],
    stacks: Collection[str] = (),
) -> bool:
    """Return whether a parameter is a matrix in a layer, or a stack of matrices (experts) in one of the modules
    ``stacks``.
    """
    dims = 3 if planned.name.rpartition(".")[0] in stacks else 2
    if len(planned.shape) != dims or any(isinstance(owner, nn.Embedding) for owner in owners):
        return False
    return any(planned.name.startswith(f"{layer}.") for layer in layers)


def projection_of(planned: ParameterPlan) -> str:
    """Return the last component of the name of the projection whose weight ``planned`` is."""
    return planned.name.removesuffix(".weight").rpartition(".")[2]


def bounds_of(
    planned: ParameterPlan, owners: Sequence[nn.Module], split: Split
) -> tuple[int, list[int]]:
    """Return the dim of a parameter's matrix along which several matrices are fused, and the boundaries between these
    matrices, from 0 to the length of the dim. There is one matrix unless ``split`` names the parameter's projection.
    """
    asked = split.get(projection_of(planned), 1)
    across = any(is_transposed(owner) or getattr(owner, "is_transposed", False) for owner in owners)
    length = planned.shape[-1 if across else -2]
    lengths = [length // max(asked, 1)] * asked if isinstance(asked, int) else list(asked)
    if sum(lengths) != length or min(lengths) < 1:
        raise ConfigError(
            f"split={dict(split)!r} does not fit {planned.name}, which has {length} outputs: give a number of equal "
            f"matrices that divides {length}, or a list of lengths whose sum is {length}"
        )
    return int(across), list(accumulate(lengths, initial=0))


@dataclass(frozen=True, eq=False)
class Matrix:
    """Describe the matrix of a parameter, or one matrix of a stack. Several matrices may be fused in it along
    ``dim``.
    """

    member: Member
    # Index of the matrix among this rank's matrices of a stack; empty for a parameter that is a matrix itself
    index: tuple[int, ...]
    shape: tuple[int, int]  # global rows and columns
    cuts: tuple[Cut, ...]
    free: Collection[str]  # the axes over which the matrix is replicated
    dim: int
    bounds: Sequence[int]  # boundaries between the fused matrices along ``dim``

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Rows and columns of each fused matrix."""
        rows, columns = self.shape
        lengths = [stop - start for start, stop in pairwise(self.bounds)]
        return [(rows, length) if self.dim else (length, columns) for length in lengths]

    def cut_over(self, axes: Collection[str]) -> list[Cut]:
        """Return the :class:`Cut`, which describes how a dim is sharded, of each of ``axes`` over which the matrix is
        sharded.
        """
        return [cut for cut in self.cuts if cut.axis in axes]

    def split(
        self, tensor: Tensor, cuts: Sequence[Cut], ranks: dict[str, int]
    ) -> tuple[Tensor, ...]:
        """Split ``tensor`` into the shards of the matrices that are fused in this matrix. ``tensor`` is the shard of
        the rank at coordinates ``ranks``, if the matrix is sharded as ``cuts`` describe.
        """
        spans = share_spans(self.shape, cuts, ranks)[self.dim]
        before = [
            sum(max(0, min(stop, bound) - start) for start, stop in spans) for bound in self.bounds
        ]
        return tensor.split([stop - start for start, stop in pairwise(before)], self.dim)


class MuonStepper(Stepper):
    """Update the parameters ``members`` by Muon. Matrices are orthogonalized in ``dtype``; ``bounds`` maps the name of
    a parameter to the result of :func:`bounds_of`.
    """

    def __init__(
        self,
        members: Sequence[Member],
        mesh: Mesh,
        bounds: Mapping[str, tuple[int, list[int]]],
        dtype: torch.dtype,
    ) -> None:
        super().__init__(members, mesh)
        self._nothing = torch.empty(0, dtype=dtype, device=mesh.device)
        self._matrices = [
            list(_matrices_of(member, mesh, *bounds[member.planned.name])) for member in members
        ]
        every = list(chain(*self._matrices))
        axes = {cut.axis for matrix in every for cut in matrix.cuts}.union(
            *(matrix.free for matrix in every)
        )
        # Gather over the last cut (the data axes) first.
        self._axes = [
            axis
            for axis in sorted(axes, key=lambda axis: (axis in MODEL_AXES, axis))
            if mesh.group(axis)
        ]
        self._dealt = cache(_dealt)

    def step(self, groups: Groups, state: State) -> None:
        """Make one update, with all-to-alls over the mesh axes over which the parameters are sharded or replicated."""
        present = gradients_present(self.members, self._mesh)
        pieces = dict[Matrix, Tensor]()
        for member, matrices, with_gradient in zip(
            self.members, self._matrices, present, strict=True
        ):
            if not with_gradient:
                continue
            grad = member.gradient
            group = groups[member.group]
            average = state.setdefault(member.parameter, {}).setdefault(
                "momentum_buffer", torch.zeros_like(grad)
            )
            average.lerp_(grad, 1 - group["momentum"])
            update = grad.lerp(average, group["momentum"]) if group["nesterov"] else average
            pieces |= {matrix: update[matrix.index].to(self._nothing.dtype) for matrix in matrices}
            member.weight.mul_(1 - group["lr"] * group["weight_decay"])
        for matrix, update in self._orthogonal(pieces, self._axes, groups).items():
            group = groups[matrix.member.group]
            weight = matrix.member.weight[matrix.index]
            shares = (
                matrix.split(each, matrix.cuts, self._mesh.ranks) for each in (weight, update)
            )
            for size, share, orthogonal in zip(matrix.sizes, *shares, strict=True):
                share.add_(
                    orthogonal, alpha=-group["lr"] * ADJUSTMENTS[group["adjust_lr_fn"]](*size)
                )

    def _orthogonal(
        self, pieces: dict[Matrix, Tensor], axes: Sequence[str], groups: Groups
    ) -> dict[Matrix, Tensor]:
        """Return this rank's shards of the orthogonalized updates. ``pieces`` are its shards of the updates, which are
        sharded over ``axes``, before they are orthogonalized.
        """
        if not axes:
            return {
                each: _orthogonalized(each, whole, groups[each.member.group])
                for each, whole in pieces.items()
            }
        axis = axes[0]
        own = self._mesh.ranks[axes[0]]
        moving = tuple(
            matrix for matrix in pieces if axis in matrix.free or matrix.cut_over([axis])
        )
        if not moving:
            return self._orthogonal(pieces, axes[1:], groups)
        owned = self._dealt(moving, self._mesh.layout.size(axis))
        ranks = range(len(owned))
        held = {matrix: pieces.pop(matrix) for matrix in moving}
        pieces |= {matrix: held[matrix] for matrix in owned[own]}
        pieces |= self._complete(held, owned, axes)
        del held  # these shards were sent
        done = self._orthogonal(pieces, axes[1:], groups)
        whole = [(matrix.cut_over([axis]), done.pop(matrix)) for matrix in owned[own]]
        parcels = [
            [cuts[0].take(made, rank) if cuts else made for cuts, made in whole] for rank in ranks
        ]
        returned = self._exchanged_shares(parcels, owned, [own] * len(owned), axes)
        return done | dict(zip(chain(*owned), chain(*returned), strict=True))

    def _complete(
        self,
        held: dict[Matrix, Tensor],
        owned: Sequence[Sequence[Matrix]],
        axes: Sequence[str],
    ) -> dict[Matrix, Tensor]:
        """Return the matrices assigned to this rank, gathered over the axis ``axes[0]``. ``held`` are this rank's
        shards, and ``owned`` lists the matrices assigned to each rank of the axis. Matrices that are not sharded over
        the axis are left out.
        """
        cut = [[m for m in each if m.cut_over(axes[:1])] for each in owned]
        own = self._mesh.ranks[axes[0]]
        whole = dict[Matrix, Tensor]()
        if any(cut):
            parcels = [[held[matrix] for matrix in each] for each in cut]
            arrived = self._exchanged_shares(
                parcels,
                [cut[own]] * len(owned),
                range(len(owned)),
                axes,
            )
            for matrix, *shares in zip(cut[own], *arrived, strict=True):
                shape = cut_shape(matrix.shape, matrix.cut_over(axes[1:]), self._mesh.ranks)
                whole[matrix] = shares[0].new_empty(shape)
                for rank, share in enumerate(shares):
                    write_share(
                        whole[matrix],
                        share,
                        matrix.cut_over(axes[:1]),
                        {axes[0]: rank},
                    )
        return whole

    def _exchanged_shares(
        self,
        sent: Sequence[Sequence[Tensor]],
        wanted: Sequence[Sequence[Matrix]],
        at: Sequence[int],
        axes: Sequence[str],
    ) -> list[list[Tensor]]:
        """Exchange tensors with all ranks of the axis ``axes[0]``, by one all-to-all: send ``sent[rank]`` to each rank.
        Return what each rank has sent: shards of the matrices ``wanted[rank]``, as the rank at index ``at[rank]`` of
        the axis holds them.
        """
        flat = torch.cat(
            [
                self._nothing,
                *(tensor.flatten() for tensor in chain(*sent)),
            ]
        )
        ranks = [{**self._mesh.ranks, axes[0]: rank} for rank in at]
        shapes = [
            [cut_shape(matrix.shape, matrix.cut_over(axes), each) for matrix in matrices]
            for each, matrices in zip(ranks, wanted, strict=True)
        ]
        sizes = [[math.prod(shape) for shape in each] for each in shapes]
        counts = [sum(tensor.numel() for tensor in each) for each in sent]
        parts = iter(
            all_to_all(
                flat,
                counts,
                [*map(sum, sizes)],
                self._mesh.group(axes[0]),
            ).split([*chain(*sizes)])
        )
        return [[next(parts).view(shape) for shape in each] for each in shapes]


def _dealt(matrices: Sequence[Matrix], ranks: int) -> list[list[Matrix]]:
    """Assign matrices to ranks, balanced by the cost of orthogonalizing them."""
    costs = [sum(min(size) ** 2 * max(size) for size in matrix.sizes) for matrix in matrices]
    return [[matrices[item] for item in items] for items in share_by_cost(costs, ranks)]


def _matrices_of(
    member: Member,
    mesh: Mesh,
    dim: int,
    bounds: Sequence[int],
) -> Iterator[Matrix]:
    """Yield the matrix of a parameter; for a stack of matrices, yield each matrix of which this rank has a shard."""
    shape = member.planned.shape
    lead = len(shape) - 2
    cuts = tuple(replace(cut, dim=cut.dim - lead) for cut in member.planned.cuts if cut.dim >= lead)
    free = [axis for axis in mesh.free_axes(member.planned.cuts) if mesh.group(axis)]
    if member.planned.cut_over("ep") and mesh.layout.expert_tp == 1:
        # Tensor ranks have different experts, not replicas
        free = [axis for axis in free if axis != "tp"]
    for index in product(
        *map(
            range,
            member.planned.local_shape(mesh.ranks)[:lead],
        )
    ):
        yield Matrix(
            member,
            index,
            (shape[-2], shape[-1]),
            cuts,
            free,
            dim,
            bounds,
        )


def _orthogonalized(matrix: Matrix, whole: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return the orthogonal matrices nearest to the fused matrices of ``whole``: ``U V^T`` of their singular value
    decompositions, approximated by quintic Newton-Schulz steps.
    """
    (a, b, c), updates = group["ns_coefficients"], list[Tensor]()
    for part in (each.contiguous() for each in matrix.split(whole, (), {})):
        tall = part.size(0) > part.size(1)
        x = part.T if tall else part
        x = x.div(x.norm().clamp(min=_EPS))
        for _ in range(group["ns_steps"]):
            gram = x @ x.T
            x = torch.addmm(
                x,
                torch.addmm(gram, gram, gram, beta=b, alpha=c),
                x,
                beta=a,
            )
        updates.append(x.T if tall else x)
    return torch.cat(updates, matrix.dim)
