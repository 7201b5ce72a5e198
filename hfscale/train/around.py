"""Find trained parameters outside of a parallelized model: in a user's module around it, or in a PEFT prompt.

No layout covers such parameters: ranks with different batches would each train their own copy, and no norm or save
would include them. So over several ranks, the first step raises an error. In one process they train as in stock code,
and are added to the plan (:mod:`.runtime.latecomers`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .._compat.peft import computes_loss, puts_tokens_in_front
from .._compat.transformers.classes import class_name
from ..errors import ConfigError
from .runtime import Runtime


def trained_around(runtime: Runtime, model: nn.Module) -> dict[str, nn.Parameter]:
    """Return trained parameters of ``model`` that do not belong to the parallelized model inside it, by name. In one
    process, parameters that were added to the parallelized model later are returned, too.
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
    """Raise :class:`ConfigError` for a loss that a wrapper around the model computes, in any layout."""
    if computes_loss(model):
        raise ConfigError(
            f"the loss must be the loss of {class_name(runtime.model)}, got PEFT's CPT, which computes another loss "
            "from full logits, but a training step has none: train CPT in one process, by loss = model(**batch).loss; "
            "loss.backward()"
        )


def refuse_trained_around(runtime: Runtime, model: nn.Module) -> None:
    """Raise :class:`ConfigError` for trained parameters outside of the model over several ranks."""
    layout = runtime.mesh.layout
    if layout.total_size == 1 or not (trained := trained_around(runtime, model)):
        return
    raise ConfigError(
        f"{class_name(model)} trains {', '.join(list(trained)[:3])} outside of {class_name(runtime.model)}, whose "
        f"layout {layout.describe()} does not cover them, so each rank would train its own copy: put them into the "
        "model before hfscale.parallelize, adapt the layers by hfscale.get_peft_model (LoRA, IA3, LoHa), freeze "
        "them, or use one process"
    )


def refuse_without_around(runtime: Runtime, model: nn.Module, call: str, instead: str) -> None:
    """Raise :class:`ConfigError`, in any layout, if ``call`` (a save) would omit trained parameters outside of the
    model.
    """
    trained = list(trained_around(runtime, model))
    if trained:
        raise ConfigError(
            f"{call} writes {class_name(runtime.model)} as it was built, and would omit trainable parameters that "
            f"were added later to the model or to a wrapper of it ({', '.join(trained[:3])}): {instead}"
        )


def labels_around(runtime: Runtime, model: nn.Module, batch: Any) -> float | None:
    """Return the number of labels of a step if PEFT prepends prompt tokens to each row, so that the row's first label
    is predicted, too; ``None`` without such a prompt, or over several ranks, where the batch contains the prompt.
    """
    if runtime.mesh.layout.total_size > 1 or not puts_tokens_in_front(model):
        return None
    batches: Sequence[Any] = [batch] if isinstance(batch, Mapping) else batch
    return (
        float(sum(int((each["labels"] != -100).sum()) for each in batches if "labels" in each))
        or None
    )
