"""Find trained parameters that the plan of a parallelized model does not include: those of a user's module that wraps
the model, or of a PEFT prompt.

Over several ranks, they would train wrongly without an error: ranks with different batches would each train their own
copy, and no norm or save would include them. So the first step raises an error. In one process they train as in stock
code, and are added to the plan (:mod:`.runtime.latecomers`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .._compat.peft import computes_loss, puts_tokens_in_front
from .._compat.transformers.classes import class_name
from ..errors import ConfigError
from .runtime import Runtime


def trained_around(runtime: Runtime, model: nn.Module) -> dict[str, nn.Parameter]:
    """Return, by name, the trained parameters of ``model`` (a wrapper of the parallelized model, or the parallelized
    model itself) that the parallelized model did not have when it was planned.
    """
    if late := runtime.latecomers():
        live = runtime.live_parameters()
        return {name: live[name] for name in late if live[name].requires_grad}
    if model is runtime.model:
        return {}
    inside = set(map(id, runtime.model.parameters()))
    named = model.named_parameters()
    return {
        name: parameter
        for name, parameter in named
        if parameter.requires_grad and id(parameter) not in inside
    }


def refuse_loss_around(runtime: Runtime, model: nn.Module) -> None:
    """Raise :class:`ConfigError` if ``model`` is a wrapper that computes its own loss from the logits of the
    parallelized model (PEFT's CPT), which no training step supports.
    """
    if computes_loss(model):
        raise ConfigError(
            f"the loss must be the loss of {class_name(runtime.model)}, got PEFT's CPT, which computes another loss "
            "from full logits, but a training step has none: train CPT in one process, by loss = model(**batch).loss; "
            "loss.backward()"
        )


def refuse_trained_around(runtime: Runtime, model: nn.Module) -> None:
    """Raise :class:`ConfigError` if a layout of several ranks trains a wrapper of the parallelized model that has
    trained parameters of its own.
    """
    if runtime.is_alone or not (trained := trained_around(runtime, model)):
        return
    raise ConfigError(
        f"{class_name(model)} trains {', '.join(list(trained)[:3])} outside of {class_name(runtime.model)}, whose "
        f"layout {runtime.mesh.layout.describe()} does not cover them, so each rank would train its own copy: put them "
        "into the model before hfscale.parallelize, adapt the layers by hfscale.get_peft_model (LoRA, IA3, LoHa), "
        "freeze them, or use one process"
    )


def refuse_without_around(runtime: Runtime, model: nn.Module, call: str) -> None:
    """Raise :class:`ConfigError` if the save named ``call`` would omit trained parameters that were added in or around
    the model after it was built.
    """
    trained = list(trained_around(runtime, model))
    if trained:
        raise ConfigError(
            f"{call} writes {class_name(runtime.model)} as it was built, and would omit trainable parameters that "
            f"were added later to the model or to a wrapper of it ({', '.join(trained[:3])}): save those by "
            "model.save_pretrained or torch.save, in one process"
        )


def labels_around(runtime: Runtime, model: nn.Module, batch: Any) -> float | None:
    """Return the number of labels of a step if PEFT's prompt tuning runs in one process: PEFT prepends the prompt
    inside the model, so that the first label of each row is predicted, too. Return ``None`` if there is no such prompt,
    or if there are several ranks, since hfscale then adds the prompt to the batch itself.
    """
    if not runtime.is_alone or not puts_tokens_in_front(model):
        return None
    batches: Sequence[Any] = [batch] if isinstance(batch, Mapping) else batch
    return (
        float(sum(int((each["labels"] != -100).sum()) for each in batches if "labels" in each))
        or None
    )
