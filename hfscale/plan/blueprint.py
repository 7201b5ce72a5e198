"""Where the parts of an architecture are: the roles of its modules, as data.

A family is one :class:`Blueprint`. It comes from :data:`hfscale.plan.families.FAMILIES` (hfscale's own table, keyed by
``config.model_type``) or, failing that, from the model's own Hugging Face ``base_model_tp_plan``, translated.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import PlanError


@dataclass(frozen=True)
class Block:
    """An attention or MLP module: what enters it is whole, what leaves it is summed over the tensor ranks.

    Paths are relative to the block; the empty path is the block itself.

    Attributes:
        column: projections that read the block's input; their outputs are cut.
        row: projections that write the block's output; their inputs are cut.
        enter: modules whose first input is the block's input, where that is not the block (a family that adds the
            residual inside the block must keep the residual out of the edges).
        leave: modules whose output is the sum to be completed, where that is not the block.
        parts: what is fused in a projection along the dim that is cut, side by side: how many equal matrices, or a
            function from the config to their lengths.
        shared: modules used whole inside the block (per-head norms), whose gradients are therefore partial; the empty
            path means the block's own parameters.
        across: shared modules that compute over a whole width (a norm over all heads): their input, which is cut, is
            gathered for them, and their output cut again.
        cut: other parameters that are cut: along which dim, and how many matrices lie side by side in it (one matrix
            per expert, say).
        own_heads: the block's own parameters have one entry per head along dim 0 (attention sinks), and are cut so.
        rest_shared: whatever else the block holds is used whole inside it (a router).
        optional: projections that a layer does not have are no mistake: layers of several kinds share the entry.
        heads: keyword inputs of the block with one entry per head along a dim: each rank gets its heads' share.
        sample_heads: keyword inputs with one entry per sample and head along dim 0, sample by sample.
        head_groups: heads are laid out in that many groups side by side, each of which is cut.
        local_attributes: integer attributes that the forward reads as local sizes.
        local_config: config fields that the forward reads as local sizes, from ``self.config``.
        dropout: config fields that hold dropout probabilities applied to *cut* activations (attention weights).
    """

    column: tuple[str, ...]
    row: tuple[str, ...]
    enter: tuple[str, ...] = ("",)
    leave: tuple[str, ...] = ("",)
    parts: dict[str, int | Callable[[Any], tuple[int, ...]]] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    across: tuple[str, ...] = ()
    cut: dict[str, tuple[int, int]] = field(default_factory=dict)
    own_heads: bool = False
    rest_shared: bool = False
    optional: bool = False
    heads: dict[str, int] = field(default_factory=dict)
    sample_heads: tuple[str, ...] = ()
    head_groups: int = 1
    local_attributes: tuple[str, ...] = ()
    local_config: tuple[str, ...] = ()
    dropout: tuple[str, ...] = ("attention_dropout",)


@dataclass(frozen=True)
class Blueprint:
    """Roles in one architecture. Paths are relative to the base model (``model.base_model``).

    Attributes:
        layers: path of the layer list.
        blocks: path of each block inside a layer -> its roles.
        unfit: what in a config (of some members of the family) the blocks do not describe, in words, or ``None``.
    """

    layers: str
    blocks: dict[str, Block]
    unfit: Callable[[Any], str | None] = lambda config: None


def find_blueprint(model: Any) -> Blueprint:
    """The blueprint of a Hugging Face model (on any device, the meta device included).

    Raises:
        PlanError: neither hfscale's table nor the model itself has one.
    """
    config = model.config
    from .families import FAMILIES
    from .translate import translate_host_plan

    if config.model_type in FAMILIES:
        return FAMILIES[config.model_type]
    host_plan = getattr(config, "base_model_tp_plan", None) or getattr(
        getattr(model, "base_model", model).config, "base_model_tp_plan", None
    )
    if not host_plan:
        raise PlanError(
            f"tp_size > 1 needs a blueprint of {config.model_type!r}, and neither hfscale's table nor the model "
            f"({type(model).__name__} has no base_model_tp_plan) gives one: use tp_size=1, or add an entry to "
            "hfscale.plan.families.FAMILIES naming the layer list and each block's column and row projections"
        )
    return translate_host_plan(host_plan, config.model_type)
