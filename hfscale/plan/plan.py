"""The plan: frozen data that says what becomes of every parameter of a model under a layout.

It is computed once (:func:`hfscale.plan.build.build_plan`), on the meta device, and read by everything else: the
loader, the patcher, gradient sync, norm clipping, the checkpoint writer and the printed table.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from ..config import ParallelConfig
from .cut import Cut, cut_shape

LOSSES = {"ForCausalLM": 1}
"""Losses over the vocabulary that can run on cut logits -> how many positions the labels are shifted by."""


def wild_name(name: str) -> str:
    """``model.layers.3.mlp`` -> ``model.layers.*.mlp``: one line speaks for every layer."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


@dataclass(frozen=True)
class ParameterPlan:
    """What becomes of one parameter.

    Attributes:
        name: its name in the stock model.
        shape: its global shape.
        dtype: its type.
        stage: the pipeline stage that holds it.
        cuts: how it is cut between ranks, in order (tensor first, then sharded data).
        partial: axes over which each rank holds only a part of the gradient, so that the parts must be summed.
        tied_to: the name of the parameter it is the same tensor as.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stage: int = 0
    cuts: tuple[Cut, ...] = ()
    partial: tuple[str, ...] = ()
    tied_to: str | None = None

    def local_shape(self, ranks: dict[str, int]) -> tuple[int, ...]:
        """Its shape on the rank at coordinates ``ranks`` (axis -> rank)."""
        return cut_shape(self.shape, self.cuts, ranks)

    def cut_over(self, axis: str) -> Cut | None:
        """Its cut over ``axis``, if it has one."""
        return next((cut for cut in self.cuts if cut.axis == axis), None)

    def take(self, tensor: torch.Tensor, ranks: dict[str, int], axes: tuple[str, ...] | None = None) -> torch.Tensor:
        """The share of a global tensor on the rank at ``ranks``; of all its cuts, or of those over ``axes`` only."""
        for cut in self.cuts:
            if axes is None or cut.axis in axes:
                tensor = cut.take(tensor, ranks.get(cut.axis, 0))
        return tensor


@dataclass(frozen=True)
class BlockPlan:
    """One attention or MLP module whose edges talk over the tensor axis. Names are full module names."""

    name: str
    column: tuple[str, ...]
    row: tuple[str, ...]
    shared: tuple[str, ...]
    local_attributes: tuple[str, ...]
    dropout: float
    enter: tuple[str, ...] = ()
    leave: tuple[str, ...] = ()
    heads: tuple[tuple[str, int], ...] = ()
    sample_heads: tuple[str, ...] = ()
    across: tuple[tuple[str, int], ...] = ()  # with the whole width of the input
    local_config: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What becomes of a model under a layout. ``print(plan)`` is a table.

    Attributes:
        family: ``config.model_type``.
        layout: the sizes it was made for.
        parameters: every parameter, in the model's order, tied ones included.
        layers: names of the decoder layers, in order.
        blocks: the tensor-parallel blocks; empty where ``tp_size`` is 1.
        embedding: name of the vocabulary-parallel embedding, if cut.
        head: name of the output projection onto the vocabulary, if the loss runs on it.
        loss: the host's name of the loss, if it is one of :data:`LOSSES`.
    """

    family: str
    layout: ParallelConfig
    parameters: tuple[ParameterPlan, ...]
    layers: tuple[str, ...]
    blocks: tuple[BlockPlan, ...]
    embedding: str | None
    head: str | None
    loss: str | None

    @cached_property
    def by_name(self) -> dict[str, ParameterPlan]:
        """Parameters by name."""
        return {parameter.name: parameter for parameter in self.parameters}

    def owned(self) -> Iterator[ParameterPlan]:
        """The parameters that are not another one under a second name."""
        return (parameter for parameter in self.parameters if parameter.tied_to is None)

    def __str__(self) -> str:
        from .table import render

        return render(self)


def join_path(block: str, child: str) -> str:
    """``child`` inside ``block``; the empty child is the block itself."""
    return f"{block}.{child}" if child else block
