"""Hold a plan under construction (the *draft*): one object, to which each planning function adds its decisions."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn

from ..._compat.transformers.added_layers import added_decoders, added_layers
from ..._compat.transformers.classes import from_config
from ...config.options import NO_OPTIONS, Options
from ...config.parallel import ParallelConfig
from ...models.blueprint import Blueprint
from ...models.fields import text_config
from ...models.names import wild_name
from ..contents import Feature, FeatureT
from ..cut import Cut
from ..modules import BlockPlan, ExpertsPlan, SequencePlan
from ..plan import Plan
from ..stages import StagePlan

Ranks = Mapping[int, int] | Sequence[int]  # stage -> the pipeline rank that holds it


class Planned(Protocol):
    """Hold a model with its plan and options, by which hfscale decides which features to install in the model."""

    model: Any
    plan: Plan
    options: Options


class Draft:
    """Hold a model, a layout, the decisions made so far, and the problems found.

    Attributes without a comment are those of :class:`hfscale.plan.Plan`. They are empty until a planning function sets
    them. ``options`` are the user's choices in addition to the layout; ``ranks`` gives the pipeline rank of each stage
    if the schedule is a file that assigns them.
    """

    def __init__(
        self,
        model: Any,
        layout: ParallelConfig,
        ranks: Ranks | None = None,
        options: Options = NO_OPTIONS,
    ) -> None:
        self.model = model
        self.layout = layout
        self.tp = layout.tp
        self.config = model.config
        self.ranks = ranks
        self.options = options
        self.problems: list[str] = []  # the reasons why the layout does not fit, in words
        # All modules of the model, by name.
        self.modules: dict[str, Any] = dict(model.named_modules())
        # parameter name -> (cut over the tensor axis, axes over which the gradient is partial)
        self.rules: dict[str, tuple[Cut | None, tuple[str, ...]]] = {}
        self.spread: set[str] = set()  # parameters of experts that are sharded over the expert axis
        self.roleless: list[
            str
        ] = []  # parameters inside blocks for which the blueprint has no role
        self.blueprint: Blueprint | None = None
        self.layers: list[str] = []
        self.added = added_layers(model)  # the layers that a feature has added to the model
        # Name of an added layer (the last ones of ``layers``) -> the module inside it that is a layer of the stock
        # class.
        self.added_layers = added_decoders(model)
        self.mixtures: tuple[ExpertsPlan, ...] = ()
        self.experts: tuple[ExpertsPlan, ...] = ()
        self.blocks: list[BlockPlan] = []
        self.embedding: str | None = None
        self.lookup: str | None = None
        self.head: str | None = None
        self.loss: str | None = None
        self.no_step = ""
        self.sequence_regions: tuple[SequencePlan, ...] = ()
        self.features: list[Feature] = []
        self.stages: StagePlan | None = None

    def feature(self, kind: type[FeatureT]) -> FeatureT | None:
        """Return the plan of one feature (``RecomputePlan``, for example) if it has been made, else ``None``."""
        return next((feature for feature in self.features if isinstance(feature, kind)), None)

    def problem(self, problem: str) -> None:
        """Add a reason why the layout does not fit, unless the same reason was added before."""
        if problem not in self.problems:
            self.problems.append(problem)

    @cached_property
    def wider(self) -> nn.Module | None:
        """The same model with twice the hidden size, on the meta device; ``None`` if it cannot be built."""
        config = copy.deepcopy(self.config)
        try:
            text_config(config).hidden_size *= 2
            with torch.device("meta"):
                built: nn.Module = from_config(type(self.model), config)
        except Exception:  # stock code raises various errors for sizes that do not fit together
            return None
        return built

    @property
    def stack(self) -> list[str]:
        """The names of the stock model's layers, without layers that a feature has added."""
        return self.layers[: len(self.layers) - len(self.added_layers)]

    @property
    def decoders(self) -> list[str]:
        """The names of all modules that have the class of the stock model's layers: the model's layers, and those
        inside layers that a feature has added.
        """
        return [*self.stack, *self.added_layers.values()]

    @property
    def block_config(self) -> Any:
        """The config that has the fields for numbers of heads and widths: the model's config or, in a multimodal model,
        its text config.
        """
        return self.config if self.blueprint is None else self.blueprint.config_of(self.config)

    def report(self) -> str:
        """Return all problems as one message."""
        listed = "".join(f"\n  - {problem}" for problem in self.problems)
        return f"{self.layout.describe()} does not fit {type(self.model).__name__}:{listed}"

    def cut(
        self,
        name: str,
        dim: int,
        length: int,
        parts: tuple[int, ...] = (),
        replicas: tuple[int, ...] = (),
    ) -> None:
        """Shard a parameter over the tensor axis along ``dim``, which has ``length`` entries.

        ``parts`` are the lengths of the matrices that are fused along this dim, and ``replicas`` the number of ranks
        that hold the same shard, for each matrix. Add a problem if ``parts`` do not add up to ``length``, or a rank
        would hold no entries.
        """
        cut = Cut("tp", dim, self.tp, parts, replicas)
        if parts and sum(parts) != length:
            self.problem(
                f"tp_size={self.tp}: the blueprint (how hfscale shards a model's layers) gives the matrices fused in "
                f"{wild_name(name)} the lengths {parts}, whose sum must be {length}, its number of entries: correct "
                "the blueprint, or use tp_size=1"
            )
        elif cut.local_length(length, self.tp - 1) == 0:
            self.problem(
                f"tp_size={self.tp} leaves a rank without any of the {length} entries of {wild_name(name)}: "
                f"use tp_size 1 to {min(parts or (length,))}"
            )
        self.rules[name] = (cut, ())

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter with each of its names; a tied parameter has several names."""
        yield from self.model.named_parameters(remove_duplicate=False)

    def layer_drops(self) -> list[str]:
        """List the config fields that make training skip layers at random (LayerDrop, Fan et al. 2019)."""
        return [
            name for name, value in self.config.to_dict().items() if "layerdrop" in name and value
        ]

    def place(self, name: str) -> tuple[int, str]:
        """Return the ``id`` of the module that holds a parameter, and the parameter's attribute name in this module."""
        owner, _, attribute = name.rpartition(".")
        return id(self.model.get_submodule(owner)), attribute
