"""Train a tiny copy of a model in a layout and in one process, and compare both (``hfscale verify``).

The comparison needs no GPU and no weights of the model, and takes less than a minute.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from .. import from_config, plan
from .._compat.transformers.experts import use_eager_experts
from ..checkpoint.stored_forms.scheme import split_stored_form
from ..config.parallel import AXES, ParallelConfig
from ..config.schedules import schedule_names, schedule_of
from ..errors import ConfigError, HFScaleError
from ..extensions import added, provided
from ..models.clone import EXPERTS, layers_of_every_kind, tiny_clone
from ..models.module_kinds import EXPERT_FIELDS
from ..models.precision import keep_float64
from ..parallel.pipeline.csv_table import read_csv
from ..plan import Plan
from ..plan.feature_plans import OwnLossPlan
from . import plain
from .parity import Case, Parity, in_float64, measure_parity
from .pool import RankError, RankPool

# Auto class -> function that makes its batches for a plain loop. Causal LMs whose loss train_step supports use
# train_step.
_MAKERS: dict[str, plain.Maker] = {
    "AutoModelForCausalLM": plain.causal_lm,
    "AutoModelForImageClassification": plain.image_classification,
    "AutoModelForMaskedLM": plain.causal_lm,
    "AutoModelForSeq2SeqLM": plain.sequence_to_sequence,
    "AutoModelForSequenceClassification": plain.sequence_classification,
    "AutoModelForSpeechSeq2Seq": plain.speech_to_text,
    "AutoModelForTokenClassification": plain.token_classification,
}
_CLASSES = (
    "AutoModelForImageClassification",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
)
_SLOT = "parity_cases"
_SMALL_INPUTS = {
    "image_size": 32,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 40,
}
TOLERANCE = 1e-10
MAX_RANKS = 8
MAX_MICROBATCHES = 32
MAX_LAYERS = 8


@dataclass(frozen=True)
class ParityCases:
    """Describe how an extension of hfscale makes and trains tiny models of an Auto class for ``hfscale verify``."""

    clone: Callable[..., Any]  # like :func:`hfscale.models.clone.tiny_clone`
    by_step: Callable[[Any], Case]  # the case for a clone that ``train_step`` trains
    by_loop: Callable[[Any], Case]  # the case for a clone that a plain loop trains


def changes_for(config: PreTrainedConfig, auto_class: Any) -> dict[str, Any]:
    """Return changes to the config of a tiny model that fit it to the random batches of its Auto class, such as a small
    image size. Raise :class:`ConfigError` if there are no batches for this Auto class.
    """
    name = auto_class.__name__
    if name in added(_SLOT):
        return {}
    if name not in _MAKERS:
        known = ", ".join((*_MAKERS, *added(_SLOT)))
        raise ConfigError(
            f"--auto-class {name}: verify makes batches for {known}, but not for this class. "
            "Compare it in Python: hfscale.testing.assert_layout_equal(hfscale.testing.plain.PlainCase(config, "
            f"auto_class=transformers.{name}, make_batch=...), layout, pool)"
        )
    fields = config.to_dict()
    changes: dict[str, Any] = {
        field: value for field, value in _SMALL_INPUTS.items() if isinstance(fields.get(field), int)
    }
    if name in _CLASSES:  # labels are classes; with one class they would be numbers to predict
        changes["id2label"] = {
            number: f"class {number}" for number in range(min(max(2, config.num_labels or 0), 5))
        }
        changes["label2id"] = {label: number for number, label in changes["id2label"].items()}
        if getattr(config, "problem_type", None) is not None:
            changes["problem_type"] = "single_label_classification"
    if (
        name == "AutoModelForSequenceClassification"
        and getattr(config, "pad_token_id", None) is None
    ):
        changes["pad_token_id"] = 0  # decoders find the last token by the padding token
    if (
        getattr(config, "is_encoder_decoder", False)
        and getattr(config, "decoder_start_token_id", None) is None
    ):
        changes["decoder_start_token_id"] = 0
    return changes


def clone_for(config: PreTrainedConfig, auto_class: Any, layers: int, **changes: Any) -> Any:
    """Return a tiny config of the same model family with ``layers`` layers and the given ``changes``. If an extension
    supports the Auto class, its function makes the config.
    """
    cases: ParityCases | None = provided(_SLOT, auto_class.__name__)
    make = tiny_clone if cases is None else cases.clone
    try:
        return make(config, layers=layers, **changes)
    except HFScaleError:
        raise
    except Exception as error:  # transformers may raise anything for an untested config
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ConfigError(
            f"no tiny copy of this {config.model_type!r} can be built to compare layouts with "
            f"({type(error).__name__}: {' '.join(lines[:2])}): run hfscale plan, which checks the layout on the model "
            "itself"
        ) from error


def case_for(clone: PreTrainedConfig, auto_class: Any, planned: Plan) -> Case:
    """Describe how to train the tiny model with config ``clone``: by ``train_step`` if it supports the model's loss,
    else by a plain loop.
    """
    if planned.loss is not None and auto_class.__name__ == "AutoModelForCausalLM":
        return Case(clone, auto_class=auto_class)
    cases: ParityCases | None = provided(_SLOT, auto_class.__name__)
    if cases is not None:
        by_loop = planned.no_step or planned.feature(OwnLossPlan) is not None
        return cases.by_loop(clone) if by_loop else cases.by_step(clone)
    given: dict[str, Any] = {"auto_class": auto_class, "make_batch": _MAKERS[auto_class.__name__]}
    own = planned.feature(OwnLossPlan)
    # With stages or context-parallel ranks, only train_step can split a step.
    if own is not None and (planned.stages is not None or planned.layout.cuts_sequences):
        return plain.OwnLossCase(clone, over=own.over, **given)
    return plain.PlainCase(clone, **given)


def check_stock(case: Case) -> None:
    """Run a forward and a backward pass of the case's tiny model in stock transformers; raise :class:`ConfigError` if
    transformers itself cannot train it.
    """
    try:
        model = in_float64(
            case.auto_class.from_config(case.config, dtype=torch.float64, **case.hf_kwargs)
        )
        use_eager_experts(model)
        with keep_float64():
            model(**case.batches(1)[0][0][0]).loss.backward()
    except Exception as error:  # transformers may raise anything for an untested config
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"a tiny copy of this {case.config.model_type!r} cannot be trained by stock transformers "
            f"{transformers.__version__} as {case.auto_class.__name__} ({type(error).__name__}: {first}), so there is "
            "nothing to compare with: try another --auto-class"
        ) from error


def scale_down(layout: ParallelConfig) -> ParallelConfig:
    """Return the layout scaled down so that it runs on one machine, with few microbatches and layers.

    If the layout has more than :data:`MAX_RANKS` ranks, every axis keeps at most two, except the pipeline axis of a
    schedule from a file. The number of microbatches is kept if the number of pipeline ranks is unchanged and it is at
    most :data:`MAX_MICROBATCHES`; otherwise it becomes two per pipeline rank. A schedule from a file keeps its number.
    ``stage_layers`` is dropped if the number of pipeline ranks changes; it becomes one or two layers per stage if it
    has more than :data:`MAX_LAYERS` layers in total.
    """
    sizes: dict[str, Any] = {}
    from_file = str(layout.pipeline_schedule).endswith(".csv")
    if layout.total_size > MAX_RANKS:
        sizes = {
            f"{axis}_size": min(2, layout.asked(axis))
            for axis in AXES
            if not (axis == "pp" and from_file)
        }
        sizes["expert_tp_size"] = min(2, layout.expert_tp)
    if layout.pp == 1:
        return replace(layout, **sizes)
    pp_size = int(sizes.get("pp_size", layout.pp))
    same_stages = pp_size == layout.pp
    asked = layout.num_microbatches
    stages = layout.stage_layers if same_stages else None
    if from_file:
        asked = asked or 1 + max(
            action.microbatch
            for row in read_csv(Path(str(layout.pipeline_schedule)))
            for action in row
        )
    elif asked is None or asked > MAX_MICROBATCHES or not same_stages:
        asked = 2 * pp_size
    if stages is not None and sum(stages) > MAX_LAYERS:
        stages = [1 + (count > min(stages)) for count in stages]
    return replace(layout, **sizes, num_microbatches=asked, stage_layers=stages)


def verify(
    config: PreTrainedConfig,
    layout: ParallelConfig,
    *,
    lora: str | None = None,
    auto_class: Any = AutoModelForCausalLM,
    **hf_kwargs: Any,
) -> tuple[ParallelConfig, Parity]:
    """Train a tiny copy of a model in a layout, scaled down to one machine, and in one process of stock transformers.
    Return the scaled layout and the largest differences.

    Args:
        config: the model's config.
        layout: the layout to verify.
        lora: train LoRA adapters in both models: ``all-linear``, or names of modules joined by commas.
        auto_class: the Auto class of the model, which determines its loss and batches.
        hf_kwargs: further arguments of ``from_pretrained``.
    """
    if not layout.flushes:
        others = ", ".join(name for name in schedule_names() if schedule_of(name).flushes)
        raise ConfigError(
            f"pipeline_schedule={layout.pipeline_schedule!r} updates weights while microbatches are in flight, so its "
            f"steps are not those of one process: verify {others}, or a .csv file"
        )
    # Plan the model itself first, because the clone gets as many heads, experts and layers as the layout needs.
    plan(config, layout, auto_class=auto_class, **hf_kwargs)
    config, _ = split_stored_form(config)
    small = scale_down(layout)
    changes = _heads_that_fit(config, layout.tp, small.tp) | _experts_that_fit(config, small.ep)
    changes |= changes_for(config, auto_class)
    clone = clone_for(config, auto_class, _layers(config, small), **changes)
    # Raise for unsupported options before any process starts.
    planned = plan(clone, small, auto_class=auto_class, **hf_kwargs)
    case = case_for(clone, auto_class, planned)
    case.hf_kwargs = hf_kwargs
    if small.pp > 1:
        case.accumulation = int(small.num_microbatches or 1)
    check_stock(case)
    if lora is not None:
        from peft import LoraConfig

        case.peft = LoraConfig(
            r=4, target_modules=lora if lora == "all-linear" else lora.split(",")
        )
        sizes: dict[str, Any] = {f"{axis}_size": 1 for axis in AXES}
        one = ParallelConfig(**sizes)
        # Building the plan may raise for unsupported adapters.
        from_config(clone, parallel=one, auto_class=auto_class, peft_config=case.peft, **hf_kwargs)
    if small.total_size == 1:
        return small, measure_parity(case, small, None)
    with RankPool(small.total_size) as pool:
        return small, _measure(case, small, pool)


def _measure(case: Case, layout: ParallelConfig, pool: RankPool) -> Parity:
    """Run the comparison of a layout with one process on the ranks of ``pool``. If a rank raised one of hfscale's own
    errors, raise its message as :class:`ConfigError`.
    """
    try:
        return measure_parity(case, layout, pool)
    except RankError as error:
        refused = re.findall(r"^hfscale\.errors\.\w+Error: (.*)$", str(error), re.MULTILINE)
        if not refused:
            raise
        raise ConfigError(refused[0]) from None


def _layers(config: PreTrainedConfig, layout: ParallelConfig) -> int:
    """Return the number of layers of the tiny model: enough to have every kind of layer of the config (up to
    :data:`MAX_LAYERS`), and at least one per pipeline stage.
    """
    if layout.stage_layers is not None:
        return sum(layout.stage_layers)
    return max(
        min(layers_of_every_kind(config), MAX_LAYERS), layout.pp * int(layout.virtual_stages or 1)
    )


def _heads_that_fit(config: PreTrainedConfig, asked: int, tensor: int) -> dict[str, int]:
    """Return changes to a tiny config so that its heads can be sharded over ``tensor`` ranks. If the model has fewer
    key/value heads than the ``asked`` number of tensor ranks, the tiny model gets fewer than ``tensor``, too.
    """
    fields = config.to_dict()
    if "num_key_value_heads" not in fields:
        return {}
    fewer = (fields["num_key_value_heads"] or asked) < asked
    if fewer and tensor > 1:
        return {
            "num_key_value_heads": tensor // 2 if tensor % 2 == 0 else 1,
            "num_attention_heads": 2 * tensor,
        }
    return {"num_key_value_heads": tensor, "num_attention_heads": 2 * tensor} if tensor > 2 else {}


def _experts_that_fit(config: PreTrainedConfig, ranks: int) -> dict[str, int]:
    """Return changes to a tiny config so that its number of experts is divisible by ``ranks``."""
    if EXPERTS % ranks == 0:
        return {}
    return {
        name: ranks * -(-EXPERTS // ranks) for name in EXPERT_FIELDS if name in config.to_dict()
    }


def describe_pipeline(layout: ParallelConfig) -> str:
    """Describe a pipeline: ``zbv, 4 stages of 1, 1, 1, 1 layers on 2 pipeline ranks, 4 microbatches``."""
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
    """Return the table that ``hfscale verify`` prints.

    Args:
        config: the model's config.
        asked: the layout to verify.
        used: the layout that was compared, scaled down to one machine.
        parity: the largest differences from one process.
        lora: the modules with LoRA adapters, if any.
        auto_class: the name of the Auto class to show in the title; empty for causal language models.
    """
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
        f"{name:30} {value:9.1e}  {'ok' if value <= TOLERANCE else 'DIFFERS'}  {where}"
        for name, value, where in rows
    ]
    verdict = (
        "equal to rounding"
        if parity.worst() <= TOLERANCE
        else f"differs by more than {TOLERANCE:g}"
    )
    return "\n".join(
        [title, "", f"{'':30} {'relative':>9}", *(line.rstrip() for line in lines), "", verdict]
    )
