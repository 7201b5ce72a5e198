"""Names of PEFT that it does not promise to keep: how its wrappers hold what they wrap and what they add.

Read and run with PEFT 0.21. Nothing here imports it before it is asked for: most runs have no adapters.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .torch import own_modules

BASE = "base_layer"
"""Under what name a wrapper that adds to a module holds it."""

ORIGINAL = "original_module"
"""Under what name a wrapper that computes with a copy of a module holds the module, which nothing calls."""

WRAPPED = (BASE, ORIGINAL)
"""Under what names wrappers hold what they wrap."""

COPY = "modules_to_save"
"""Under what name a wrapper holds trained copies of a module."""

LORA_A, LORA_B = "lora_A", "lora_B"
"""Under what names a wrapper holds the factors of LoRA."""

LORA_EMBEDDING_A = "lora_embedding_A"
"""The same for the first factor of an embedding."""

DORA_MAGNITUDES = "lora_magnitude_vector"
"""Under what name a wrapper holds DoRA's modules (Liu et al. 2024)."""

IA3_SCALES = "ia3_l"
"""Under what name a wrapper holds what IA3 (Liu et al. 2022) scales by: ``[out, 1]`` or ``[1, in]``."""

ADAPTER_DIMS: dict[str, tuple[int | None, int | None]] = {
    LORA_A: (1, None),
    LORA_B: (None, 0),  # its bias too
    LORA_EMBEDDING_A: (1, None),
    "lora_embedding_B": (None, 0),
    DORA_MAGNITUDES: (None, 0),
    "hada_w1_a": (None, 0),  # LoHa, Hyeon-Woo et al. 2021
    "hada_w1_b": (1, None),
    "hada_w2_a": (None, 0),
    "hada_w2_b": (1, None),
}
"""Where a wrapper holds a parameter -> the dims of it that run along the module's input and along its output."""

NEW_WEIGHTS = (".lora_", ".ia3_", ".hada_", f".{COPY}.")
"""What the names of parameters that PEFT adds have in them."""


def wrapped(module: nn.Module) -> nn.Module | None:
    """What ``module`` is a wrapper around, if it is one."""
    held = own_modules(module)
    return next((held[name] for name in WRAPPED if held.get(name) is not None), None)


def trained_copies(wrapper: nn.Module) -> list[nn.Module]:
    """The copies of what ``wrapper`` is around, one of which computes in its place."""
    copies = own_modules(wrapper).get(COPY)
    return [] if copies is None else list(copies.children())


def is_wrapper(module: nn.Module | None) -> bool:
    """Whether PEFT's classes say that ``module`` is one of their wrappers."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))


def wrapped_by_peft(model: nn.Module) -> bool:
    """Whether PEFT's own functions have put adapters into a model, or around it."""
    if "peft" not in sys.modules:
        return False
    from peft import PeftModel

    return any(isinstance(each, PeftModel) or is_wrapper(each) for each in model.modules())


def wrapped_model(model: nn.Module, config: Any, name: str) -> Any:
    """PEFT's model around ``model``, whose modules are wrapped in place; factors have no memory, and draw nothing."""
    import peft

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        # PEFT 0.21 asks by a name that transformers 5.23 has deprecated.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return peft.get_peft_model(model, config, adapter_name=name, low_cpu_mem_usage=True)  # type: ignore[arg-type]


def no_targets() -> str:
    """What a config says in the place of targets where there are none."""
    from peft.utils.constants import DUMMY_TARGET_MODULES

    return str(DUMMY_TARGET_MODULES)


def is_feedforward(config: Any, name: str) -> bool:
    """Whether IA3 scales the input of that module, and not its output."""
    from peft.tuners.ia3 import IA3Model

    return bool(IA3Model._check_target_module_feedforward(config, name))


def stored_weights(path: str, **hub: Any) -> dict[str, Tensor]:
    """The tensors of a saved adapter, in the memory of the CPU.

    Raises:
        ValueError: there is none.
    """
    from peft.utils.save_and_load import load_peft_weights

    return load_peft_weights(path, device="cpu", **hub)


def ask_before_state_dicts(ask: Callable[[Any], None]) -> None:
    """From now on ``get_peft_model_state_dict`` asks about the model that it is given; ``ask`` may raise.

    However a script has imported it: it looks up this name, to which it gives the model, when it runs.
    """
    from peft.utils import save_and_load

    stock = save_and_load._get_tp_info
    if hasattr(stock, "asks"):
        return

    def asked(model: Any) -> Any:
        ask(model)
        return stock(model)

    asked.asks = ask  # type: ignore[attr-defined]
    save_and_load._get_tp_info = asked


def adds_to_lookup(embedding: nn.Module) -> bool:
    """Whether ``embedding`` is a wrapper that looks up its first factor."""
    return hasattr(embedding, "_embed")


def look_up_by(embedding: nn.Module, look_up: Callable[..., Tensor]) -> None:
    """Let such a wrapper look up rows of its first factor by that function."""
    embedding._embed = look_up  # type: ignore[assignment]


def adapted_parameter(wrapper: nn.Module) -> str | None:
    """The parameter of a module of experts that ``wrapper`` adds to; ``None`` for one around a whole module."""
    return getattr(wrapper, "parameter_name", None)


def experts_adapted(wrapper: nn.Module) -> int:
    """For how many experts such a wrapper has factors."""
    return int(getattr(wrapper, "num_experts", 0)) if hasattr(wrapper, "parameter_name") else 0


def terms_of_experts(experts: Any) -> Iterator[tuple[str, Tensor, Tensor, int, float]]:
    """What active adapters add to parameters of ``experts``: the parameter, ``A``, ``B`` as PEFT holds them, of how
    many experts, and the scale.
    """
    while hasattr(experts, "parameter_name"):  # one wrapper for each parameter, around one another
        active = [] if experts.disable_adapters else experts.active_adapters
        for adapter in (name for name in active if name in experts.lora_A):
            a, b = experts.lora_A[adapter].weight, experts.lora_B[adapter].weight
            yield experts.parameter_name, a, b, experts.num_experts, experts.scaling[adapter]
        experts = experts.base_layer


def dora_modules(wrapper: nn.Module) -> list[nn.Module]:
    """DoRA's modules in a wrapper."""
    return list(getattr(wrapper, DORA_MAGNITUDES, nn.ModuleDict()).values())


def first_factors(wrapper: nn.Module) -> list[nn.Module]:
    """What of a wrapper's low-rank adapters reads the wrapper's input."""
    return list(getattr(wrapper, LORA_A, nn.ModuleDict()).values())


def note_casts(wrapper: Any, note: Callable[[Tensor, Tensor], None]) -> None:
    """Have ``note`` told the input of a wrapper and the copy of it in another type that its adapters read, if any."""
    stock = wrapper._cast_input_dtype

    def cast(x: Any, dtype: Any) -> Any:
        found = stock(x, dtype)
        if found is not x:
            note(x, found)
        return found

    wrapper._cast_input_dtype = cast


def dropouts(wrapper: nn.Module) -> list[nn.Module]:
    """What a wrapper has in front of its adapters."""
    return list(getattr(wrapper, "lora_dropout", nn.ModuleDict()).values())
