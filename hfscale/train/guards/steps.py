"""Checks before the first training steps, for runs that would train badly without an error."""

import logging
import os

import torch

from ..._compat.bitsandbytes import misreads_rows
from ...errors import ConfigError
from ...plan.lines import describe_quantization
from ...plan.quantized import BLOCK
from ..runtime import Runtime
from .part import check_model
from .replicas import check_replicas

_CHECKED = frozenset({10, 100, 1000, 10000})
_HALF = (torch.bfloat16, torch.float16)
_log = logging.getLogger(__name__)


def before_step(runtime: Runtime) -> None:
    """Check a model before a training step; on every rank, in every step.

    Replicas are compared before a few of the steps, so that a run that goes wrong does not find out only when it saves.

    Raises:
        ConfigError: the model was changed since it was built, replicas have drifted apart, the model is in float16, or
            gradients are disabled.
    """
    check_model(runtime)
    if not torch.is_grad_enabled():
        raise ConfigError(
            "train_step was called within torch.no_grad() or torch.inference_mode(), where nothing has a gradient: "
            "call it outside, or hfscale.eval_step for the loss alone"
        )
    runtime.steps += 1
    if runtime.steps == 1:
        _refuse_float16(runtime)
        if not any(runtime.mesh.ranks.values()):
            _warn_of_a_base_alone(runtime)
            _warn_of_lost_updates(runtime)
            _warn_of_rounding(runtime)
            _warn_of_misread_rows(runtime)
    elif runtime.steps in _CHECKED:
        check_replicas(runtime)


def _refuse_float16(runtime: Runtime) -> None:
    """Refuse float16 weights, whose gradients cannot be unscaled in float16; by the plan, the same on every rank."""
    found = next((planned.name for planned in runtime.plan.parameters if planned.dtype == torch.float16), None)
    if found is not None:
        raise ConfigError(
            f"{found} is in float16, where gradients below 6e-8 and most updates are zero: load it with "
            'dtype=torch.float32 and mixed_precision="fp16", which scales the loss and computes in float16, or '
            'mixed_precision="bf16" for bfloat16. eval_step and generate take float16'
        )


def _warn_of_rounding(runtime: Runtime) -> None:
    """Warn of weights that are quantized, and of a launcher's precision that differs from the model's."""
    for line in describe_quantization(runtime.plan)[1:]:
        _log.warning("%s (losses differ from those of one process by the rounding of these weights)", line)
    asked, own = os.environ.get("ACCELERATE_MIXED_PRECISION", "no"), runtime.options.mixed_precision
    if asked not in ("no", own, runtime.options.around_products):
        _log.warning(
            "ACCELERATE_MIXED_PRECISION=%s (from accelerate launch, its config file or TrainingArguments) does not "
            "change a model that was built with mixed_precision=%r: build it with mixed_precision=%r if that is meant",
            *(asked, own, asked),
        )


def _warn_of_misread_rows(runtime: Runtime) -> None:
    """Warn of 4-bit matrices that bitsandbytes misreads on CPUs, in stock models too, so no comparison shows it."""
    quantized = runtime.plan.quantized
    if quantized is None or quantized.bits != 4 or runtime.mesh.device.type != "cpu":
        return
    widths = set[int]()
    for name in quantized.weights:
        *_, rows, columns = runtime.plan.by_name[name].local_shape(runtime.mesh.ranks)
        widths.add(rows if name in quantized.transposed else columns)
    misread = [width for width in sorted(widths) if width % BLOCK and misreads_rows(width)]
    if misread:
        _log.warning(
            "on CPUs this version of bitsandbytes takes wrong scales for 4-bit matrices whose rows are no whole blocks "
            "of %d values (%s here), in stock models as well: their numbers are not those that a GPU computes",
            *(BLOCK, ", ".join(map(str, misread))),
        )


def _warn_of_a_base_alone(runtime: Runtime) -> None:
    """Warn if a base model in 4 or 8 bits has no adapters, so that only embeddings and norms train.

    A stock loop trains them too; ``transformers.Trainer`` refuses it. A model with something frozen is taken as
    intended.
    """
    quantized = runtime.plan.quantized
    if quantized is None or runtime.plan.adapters:
        return
    rest = [(planned.name, p) for planned, p in runtime.parameters() if planned.name not in quantized.weights]
    if rest and all(parameter.requires_grad for _, parameter in rest):
        _log.warning(
            "the model is held in %d bits, which do not train, and has no adapters: all that trains are its embeddings "
            "and norms (%s, for one). Put adapters around it - from_pretrained(..., peft_config=LoraConfig(...)), or "
            "hfscale.get_peft_model(model, config) - or freeze what should stay with requires_grad_(False)",
            *(quantized.bits, rest[0][0]),
        )


def _warn_of_lost_updates(runtime: Runtime) -> None:
    """Warn of 16-bit weights that train: most updates are smaller than half their last bit, and rounded away."""
    if runtime.keeps_small_updates:
        return
    trained = [(planned.name, p.dtype) for planned, p in runtime.parameters() if p.requires_grad]
    half = [(name, dtype) for name, dtype in trained if dtype in _HALF]
    if half:
        name, dtype = half[0]
        _log.warning(
            "%d of the %d parameters that train are %s (%s, for one): updates below about 1/512 of a weight are "
            "rounded away, and AdamW at lr=1e-5 leaves nine weights in ten as they are. Load the model with "
            'dtype=torch.float32, mixed_precision="bf16", which computes in bfloat16 over float32 weights, or make the '
            "optimizer by hfscale.create_optimizer(..., stochastic_rounding=True)",
            *(len(half), len(trained), str(dtype).removeprefix("torch."), name),
        )
