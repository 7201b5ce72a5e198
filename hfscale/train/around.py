"""Trained parameters that stand around a parallelized model: in a user's module, or a prompt of PEFT's.

No layout knows them: ranks with other batches would each train their own, and no norm or save would count them. So
over ranks they are refused at the first step. In one process they train as in stock code, and the plan takes them
(:mod:`.runtime.latecomers`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .._compat.peft import computes_loss, puts_tokens_in_front
from .._compat.transformers.classes import class_name
from ..errors import ConfigError
from .runtime import Runtime


def trained_around(runtime: Runtime, model: nn.Module) -> dict[str, nn.Parameter]:
    """Return trained parameters of ``model`` that are not of the parallelized model in it, by name; in one process,
    also those that were put into it.
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
    """Raise :class:`ConfigError` for a loss that is computed around the model, in any layout."""
    if computes_loss(model):
        raise ConfigError(
            f"the loss must be that of {class_name(runtime.model)}, got PEFT's CPT, which computes another of logits "
            "that a training step does not have: train it in one process, by loss = model(**batch).loss; "
            "loss.backward()"
        )


def refuse_trained_around(runtime: Runtime, model: nn.Module) -> None:
    """Raise :class:`ConfigError` for such parameters over several ranks."""
    layout = runtime.mesh.layout
    if layout.total_size == 1 or not (trained := trained_around(runtime, model)):
        return
    raise ConfigError(
        f"{class_name(model)} trains {', '.join(list(trained)[:3])} around {class_name(runtime.model)}, which "
        f"{layout.describe()} does not know: each rank would train its own. Put it into the model before "
        "hfscale.parallelize, adapt the layers by hfscale.get_peft_model (LoRA, IA3, LoHa), freeze it, or use one "
        "process"
    )


def refuse_without_around(runtime: Runtime, model: nn.Module, call: str, instead: str) -> None:
    """Raise :class:`ConfigError`, in any layout, if ``call`` would leave such parameters out, as a save does."""
    trained = list(trained_around(runtime, model))
    if trained:
        raise ConfigError(
            f"{call} is of {class_name(runtime.model)} as it was built, and would leave out what trains in it, or "
            f"around it, since then ({', '.join(trained[:3])}): {instead}"
        )


def labels_around(runtime: Runtime, model: nn.Module, batch: Any) -> float | None:
    """Return how many labels a step has where PEFT puts tokens of a prompt in front, so that each row's first label is
    predicted too; ``None`` without such a prompt, or over ranks, where the batch has its tokens.
    """
    if runtime.mesh.layout.total_size > 1 or not puts_tokens_in_front(model):
        return None
    batches: Sequence[Any] = [batch] if isinstance(batch, Mapping) else batch
    return (
        float(sum(int((each["labels"] != -100).sum()) for each in batches if "labels" in each))
        or None
    )
