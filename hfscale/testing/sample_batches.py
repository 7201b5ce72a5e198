"""Make batches for ``hfscale verify``, by Auto class."""

from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from ..errors import ConfigError, HFScaleError
from ..models.clone import tiny_clone
from ..plan import Plan
from ..plan.feature_plans import OwnLossPlan
from . import plain
from .parity import Case, in_float64
from .picture_configs import with_pictures
from .picture_parity import PictureCase, PlainPictureCase

# Auto class -> function that makes its batches. Causal LMs with a loss that train_step knows are trained by that.
_MAKERS: dict[str, plain.Maker] = {
    "AutoModelForCausalLM": plain.causal_lm,
    "AutoModelForImageClassification": plain.image_classification,
    "AutoModelForMaskedLM": plain.causal_lm,
    "AutoModelForSeq2SeqLM": plain.sequence_to_sequence,
    "AutoModelForSequenceClassification": plain.sequence_classification,
    "AutoModelForSpeechSeq2Seq": plain.speech_to_text,
    "AutoModelForTokenClassification": plain.token_classification,
}
_CLASSES = ("AutoModelForImageClassification", "AutoModelForSequenceClassification", "AutoModelForTokenClassification")
_PICTURES = "AutoModelForImageTextToText"
_SMALL_INPUTS = {"image_size": 32, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 40}


def _name(auto_class: Any) -> str:
    return str(auto_class.__name__)


def changes_for(config: PreTrainedConfig, auto_class: Any) -> dict[str, Any]:
    """Return the fields that a clone needs changed to fit its batches; refuse a class without batches."""
    name = _name(auto_class)
    if name == _PICTURES:
        return {}
    if name not in _MAKERS:
        raise ConfigError(
            f"--auto-class {name}: verify makes batches for {', '.join((*_MAKERS, _PICTURES))}, and knows of no batch "
            "for this one. Compare it in Python: "
            "hfscale.testing.assert_layout_equal(hfscale.testing.plain.PlainCase(config, "
            f"auto_class=transformers.{name}, make_batch=...), layout, pool)"
        )
    fields = config.to_dict()
    changes: dict[str, Any] = {
        field: value for field, value in _SMALL_INPUTS.items() if isinstance(fields.get(field), int)
    }
    if name in _CLASSES:  # integers are classes; one class would be a number to predict
        changes["id2label"] = {number: f"class {number}" for number in range(min(max(2, config.num_labels or 0), 5))}
        changes["label2id"] = {label: number for number, label in changes["id2label"].items()}
        if getattr(config, "problem_type", None) is not None:
            changes["problem_type"] = "single_label_classification"
    if name == "AutoModelForSequenceClassification" and getattr(config, "pad_token_id", None) is None:
        changes["pad_token_id"] = 0  # decoders find the last token by it
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        changes["decoder_start_token_id"] = 0
    return changes


def clone_for(config: PreTrainedConfig, auto_class: Any, layers: int, **changes: Any) -> Any:
    """Return a tiny config of the same family; for a vision-language model, one for small pictures."""
    make = with_pictures if _name(auto_class) == _PICTURES else tiny_clone
    try:
        return make(config, layers=layers, **changes)
    except HFScaleError:
        raise
    except Exception as error:  # transformers may raise anything for an untested config
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ConfigError(
            f"no tiny clone of this {config.model_type!r} can be built on which to compare ({type(error).__name__}: "
            f"{' '.join(lines[:2])}): hfscale plan shows what becomes of the model itself"
        ) from error


def case_for(clone: PreTrainedConfig, auto_class: Any, planned: Plan) -> Case:
    """Return the case to train: by ``train_step`` if it knows the loss, else by a plain loop."""
    if planned.loss is not None and _name(auto_class) == "AutoModelForCausalLM":
        return Case(clone, auto_class=auto_class)
    if _name(auto_class) == _PICTURES:
        by_loop = planned.no_step or planned.feature(OwnLossPlan) is not None
        return PlainPictureCase(clone) if by_loop else PictureCase(clone)
    given: dict[str, Any] = {"auto_class": auto_class, "make_batch": _MAKERS[_name(auto_class)]}
    own = planned.feature(OwnLossPlan)
    if own is not None and planned.stages is not None:  # nothing else runs stages
        return plain.OwnLossCase(clone, over=own.over, **given)
    return plain.PlainCase(clone, **given)


def check_stock(case: Case) -> None:
    """Run one forward and backward pass of the stock clone; refuse one that transformers itself cannot train."""
    from .._compat.transformers.experts import use_eager_experts
    from ..models.precision import keep_float64

    try:
        model = in_float64(case.auto_class.from_config(case.config, dtype=torch.float64, **case.hf_kwargs))
        use_eager_experts(model)
        with keep_float64():
            model(**case.batches(1)[0][0][0]).loss.backward()
    except Exception as error:  # transformers may raise anything for an untested config
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"a tiny clone of this {case.config.model_type!r} cannot be trained by stock transformers "
            f"{transformers.__version__} as {_name(case.auto_class)} ({type(error).__name__}: {first}), so there is "
            "nothing to compare with: try another --auto-class"
        ) from error
