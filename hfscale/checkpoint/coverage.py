"""Compare the tensors of a checkpoint with the parameters of the model that is to be loaded from the checkpoint."""

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from .._compat.transformers.classes import class_name
from ..errors import CheckpointError
from ..plan import Plan

_MOST = 0.5  # the fraction of missing values from which a warning is shown


def check_coverage(
    plan: Plan, keys: Sequence[str], found: Collection[str], directory: str, *, tells: bool
) -> None:
    """Check that a checkpoint has the model's weights. Raise :class:`CheckpointError` if none of its ``keys`` is a
    parameter of the model, and warn (if ``tells``) if it lacks most of the model's values. ``found`` are the names of
    the parameters and buffers into which the keys are loaded.

    transformers reports missing tensors only in its log, which scripts often switch off, and continues with random
    weights.
    """
    stored = {plan.by_name[name].first_name for name in found if name in plan.by_name}
    owned = list(plan.owned())
    if not stored:
        first = f"begins with {sorted(keys)[0]!r}" if keys else "is empty"
        raise CheckpointError(
            f"{directory} must hold tensors of the model, such as {owned[0].name!r}, got {len(keys)} tensors with "
            f"other names (the list of names {first}): rename them, load the checkpoint with the class that saved it "
            "(auto_class=...), or begin with random weights (hfscale.from_config)"
        )
    missing = [planned for planned in owned if planned.name not in stored]
    lacking = sum(planned.numel for planned in missing)
    share = lacking / sum(planned.numel for planned in owned)
    if tells and share > _MOST:
        warnings.warn(
            f"{directory} lacks {len(missing)} tensors of the model, {share:.0%} of the model's parameters: "
            f"{missing[0].name!r} and the other missing tensors begin with random values; check that this is the right "
            "checkpoint",
            stacklevel=2,
        )


@dataclass(frozen=True)
class Carried:
    """Hold the names of the tensors that a model does not load from its checkpoint in ``directory``, and that a save
    copies unchanged. If the checkpoint is quantized, the names are those after dequantization.
    """

    directory: Path
    names: frozenset[str]


def names_besides(model: nn.Module, targets: Mapping[str, str]) -> Iterator[str]:
    """Yield the stored names whose target is no parameter or buffer of ``model``."""
    named = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    named.update(name for name, _ in model.named_buffers())
    return (name for name, target in targets.items() if target not in named)


def note_carried(model: Any, directory: Path, names: Iterable[str]) -> None:
    """Record the tensors that a new model does not load from its checkpoint."""
    # If the model's class is not the checkpoint's (a head was replaced), nothing is copied.
    own = class_name(model) in (model.config.architectures or ())
    model._hfscale_carried = Carried(directory, frozenset(names if own else ()))


def carried_by(model: nn.Module) -> Carried | None:
    """Return the tensors that a model did not load from its checkpoint, as :func:`note_carried` recorded them; ``None``
    if nothing was recorded.
    """
    return vars(model).get("_hfscale_carried")
