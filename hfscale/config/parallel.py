"""The sizes of the parallel axes that the user asks for (a *layout*)."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import lcm
from typing import Any

from accelerate import ParallelismConfig

from ..errors import ConfigError, check_choice, check_count, refuse_misspelt
from .schedules import CP_METHODS, SCHEDULES, default_virtual_stages, spelled

AXES = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
"""Mesh axes, outermost first: neighbouring ranks share the axis that communicates most (tensor)."""

UNCUT_SEQUENCES = "cp_size=1"
"""What users are told to ask for if sequences must not be cut."""

GRADIENT_COMPRESSIONS = ("no", "bf16", "fp16", "powersgd")

_ENVIRONMENT = "PARALLELISM_CONFIG_"


@dataclass
class ParallelConfig(ParallelismConfig):
    """Sizes of the parallel axes of one run.

    Extends :class:`accelerate.ParallelismConfig`: same field names, and the same environment variables
    (``PARALLELISM_CONFIG_TP_SIZE`` ...) fill the fields left out.

    Args:
        dp_replicate_size: data-parallel replicas of the full (sharded) model.
        dp_shard_size: ranks over which parameters, gradients and optimizer state are sharded (ZeRO-3, FSDP2).
        tp_size: ranks over which each layer's matrices are cut (Shoeybi et al. 2019, Megatron-LM).
        cp_size: ranks over which each sequence is cut, everywhere but in attention (Liu et al. 2023, ring attention).
            They are data ranks that compute a piece of one sequence each: weights are sharded over them as over
            ``dp_shard``.
        pp_size: pipeline stages.
        ep_size: ranks over which the experts of a mixture are spread, uncut (Lepikhin et al. 2020, GShard). They
            are ranks of the tensor and data axes, so this multiplies nothing: with ``expert_tp_size=1`` the ranks of
            ``tp`` come first and those of the data axes after them; ``ep_size`` is a multiple of ``tp_size``. Data
            ranks that it needs are added if ``dp_shard_size`` is left out.
        expert_tp_size: ranks over which each expert's matrices are cut: 1, or ``tp_size``; the expert ranks are
            then ranks of the data axes.
        cp_method: how attention reads the other context ranks' tokens: one of
            :data:`hfscale.config.schedules.CP_METHODS`. ``gather`` gathers all keys and values (Llama Team 2024);
            ``ring`` passes them around, one rank's at a time (Liu et al. 2023); ``heads`` exchanges tokens for heads,
            so that each rank has some heads of the full sequence (Jacobs et al. 2023, Ulysses); ``heads_ring`` does
            that in groups of ranks, as large as the heads allow, and passes keys and values around between the groups
            (Fang and Zhao 2024); ``auto`` chooses by the bytes sent.
        sequence_parallel: cut norms and residuals along the sequence between tensor-parallel blocks (Korthikanti et al.
            2022).
        sequence_regather: with that, gather a block's input once more in the backward pass instead of keeping it: all
            activations of a layer are then cut, for half as much communication again.
        overlap: overlap the backward collectives of tensor parallelism with the gradients of weights.
        pipeline_schedule: one of :data:`SCHEDULES`, or the path of a CSV file.
        num_microbatches: microbatches of one pipelined step; ``None`` lets the schedule choose.
        virtual_stages: model chunks per pipeline rank; by default 2 for schedules that need several, else 1.
        stage_layers: layers of each stage, ``pp_size * virtual_stages`` numbers (or ``"5,6,6,5"``); ``None`` balances
            stages by cost.
        weights_regather: with stages and ``dp_shard``, gather weights again for every microbatch instead of keeping
            them gathered for a step: less memory, and the traffic multiplied by the number of microbatches.
        reduce_each_microbatch: over data ranks, reduce gradients after every microbatch instead of once per step.
            Between microbatches a rank then holds its shards of them only, not full gradients (in float32 under
            mixed precision), with the traffic multiplied by the number of microbatches. With stages, they are reduced
            while later microbatches compute, not after the last one.
        gradient_compression: compression of gradients between replicas: ``no``, ``bf16``, ``fp16``, or ``powersgd``:
            factors of rank ``powersgd_rank`` (4), with their error added to the next gradient (Vogels et al. 2019).

    Raises:
        ConfigError: an unknown field or an impossible value.
    """

    pp_size: int | None = None
    ep_size: int | None = None
    expert_tp_size: int | None = None
    cp_method: str | None = None
    sequence_parallel: bool | None = None
    sequence_regather: bool | None = None
    overlap: bool | None = None
    pipeline_schedule: str | None = None
    num_microbatches: int | None = None
    virtual_stages: int | None = None
    stage_layers: Sequence[int] | None = None
    weights_regather: bool | None = None
    reduce_each_microbatch: bool | None = None
    gradient_compression: str | None = None
    powersgd_rank: int | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> "ParallelConfig":
        """Refuse misspelt fields by name, before the generated ``__init__`` would."""
        names = [f.name for f in fields(cls)]
        if kwargs.keys() - names:
            useful = [n for n in names if not n.endswith(("_handler", "_backend")) and n != "sp_size"]
            refuse_misspelt("ParallelConfig", [n for n in kwargs if n not in names], useful)
        return super().__new__(cls)

    # Replaces accelerate's checks on purpose: they refuse layouts that hfscale runs (replicated data x tensor).
    def __post_init__(self) -> None:
        may_add_data = _default("dp_shard_size", self.dp_shard_size, None) is None
        for axis in (*AXES, "sp"):
            name = f"{axis}_size"
            setattr(self, name, _positive(name, _default(name, getattr(self, name), 1)))
        self.expert_tp_size = _positive("expert_tp_size", _default("expert_tp_size", self.expert_tp_size, 1))
        self._place_experts(may_add_data)
        self.cp_method = _default("cp_method", self.cp_method, "auto")
        check_choice("cp_method", self.cp_method, CP_METHODS)
        self.pipeline_schedule = spelled(_default("pipeline_schedule", self.pipeline_schedule, "1f1b"))
        virtual = default_virtual_stages(str(self.pipeline_schedule)) if self.pp > 1 else 1
        self.virtual_stages = _positive("virtual_stages", _default("virtual_stages", self.virtual_stages, virtual))
        self.stage_layers = _stage_layers(
            _default("stage_layers", self.stage_layers, None), self.pp, self.virtual_stages
        )
        self.num_microbatches = _default("num_microbatches", self.num_microbatches, None)
        if self.num_microbatches is not None:
            self.num_microbatches = _positive("num_microbatches", self.num_microbatches)
        self.sequence_parallel = _boolean(
            "sequence_parallel", _default("sequence_parallel", self.sequence_parallel, False)
        )
        self.sequence_regather = _boolean(
            "sequence_regather", _default("sequence_regather", self.sequence_regather, False)
        )
        self.overlap = _boolean("overlap", _default("overlap", self.overlap, True))
        self.weights_regather = _boolean("weights_regather", _default("weights_regather", self.weights_regather, False))
        self.reduce_each_microbatch = _boolean(
            "reduce_each_microbatch", _default("reduce_each_microbatch", self.reduce_each_microbatch, False)
        )
        self._check_compression()
        if not str(self.pipeline_schedule).endswith(".csv"):
            check_choice("pipeline_schedule", self.pipeline_schedule, SCHEDULES, ", or the path of a .csv file")
        if self.sp_size != 1:
            raise ConfigError(
                f"sp_size={self.sp_size} is DeepSpeed's sequence axis, which hfscale does not run: use sp_size=1 "
                "(cp_size cuts the sequence, sequence_parallel=True cuts norms and residuals over tp)"
            )
        inherited: Any = self
        if inherited.cp_backend not in (None, "torch"):
            raise ConfigError(f"cp_backend={inherited.cp_backend!r} is unknown: use 'torch'")
        inherited.cp_backend, inherited.sp_backend = "torch", inherited.sp_backend or "deepspeed"
        self._sizes = {axis: self.asked(axis) for axis in (*AXES, "sp")}
        self._fixed = True

    def _check_compression(self) -> None:
        given = self.gradient_compression = _default("gradient_compression", self.gradient_compression, "no")
        check_choice("gradient_compression", given, GRADIENT_COMPRESSIONS)
        if given != "no" and self.dp_replicate == 1:
            raise ConfigError(
                f"gradient_compression={given!r} compresses gradients between replicas, and dp_replicate_size is 1: "
                "use dp_replicate_size=2 or more, or leave it out (shards are reduced uncompressed)"
            )
        if self.powersgd_rank is not None:
            check_count("powersgd_rank", self.powersgd_rank)
        rank = _default("powersgd_rank", self.powersgd_rank, None)
        if rank is not None and given != "powersgd":
            raise ConfigError(
                f"powersgd_rank={rank} needs gradient_compression='powersgd': set that too, or leave it out"
            )
        self.powersgd_rank = _positive("powersgd_rank", 4 if rank is None else rank) if given == "powersgd" else None

    def _place_experts(self, may_add_data: bool) -> None:
        """Check that the expert ranks are full tensor groups, or data ranks, of consecutive batches."""
        ep, tp, cut = self.ep, self.tp, self.expert_tp
        if cut not in (1, tp):
            raise ConfigError(
                f"expert_tp_size={cut} is impossible with tp_size={tp}: use 1 (whole experts)"
                + (f" or {tp} (each expert cut like the dense layers)" if tp > 1 else "")
            )
        if ep == 1:
            return
        if ep * cut % tp:
            raise ConfigError(
                f"ep_size={ep} does not fit tp_size={tp}: whole experts are spread over all tensor ranks of a batch: "
                f"use a multiple of {tp}, or expert_tp_size={tp} to cut each expert over them and spread experts over "
                "data ranks"
            )
        batches, replicas = self.expert_batches, self.dp_replicate
        if may_add_data and replicas % batches:
            self.dp_shard_size = lcm(batches, self.cp) // self.cp
        shards = self.dp_shard
        if shards % batches and (batches % shards or shards * replicas % batches):
            every = range(1, shards * replicas + 1)
            fits = [n for n in every if shards % n == 0 or (n % shards == 0 and shards * replicas % n == 0)]
            raise ConfigError(
                f"ep_size={ep} needs the tensor ranks of {batches} distinct batches, and dp_shard_size={shards} x "
                f"dp_replicate_size={replicas} cannot be divided so: use ep_size "
                f"{', '.join(str(n * tp // cut) for n in fits)}, or leave dp_shard_size out"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse changes after construction, since plans and meshes are made from a layout once."""
        if self.__dict__.get("_fixed") and name in {f.name for f in fields(self)}:
            raise ConfigError(f"{name} of a layout cannot be changed: make a new one with dataclasses.replace")
        super().__setattr__(name, value)

    def __hash__(self) -> int:
        return hash(repr(self))

    def size(self, axis: str) -> int:
        """Return the number of ranks on ``axis`` of the mesh: one of :data:`AXES`, or an expert axis.

        Weights are sharded over the context ranks too, so ``dp_shard`` includes them, the ranks of one sequence side by
        side. Expert axes divide the ranks of the tensor and data axes anew: ``edp_replicate x edp_shard x ep x
        expert_tp``.
        """
        if axis == "dp_shard":
            return self.asked(axis) * self.asked("cp")
        if axis == "edp_shard":
            return max(1, self.dp_shard // self.expert_batches)
        if axis == "edp_replicate":
            return self.dp_replicate // max(1, self.expert_batches // self.dp_shard)
        return self.asked(axis)

    @property
    def pp(self) -> int:
        """The number of pipeline ranks."""
        return self.asked("pp")

    @property
    def tp(self) -> int:
        """The number of tensor ranks."""
        return self.asked("tp")

    @property
    def cp(self) -> int:
        """The number of context ranks."""
        return self.asked("cp")

    @property
    def cp_in_words(self) -> str:
        """The cut of sequences as it was asked for, for messages: ``cp_size=2``."""
        return f"cp_size={self.cp}"

    @property
    def ep(self) -> int:
        """The number of ranks over which experts are spread."""
        return self.asked("ep")

    @property
    def expert_tp(self) -> int:
        """The number of ranks over which each expert is cut."""
        return self.asked("expert_tp")

    @property
    def dp_shard(self) -> int:
        """The number of ranks over which weights are sharded: those of ``dp_shard_size`` times the context ranks."""
        return self.size("dp_shard")

    @property
    def dp_replicate(self) -> int:
        """The number of replicas of the sharded model."""
        return self.asked("dp_replicate")

    def asked(self, axis: str) -> int:
        """Return the field ``{axis}_size``; the product of these, without ``ep``, is the number of processes."""
        return int(getattr(self, f"{axis}_size"))

    @property
    def expert_batches(self) -> int:
        """The number of distinct batches whose tokens go to one group of experts; 1 without expert ranks."""
        return self.ep * self.expert_tp // self.tp if self.ep > 1 else 1

    @property
    def slices_tokens(self) -> bool:
        """Whether tensor ranks, which share a batch, each dispatch a slice of its tokens to uncut experts."""
        return self.ep > 1 and self.tp > 1 and self.expert_tp == 1

    @property
    def total_size(self) -> int:
        """The number of processes that this layout needs."""
        total = 1
        for axis in AXES:
            total *= self.asked(axis) if axis != "ep" else 1  # expert ranks are ranks of the other axes
        return total

    @property
    def batch_world(self) -> int:
        """The number of distinct batches in one step."""
        return self.asked("dp_replicate") * self.asked("dp_shard")

    @property
    def data_world(self) -> int:
        """The number of data-parallel ranks: those that compute different tokens."""
        return self.batch_world * self.asked("cp")

    def describe(self) -> str:
        """Return the axes larger than one, as ``tp2 x dp_shard4``; ``one process`` if there is none."""
        named = [f"{axis}{self.asked(axis)}" for axis in reversed(AXES) if self.asked(axis) > 1 and axis != "ep"]
        cut = ", sequence parallel" if self.sequence_parallel and self.tp > 1 else ""
        if self.ep > 1:
            cut += f", ep{self.ep}"
            cut += f" of experts cut over tp{self.tp}" if self.expert_tp > 1 else ""
        return (" x ".join(named) or "one process") + cut

    def __repr__(self) -> str:
        values = ", ".join(f"{axis}_size={self.asked(axis)}" for axis in AXES)
        rest = (
            "expert_tp_size",
            "cp_method",
            "sequence_parallel",
            "sequence_regather",
            "overlap",
            "pipeline_schedule",
            "num_microbatches",
            "virtual_stages",
            "stage_layers",
            "weights_regather",
            "reduce_each_microbatch",
            "gradient_compression",
            "powersgd_rank",
        )
        return f"ParallelConfig({values}, {', '.join(f'{name}={getattr(self, name)!r}' for name in rest)})"


def _default(name: str, value: Any, default: Any) -> Any:
    if value is not None:
        return value
    return os.environ.get(_ENVIRONMENT + name.upper(), default)


def _positive(name: str, value: Any) -> int:
    try:
        number = int(value)
        whole = isinstance(value, str) or number == value
    except (TypeError, ValueError, OverflowError):
        number, whole = 0, False
    if isinstance(value, bool) or number < 1 or not whole:
        raise ConfigError(f"{name}={value!r} is impossible: use a whole number of at least 1")
    return number


def _stage_layers(value: Any, pp_size: int, virtual_stages: int) -> tuple[int, ...] | None:
    """Return a tuple, so that the layout stays hashable; its sum can be checked only once the model is known."""
    if value is None:
        return None
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple)):
        raise ConfigError(f"stage_layers={value!r} is impossible: use one whole number per stage, as in [5, 6, 6, 5]")
    counts = tuple(_positive(f"stage_layers[{index}]", count) for index, count in enumerate(listed))
    if len(counts) != pp_size * virtual_stages:
        raise ConfigError(
            f"stage_layers={value!r} has {len(counts)} stages, and pp_size={pp_size} x virtual_stages={virtual_stages} "
            f"makes {pp_size * virtual_stages}: use one number per stage"
        )
    return counts


def _boolean(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("1", "true", "0", "false"):
        return str(value).lower() in ("1", "true")
    raise ConfigError(f"{name}={value!r} is impossible: use True or False")
