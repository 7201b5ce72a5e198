"""Several adapters of one model over ranks: each is planned by the function that plans the first.

PEFT's wrappers hold the factors of all of them, and compute with the active ones. Which those are is PEFT's own note in
the wrappers; a parameter trains while its adapter is active. So nothing is cut or summed anew when adapters are
switched: every parameter is planned, and read, as it would be alone. Adding or deleting one takes the model apart.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..._compat.peft_shared import fixed_values
from ...distributed.files.replace import ADAPTER_CONFIG
from ...errors import ConfigError
from ...plan import Plan
from ...train.runtime.parameter_names import parameter_at
from .plan import prompt_of
from .storage import DECOMPOSING


def refuse_beside(whole: Any, plan: Plan) -> None:
    """Raise :class:`ConfigError` for adapters that are right over ranks only as a model's one adapter."""
    layout = plan.layout.describe()
    remedy = "give such an adapter a model of its own, or use one process"
    if prompt_of(plan) is not None:
        raise ConfigError(
            f"a model over {layout} must have one prompt, and no adapters beside it, got {len(whole.peft_config)}: "
            f"{remedy}"
        )
    rows = next((adapter for adapter in plan.adapters if adapter.tokens), None)
    if rows is not None:
        raise ConfigError(
            f"several adapters over {layout} must have no trainable_token_indices, got {rows.adapter!r} with rows of "
            f"{rows.base}: {remedy}"
        )
    fixed = next((name for name in whole.peft_config if fixed_values(whole, name)), None)
    if fixed is not None:
        raise ConfigError(
            f"several adapters over {layout} must compute with their own parameters alone, got {fixed!r} of "
            f"{type(whole.peft_config[fixed]).__name__}, whose matrices or tables PEFT makes of all its modules: "
            f"{remedy}"
        )
    inits = {
        name: getattr(config, "init_lora_weights", True)
        for name, config in whole.peft_config.items()
    }
    changing = next((name for name, init in inits.items() if init in DECOMPOSING), None)
    if changing is not None:
        raise ConfigError(
            f"several adapters over {layout} must share one base, got {changing!r} with "
            f"init_lora_weights={inits[changing]!r}, which changes it for all of them: {remedy}"
        )
    if plan.layout.gradient_compression not in ("no", "bf16", "fp16"):
        raise ConfigError(
            f"gradient_compression={plan.layout.gradient_compression!r} follows one adapter's gradients, and this "
            "model would get several: use 'bf16', or leave it out"
        )


def let_all_train(model: nn.Module, plan: Plan, pp_rank: int) -> list[str]:
    """Let the parameters of all adapters of a model that is apart train, as what installs a layout groups them, and
    return this rank's names of those of inactive ones, to be frozen again.
    """
    names = plan.local_names(pp_rank)
    frozen: list[str] = []
    for adapter in plan.adapters:
        parameter = parameter_at(model, names[adapter.name]) if adapter.name in names else None
        if parameter is not None and not parameter.requires_grad:
            parameter.requires_grad_(True)
            frozen.append(names[adapter.name])
    return frozen


def directory_by_peft(name: str, target: Path) -> Path:
    """Return where PEFT writes an adapter of the name ``name``."""
    return target if name == "default" else target / name


def directories_of(names: Sequence[str], target: Path) -> dict[str, Path]:
    """Return where each adapter of a model is written: a model's only one in ``target``, others as PEFT does."""
    if len(names) == 1:
        return {names[0]: target}
    return {name: directory_by_peft(name, target) for name in names}


def config_in_state(place: str) -> str:
    """Return the name of an adapter's config in a state, which has no directories; ``place``, where the adapter's
    directory would be, is the empty string for a model's only one.
    """
    return f"{place}.{ADAPTER_CONFIG}" if place else ADAPTER_CONFIG


def saved_directories(names: Sequence[str], active: str, source: Path) -> dict[str, Path]:
    """Return where each adapter is read again: all of them, if ``source`` has them all as a model of several writes
    them, and otherwise the active one, from ``source`` itself.
    """
    written = directories_of(names, source)
    if len(names) > 1 and all((path / ADAPTER_CONFIG).is_file() for path in written.values()):
        return written
    return {active: source}
