"""Train a tiny clone of a model in a layout and in one process, and compare (``hfscale verify``).

It needs no GPU and no weights, and takes less than a minute.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedConfig

from .. import from_config, plan
from ..checkpoint.stored_forms.scheme import split_stored_form
from ..config.parallel import AXES, ParallelConfig
from ..config.schedules import ASYNCHRONOUS, SCHEDULES
from ..errors import ConfigError
from ..models.clone import EXPERTS, layers_of_every_kind
from ..models.module_kinds import EXPERT_FIELDS
from ..parallel.pipeline.csv_table import read_csv
from . import sample_batches
from .parity import Case, Parity, measure_parity
from .pool import RankError, RankPool

TOLERANCE = 1e-10
MAX_RANKS = 8
MAX_MICROBATCHES = 32
MAX_LAYERS = 8


def scale_down(layout: ParallelConfig) -> ParallelConfig:
    """Return the layout scaled down to one machine, with all numbers of its pipeline chosen.

    It keeps its ranks up to :data:`MAX_RANKS`; beyond that, every axis with more than one rank keeps two (a pipeline
    from a file keeps its own). Microbatches and layers of stages stay as requested if they are few and the stages are
    the same; otherwise there are two microbatches per pipeline rank, which every schedule can run, and a layer or two
    in each stage.
    """
    sizes: dict[str, Any] = {}
    from_file = str(layout.pipeline_schedule).endswith(".csv")
    if layout.total_size > MAX_RANKS:
        sizes = {f"{axis}_size": min(2, layout.asked(axis)) for axis in AXES if not (axis == "pp" and from_file)}
        sizes["expert_tp_size"] = min(2, layout.expert_tp)
    if layout.pp == 1:
        return replace(layout, **sizes)
    pp_size = int(sizes.get("pp_size", layout.pp))
    same_stages = pp_size == layout.pp
    asked, stages = layout.num_microbatches, layout.stage_layers if same_stages else None
    if from_file:
        asked = asked or 1 + max(action.microbatch for row in _rows_of(layout) for action in row)
    elif asked is None or asked > MAX_MICROBATCHES or not same_stages:
        asked = 2 * pp_size
    if stages is not None and sum(stages) > MAX_LAYERS:
        stages = [1 + (count > min(stages)) for count in stages]
    return replace(layout, **sizes, num_microbatches=asked, stage_layers=stages)


def _rows_of(layout: ParallelConfig) -> Any:
    """Return the actions of each pipeline rank in the schedule's file."""
    return read_csv(Path(str(layout.pipeline_schedule)))


def verify(
    config: PreTrainedConfig,
    layout: ParallelConfig,
    *,
    lora: str | None = None,
    auto_class: Any = AutoModelForCausalLM,
    **hf_kwargs: Any,
) -> tuple[ParallelConfig, Parity]:
    """Compare the layout, scaled down to one machine, with one process on a tiny clone of the model, of the class that
    ``auto_class`` chooses, and with it loss and batches. ``lora`` puts adapters around modules in both: ``all-linear``,
    or names joined by commas.
    """
    if layout.pp > 1:
        _refuse_asynchronous(layout)
    # Plan the model itself first: its clone gets whatever heads, experts and layers the layout needs.
    plan(config, layout, auto_class=auto_class, **hf_kwargs)
    config, _ = split_stored_form(config)
    small = scale_down(layout)
    changes = _heads_that_fit(config, layout.tp, small.tp) | _experts_that_fit(config, small.ep)
    changes |= sample_batches.changes_for(config, auto_class)
    clone = sample_batches.clone_for(config, auto_class, _layers(config, small), **changes)
    planned = plan(clone, small, auto_class=auto_class, **hf_kwargs)  # refuse before any process is started
    case = sample_batches.case_for(clone, auto_class, planned)
    case.hf_kwargs = hf_kwargs
    if small.pp > 1:
        case.accumulation = int(small.num_microbatches or 1)
    sample_batches.check_stock(case)
    if lora is not None:
        from peft import LoraConfig

        case.peft = LoraConfig(r=4, target_modules=lora if lora == "all-linear" else lora.split(","))
        sizes: dict[str, Any] = {f"{axis}_size": 1 for axis in AXES}
        one = ParallelConfig(**sizes)
        from_config(clone, parallel=one, auto_class=auto_class, peft_config=case.peft, **hf_kwargs)  # may refuse
    if small.total_size == 1:
        return small, measure_parity(case, small, None)
    with RankPool(small.total_size) as pool:
        return small, _measure(case, small, pool)


def _measure(case: Case, layout: ParallelConfig, pool: RankPool) -> Parity:
    """Run the comparison; turn a rank's refusal into :class:`ConfigError`."""
    try:
        return measure_parity(case, layout, pool)
    except RankError as error:
        refused = re.findall(r"^hfscale\.errors\.\w+Error: (.*)$", str(error), re.MULTILINE)
        if not refused:
            raise
        raise ConfigError(refused[0]) from None


def _refuse_asynchronous(layout: ParallelConfig) -> None:
    if layout.pipeline_schedule in ASYNCHRONOUS:
        others = ", ".join(schedule for schedule in SCHEDULES if schedule not in ASYNCHRONOUS)
        raise ConfigError(
            f"pipeline_schedule={layout.pipeline_schedule!r} updates weights while microbatches are under way, so its "
            f"steps are not those of one process: verify {others}, or a .csv file"
        )


def _layers(config: PreTrainedConfig, layout: ParallelConfig) -> int:
    """Return the number of layers of the clone: all kinds of them, and at least one per stage."""
    if layout.stage_layers is not None:
        return sum(layout.stage_layers)
    return max(min(layers_of_every_kind(config), MAX_LAYERS), layout.pp * int(layout.virtual_stages or 1))


def _heads_that_fit(config: PreTrainedConfig, asked: int, tensor: int) -> dict[str, int]:
    """Return changes to a clone's heads so that they divide between ``tensor`` ranks; a model with fewer key/value
    heads than the ``asked`` tensor ranks gets a clone with fewer than ``tensor``.
    """
    fields = config.to_dict()
    if "num_key_value_heads" not in fields:
        return {}
    fewer = (fields["num_key_value_heads"] or asked) < asked
    if fewer and tensor > 1:
        return {"num_key_value_heads": tensor // 2 if tensor % 2 == 0 else 1, "num_attention_heads": 2 * tensor}
    return {"num_key_value_heads": tensor, "num_attention_heads": 2 * tensor} if tensor > 2 else {}


def _experts_that_fit(config: PreTrainedConfig, ranks: int) -> dict[str, int]:
    """Return changes to a clone's experts so that they divide between ``ranks``."""
    if EXPERTS % ranks == 0:
        return {}
    return {name: ranks * -(-EXPERTS // ranks) for name in EXPERT_FIELDS if name in config.to_dict()}


def describe_pipeline(layout: ParallelConfig) -> str:
    """Return a line such as ``zbv, 4 stages of 1, 1, 1, 1 layers on 2 pipeline ranks, 4 microbatches``."""
    stages = layout.pp * int(layout.virtual_stages or 1)
    layers = ", ".join(map(str, layout.stage_layers or [1] * stages))
    return (
        f"{layout.pipeline_schedule}, {stages} stages of {layers} layers on {layout.pp} pipeline ranks, "
        f"{layout.num_microbatches} microbatches"
    )


def render(
    config: PreTrainedConfig,
    asked: ParallelConfig,
    used: ParallelConfig,
    parity: Parity,
    lora: str | None = None,
    auto_class: str = "",
) -> str:
    """Return the comparison as a table; ``auto_class`` is named if it is not the one for causal language models."""
    rows = [
        ("loss", parity.loss, ""),
        ("worst gradient", parity.gradient, parity.worst_gradient),
        ("clipped norm", parity.norm, ""),
        ("worst weight after two steps", parity.weight, parity.worst_weight),
        ("saved checkpoint" if lora is None else "saved adapter", parity.saved, ""),
    ]
    other = "stock transformers" if lora is None else f"stock PEFT, LoRA on {lora},"
    named = f" ({auto_class})" if auto_class else ""
    title = f"a tiny {config.model_type}{named} in {used.describe()} against {other} in one process, float64, gloo"
    if used.pp > 1:
        title += f"\n{describe_pipeline(used)}"
        if asked.num_microbatches not in (None, used.num_microbatches):
            title += f" (not the {asked.num_microbatches} asked for)"
    if used.total_size != asked.total_size:
        title += f"\n({asked.describe()} has {asked.total_size} ranks: two are started on every axis instead)"
    lines = [
        f"{name:30} {value:9.1e}  {'ok' if value <= TOLERANCE else 'DIFFERS'}  {where}" for name, value, where in rows
    ]
    verdict = "equal to rounding" if parity.worst() <= TOLERANCE else f"differs by more than {TOLERANCE:g}"
    return "\n".join([title, "", f"{'':30} {'relative':>9}", *(line.rstrip() for line in lines), "", verdict])
