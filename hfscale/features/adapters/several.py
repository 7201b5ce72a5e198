"""Support several adapters of one sharded model: each adapter is planned by the same function as a single one.

PEFT's wrappers hold the factors of all adapters, record which adapters are active, and compute with the active ones. A
parameter trains while its adapter is active. So switching adapters changes no sharding and no reduction: every
parameter is planned and read like the parameter of a single adapter. To add or delete an adapter, hfscale undoes the
installation of the layout (the model is then *disassembled*: its parameters are plain local shards), and installs the
layout again.
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
    """Raise :class:`ConfigError` if one of several adapters is of a kind that, on a sharded model, must be the only
    adapter.
    """
    layout = plan.layout.describe()
    remedy = "use a separate model for such an adapter, or use one process"
    if prompt_of(plan) is not None:
        raise ConfigError(
            f"a model over {layout} that has a prompt must have no other adapters, got {len(whole.peft_config)} "
            f"adapters in all: {remedy}"
        )
    rows = next((adapter for adapter in plan.adapters if adapter.tokens), None)
    if rows is not None:
        raise ConfigError(
            f"several adapters over {layout} must have no trainable_token_indices, got the adapter {rows.adapter!r}, "
            f"which trains rows of {rows.base}: {remedy}"
        )
    fixed = next((name for name in whole.peft_config if fixed_values(whole, name)), None)
    if fixed is not None:
        raise ConfigError(
            f"several adapters over {layout} must compute with their own parameters alone, got the adapter {fixed!r} "
            f"of {type(whole.peft_config[fixed]).__name__}, whose matrices or tables PEFT shares between modules: "
            f"{remedy}"
        )
    inits = {
        name: getattr(config, "init_lora_weights", True)
        for name, config in whole.peft_config.items()
    }
    changing = next((name for name, init in inits.items() if init in DECOMPOSING), None)
    if changing is not None:
        raise ConfigError(
            f"several adapters over {layout} must share one base, got the adapter {changing!r} with "
            f"init_lora_weights={inits[changing]!r}, which changes the base for all adapters: {remedy}"
        )
    if plan.layout.gradient_compression not in ("no", "bf16", "fp16"):
        raise ConfigError(
            f"gradient_compression={plan.layout.gradient_compression!r} can compress the gradients of one adapter "
            "only, but this model would have several adapters: use 'bf16', or leave gradient_compression out"
        )


def let_all_train(model: nn.Module, plan: Plan, pp_rank: int) -> list[str]:
    """Make the parameters of all adapters trainable before the model is sharded, because sharding groups parameters by
    ``requires_grad``. Return this rank's names of the inactive adapters' parameters; the caller freezes them again
    after sharding.
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
    """Return the directory into which PEFT writes the adapter ``name``."""
    return target if name == "default" else target / name


def directories_of(names: Sequence[str], target: Path) -> dict[str, Path]:
    """Return the directory of each adapter for a save: ``target`` for a single adapter, otherwise PEFT's
    directories.
    """
    if len(names) == 1:
        return {names[0]: target}
    return {name: directory_by_peft(name, target) for name in names}


def config_in_state(place: str) -> str:
    """Return the name of an adapter's config file in a state. A state has no directories, so ``place``, the name of the
    adapter's directory, becomes a prefix; it is empty for a model's only adapter.
    """
    return f"{place}.{ADAPTER_CONFIG}" if place else ADAPTER_CONFIG


def saved_directories(names: Sequence[str], active: str, source: Path) -> dict[str, Path]:
    """Return the directory from which each adapter is loaded: for all ``names``, if ``source`` has every adapter in the
    directory that PEFT gives it; otherwise only for the ``active`` adapter, ``source`` itself.
    """
    written = directories_of(names, source)
    if len(names) > 1 and all((path / ADAPTER_CONFIG).is_file() for path in written.values()):
        return written
    return {active: source}
