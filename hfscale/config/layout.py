"""Define the fields of a layout, without importing torch, so that the command line can list them quickly."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import check_choice
from .declared import Declared, setting
from .schedules import CP_METHODS, gradient_compressions, schedule_names, spelled


@dataclass
class LayoutFields:
    """Sizes of the parallel axes of one run.

    Extends :class:`accelerate.ParallelismConfig` with the same field names. Fields that are left out are filled from
    the same environment variables (``PARALLELISM_CONFIG_TP_SIZE`` ...), or with their defaults.

    Args:
        dp_replicate_size: data-parallel replicas of the sharded model.
        dp_shard_size: ranks over which parameters, gradients and optimizer state are sharded (ZeRO-3, FSDP2).
        tp_size: ranks over which each layer's matrices are sharded (Shoeybi et al. 2019, Megatron-LM).
        cp_size: ranks over which the tokens of each sequence are sharded (Liu et al. 2023, ring attention); attention
            still reads all tokens of the sequence (``cp_method``). Weights are sharded over context ranks too: over
            ``cp_size * dp_shard_size`` ranks.
        pp_size: pipeline stages.
        ep_size: ranks over which the experts of an MoE layer are distributed, each expert whole (Lepikhin et al. 2020,
            GShard). Expert ranks are ranks of the tensor and data axes, so ``ep_size`` does not multiply the number of
            processes. With ``expert_tp_size=1``, ``ep_size`` is a multiple of ``tp_size``: experts are distributed over
            the tensor ranks first, then over data ranks. If ``dp_shard_size`` is left out, it is set to the data
            ranks that ``ep_size`` needs.
        expert_tp_size: ranks over which each expert's matrices are sharded: 1, or ``tp_size``. With ``tp_size``,
            experts are distributed over data ranks only.
        cp_method: how attention reads the tokens of other context ranks. ``gather`` all-gathers keys and values (Llama
            Team 2024); ``ring`` passes keys and values around a ring of ranks (Liu et al. 2023); ``heads`` exchanges
            tokens for heads, so that each rank has some heads of the full sequence (Jacobs et al. 2023, Ulysses);
            ``heads_ring`` exchanges heads within groups of ranks, as large as the number of heads allows, and passes
            keys and values around a ring of groups (Fang and Zhao 2024); ``auto`` chooses the method that sends fewer
            bytes.
        sequence_parallel: shard norms and residuals along the sequence between tensor-parallel blocks (Korthikanti et
            al. 2022).
        sequence_regather: under ``sequence_parallel``, gather the inputs of attention and MLP again in the backward
            pass instead of keeping them. All saved activations of a layer are then sharded, but tensor ranks send a
            quarter more bytes.
        overlap: overlap the backward collectives of tensor parallelism with the computation of weight gradients, for
            tensors of at least 1 MiB.
        pipeline_schedule: order of forward and backward passes, by name or as the path of a ``.csv`` file; names are
            those of :func:`hfscale.config.schedules.schedule_names`.
        num_microbatches: microbatches that ``train_step`` makes of one batch; a list of as many batches is not split.
            ``None`` lets the schedule choose.
        virtual_stages: pipeline stages per pipeline rank; by default 2 for schedules that need several, else 1.
        stage_layers: layers of each stage, ``pp_size * virtual_stages`` numbers (or ``"5,6,6,5"``); ``None`` balances
            stages by cost.
        weights_regather: gather the sharded weights of a stage again for every microbatch instead of keeping them
            gathered for a step. This takes less memory, but multiplies the traffic by the number of microbatches.
        reduce_each_microbatch: reduce gradients over data ranks after every microbatch instead of once per step.
            Between microbatches a rank then holds only shards of gradients instead of full gradients (in float32 under
            mixed precision), but the traffic is multiplied by the number of microbatches. With stages, gradients are
            reduced while later microbatches compute, not after the last one.
        gradient_compression: compression of gradients between replicas: ``no``, ``bf16``, ``fp16``, or ``powersgd``:
            factors of rank ``powersgd_rank``, with their error added to the next gradient (Vogels et al. 2019).
        powersgd_rank: rank of PowerSGD's factors; 4 by default.

    Raises:
        ConfigError: an unknown field or an impossible value.
    """

    tp_size: int | None = setting(1)
    dp_shard_size: int | None = setting(1)
    dp_replicate_size: int | None = setting(1)
    cp_size: int | None = setting(1)
    pp_size: int | None = setting(1)
    ep_size: int | None = setting(1)
    expert_tp_size: int | None = setting(1)
    cp_method: str | None = setting("auto", choices=CP_METHODS)
    sequence_parallel: bool | None = setting(False)
    sequence_regather: bool | None = setting(False)
    overlap: bool | None = setting(True)
    pipeline_schedule: str | None = setting(
        "1f1b", choices=schedule_names, flag="schedule", needs="pp"
    )
    num_microbatches: int | None = setting(flag="microbatches", needs="pp")
    virtual_stages: int | None = setting(needs="pp")
    stage_layers: Sequence[int] | None = setting(needs="pp")
    weights_regather: bool | None = setting(False)
    reduce_each_microbatch: bool | None = setting(False)
    gradient_compression: str | None = setting("no", choices=gradient_compressions)
    powersgd_rank: int | None = setting()


def check_name(each: Declared, given: Any) -> Any:
    """Return the value ``given`` for a field that accepts names: the name in its canonical spelling, or the path of a
    CSV schedule. Raise :class:`ConfigError` for an unknown name.
    """
    if each.name != "pipeline_schedule":
        check_choice(each.name, given, each.choices)
        return given
    if not str(given).endswith(".csv"):
        check_choice(each.name, spelled(given), each.choices, ", or the path of a .csv file")
    return spelled(given)
