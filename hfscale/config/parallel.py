"""Define ``ParallelConfig``, a layout: the sizes of the parallel axes that the user requests."""

import os
from dataclasses import dataclass, fields
from functools import cached_property
from math import ceil, lcm, prod
from pathlib import Path
from typing import Any

from accelerate import ParallelismConfig

from ..errors import ConfigError, check_count
from ..extensions import provided
from .declared import Declared, Spelled, declared
from .layout import LayoutFields, check_name
from .schedules import schedule_of

AXES = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
"""Axes of the mesh of ranks, outermost first. Ranks that differ only on the last axis (tensor) are neighbors, because
they communicate most.
"""

UNCUT_SEQUENCES = "cp_size=1"  # remedy in error messages if sequences must not be sharded

_ENVIRONMENT = "PARALLELISM_CONFIG_"


class _Size:
    """Define the attribute of a layout that is named like a mesh axis (``layout.tp``): the number of ranks on this
    axis.
    """

    def __set_name__(self, owner: type, axis: str) -> None:
        self._axis = axis

    def __get__(self, layout: "ParallelConfig", owner: type) -> int:
        return layout.size(self._axis)


@dataclass
class ParallelConfig(Spelled, LayoutFields, ParallelismConfig):
    """Sizes of the parallel axes of one run: Accelerate's :class:`ParallelismConfig` with the additional fields of
    :class:`LayoutFields`.
    """

    pp = _Size()  # pipeline ranks
    tp = _Size()  # tensor ranks
    cp = _Size()  # context ranks
    ep = _Size()  # expert ranks, each with some of the experts
    expert_tp = _Size()  # ranks over which each expert's matrices are sharded
    dp_replicate = _Size()  # replicas of the sharded model
    # Ranks over which weights are sharded: ``dp_shard_size`` times the context ranks.
    dp_shard = _Size()

    # Replaces accelerate's checks on purpose: they reject layouts that hfscale supports (replicated data x tensor).
    def __post_init__(self) -> None:
        may_add_data = self._given("dp_shard_size") is None
        if self.powersgd_rank is not None:
            check_count("powersgd_rank", self.powersgd_rank)
        for option in declared(LayoutFields):
            setattr(self, option.name, self._checked(option))
        self.sp_size = _positive(
            "sp_size", 1 if (given := self._given("sp_size")) is None else given
        )
        self._place_experts(may_add_data)
        virtual = schedule_of(self.pipeline_schedule).default_stages if self.pp > 1 else 1
        self.virtual_stages = self.virtual_stages or virtual
        self.stage_layers = _stage_layers(self.stage_layers, self.pp, self.virtual_stages)
        self._check_compression()
        if self.sp_size != 1:
            raise ConfigError(
                f"sp_size={self.sp_size} is DeepSpeed's sequence axis, which hfscale does not support: use sp_size=1, "
                "with cp_size to split sequences over ranks, or sequence_parallel=True to split norms and residuals "
                "over tensor ranks"
            )
        inherited: Any = self
        if inherited.cp_backend not in (None, "torch"):
            raise ConfigError(
                f"cp_backend={inherited.cp_backend!r} is not supported: use 'torch', or leave cp_backend out"
            )
        inherited.cp_backend = "torch"
        inherited.sp_backend = inherited.sp_backend or "deepspeed"
        self._sizes = {axis: self.asked(axis) for axis in (*AXES, "sp")}
        self._fixed = True

    def _given(self, name: str) -> Any:
        """Return the value that the user gave to the field ``name``, or else that of its environment variable."""
        value = getattr(self, name)
        return os.environ.get(_ENVIRONMENT + name.upper()) if value is None else value

    def _checked(self, each: Declared) -> Any:
        """Return a field's value or default, converted to the field's type. Raise :class:`ConfigError` if it is
        invalid.
        """
        value = self._given(each.name)
        if value is None:
            return each.default
        if each.kind is bool and not isinstance(value, bool):
            if str(value).lower() not in ("1", "true", "0", "false"):
                raise ConfigError(f"{each.name}={value!r} is invalid: use True or False")
            return str(value).lower() in ("1", "true")
        if each.kind is int:
            return _positive(each.name, value)
        return check_name(each, value) if each.choices else value

    def _check_compression(self) -> None:
        given = self.gradient_compression
        if given != "no" and self.dp_replicate == 1:
            raise ConfigError(
                f"gradient_compression={given!r} compresses gradients between replicas, but dp_replicate_size is 1: "
                "use dp_replicate_size=2 or more, or leave gradient_compression out (between dp_shard_size ranks, "
                "gradients are reduced uncompressed)"
            )
        rank = getattr(provided("gradient_compressions", str(given)), "default_rank", None)
        if rank is None and self.powersgd_rank is not None:
            raise ConfigError(
                f"powersgd_rank={self.powersgd_rank} needs gradient_compression='powersgd': set "
                "gradient_compression='powersgd' too, or leave powersgd_rank out"
            )
        self.powersgd_rank = self.powersgd_rank or rank

    def _place_experts(self, may_add_data: bool) -> None:
        """Check that the tensor and data ranks can be divided into groups of ``ep_size`` expert ranks. With
        ``may_add_data`` (the user gave no ``dp_shard_size``), choose a ``dp_shard_size`` with which they can.
        """
        ep = self.ep
        tp = self.tp
        cut = self.expert_tp
        if cut not in (1, tp):
            raise ConfigError(
                f"expert_tp_size={cut} is invalid with tp_size={tp}: use 1 (each expert whole on one rank)"
                + (f" or {tp} (each expert sharded like the dense layers)" if tp > 1 else "")
            )
        if ep == 1:
            return
        if ep * cut % tp:
            raise ConfigError(
                f"ep_size={ep} does not fit tp_size={tp}, because experts that are not sharded are spread over all "
                f"tensor ranks of a batch: use a multiple of {tp}, or expert_tp_size={tp} to shard each expert over "
                "these ranks and spread experts over data ranks"
            )
        batches = self.expert_batches
        replicas = self.dp_replicate
        if may_add_data and replicas % batches:
            self.dp_shard_size = lcm(batches, self.cp) // self.cp
        shards = self.dp_shard
        if shards % batches and (batches % shards or shards * replicas % batches):
            every = range(1, shards * replicas + 1)
            fits = [
                n
                for n in every
                if shards % n == 0 or (n % shards == 0 and shards * replicas % n == 0)
            ]
            raise ConfigError(
                f"ep_size={ep} spreads experts over the tensor ranks of {batches} distinct batches, but "
                f"dp_shard_size={shards} x dp_replicate_size={replicas} cannot be divided into groups of that many: "
                f"use ep_size {', '.join(str(n * tp // cut) for n in fits)}, or leave dp_shard_size out"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        """Raise :class:`ConfigError` if a field is changed after construction, because plans and meshes made from the
        layout would not change.
        """
        if self.__dict__.get("_fixed") and name in {f.name for f in fields(self)}:
            raise ConfigError(
                f"{name} of a layout cannot be changed after construction: make a new layout with dataclasses.replace"
            )
        super().__setattr__(name, value)

    def __hash__(self) -> int:
        return hash(repr(self))

    @property
    def flushes(self) -> bool:
        """Return whether the pipeline schedule finishes all backward passes of a step before the weights are updated (a
        flush).
        """
        return self.pp == 1 or schedule_of(self.pipeline_schedule).flushes

    def size(self, axis: str) -> int:
        """Return the number of ranks on the mesh axis ``axis``: one of :data:`AXES`, or an axis of the experts.

        ``dp_shard`` includes the context ranks, because weights are sharded over them too. Experts divide the tensor
        and data ranks in another way, ``edp_replicate x edp_shard x ep x expert_tp``: ``edp_replicate`` and
        ``edp_shard`` are the numbers of replicas and of data shards of each expert.
        """
        if axis == "dp_shard":
            return self.asked(axis) * self.asked("cp")
        if axis == "edp_shard":
            return max(1, self.dp_shard // self.expert_batches)
        if axis == "edp_replicate":
            return self.dp_replicate // max(1, self.expert_batches // self.dp_shard)
        return self.asked(axis)

    def asked(self, axis: str) -> int:
        """Return the field ``{axis}_size`` as the user requested it."""
        return int(getattr(self, f"{axis}_size"))

    @property
    def expert_batches(self) -> int:
        """The number of data-parallel batches whose tokens share one copy of each expert; 1 if ``ep_size`` is 1."""
        return self.ep * self.expert_tp // self.tp if self.ep > 1 else 1

    @property
    def slices_tokens(self) -> bool:
        """Return whether each tensor rank sends only its shard of a batch's tokens to the experts. This is so if
        experts are distributed over tensor ranks, and each expert is whole.
        """
        return self.ep > 1 and self.tp > 1 and self.expert_tp == 1

    @cached_property
    def total_size(self) -> int:  # type: ignore[override]  # accelerate's is a plain property
        """The number of processes that this layout needs."""
        # Expert ranks are ranks of the tensor and data axes.
        return prod(self.asked(axis) for axis in AXES if axis != "ep")

    @cached_property
    def batch_world(self) -> int:
        """The number of different batches in one step: one per data-parallel rank."""
        return self.asked("dp_replicate") * self.asked("dp_shard")

    @cached_property
    def data_world(self) -> int:
        """The number of ranks that compute different tokens: the data-parallel ranks times the context-parallel
        ranks.
        """
        return self.batch_world * self.asked("cp")

    @property
    def cuts_sequences(self) -> bool:
        """Return whether sequences are sharded over context-parallel ranks."""
        return self.cp > 1

    def own_tokens(self, tokens: int) -> int:
        """Return the number of a microbatch's ``tokens`` that the context-parallel rank with most tokens computes."""
        return ceil(tokens / self.cp)

    def of_full_sequences(self, own: float) -> float:
        """Return an amount per microbatch, given its value ``own`` for the tokens of one context-parallel rank."""
        return own * self.cp

    def microbatches_of(self, accumulated: int) -> int:
        """Return the number of microbatches of a step, given the number of gradient accumulation steps. In a pipeline,
        ``num_microbatches`` has priority, and the default is one microbatch per pipeline rank.
        """
        if self.pp == 1:
            return accumulated
        return self.num_microbatches or (accumulated if accumulated > 1 else self.pp)

    def describe_schedule(self) -> str:
        """Describe the layout in words, like :meth:`describe`; of a pipeline, also its schedule, stages and
        microbatches.
        """
        if self.pp == 1:
            return self.describe()
        # a file of a schedule is described by its name alone
        name = Path(str(self.pipeline_schedule)).name
        count = f", {self.num_microbatches} microbatches" if self.num_microbatches else ""
        return f"{self.describe()}, {name} over {self.pp * int(self.virtual_stages or 1)} stages{count}"

    def describe(self) -> str:
        """Describe the layout by its axes with several ranks, like ``tp2 x dp_shard4``; ``one process`` if there is
        none.
        """
        named = [
            f"{axis}{self.asked(axis)}"
            for axis in reversed(AXES)
            if self.asked(axis) > 1 and axis != "ep"
        ]
        cut = ", sequence parallel" if self.sequence_parallel and self.tp > 1 else ""
        if self.ep > 1:
            cut += f", ep{self.ep}"
            cut += f" of experts cut over tp{self.tp}" if self.expert_tp > 1 else ""
        return (" x ".join(named) or "one process") + cut

    def __repr__(self) -> str:
        first = [f"{axis}_size" for axis in AXES]
        names = [
            *first,
            *(option.name for option in fields(LayoutFields) if option.name not in first),
        ]
        return f"ParallelConfig({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


ParallelConfig.__doc__ = LayoutFields.__doc__  # help() shows only the class's own docstring


def _positive(name: str, value: Any) -> int:
    try:
        number = int(value)
        whole = isinstance(value, str) or number == value
    except (TypeError, ValueError, OverflowError):
        number = 0
        whole = False
    if isinstance(value, bool) or number < 1 or not whole:
        raise ConfigError(f"{name}={value!r} is invalid: use a whole number of at least 1")
    return number


def _stage_layers(value: Any, pp_size: int, virtual_stages: int) -> tuple[int, ...] | None:
    """Return ``stage_layers`` as a tuple, so that the layout stays hashable. The plan checks the sum of its numbers."""
    if value is None:
        return None
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple)):
        raise ConfigError(
            f"stage_layers={value!r} is invalid: pass the number of layers of each stage, as in [5, 6, 6, 5]"
        )
    counts = tuple(_positive(f"stage_layers[{index}]", count) for index, count in enumerate(listed))
    if len(counts) != pp_size * virtual_stages:
        raise ConfigError(
            f"stage_layers={value!r} has {len(counts)} stages, and pp_size={pp_size} x virtual_stages={virtual_stages} "
            f"makes {pp_size * virtual_stages}: use one number per stage"
        )
    return counts
