"""Private names of PEFT: where its wrappers store the wrapped modules and the parameters of adapters.

Read and run with PEFT 0.21. Imported on first use only: most runs have no adapters.
"""

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .lasting import check_first
from .replaced import attribute_replaced
from .torch import own_modules

# Attributes of PEFT's wrappers.
BASE = "base_layer"  # the wrapped module, to whose output a wrapper adds
ORIGINAL = "original_module"  # the original module, if a trained copy is called instead
TOKEN_LAYER = "token_adapter"  # an inner wrapper that replaces rows of an embedding or a head
WRAPPED = (BASE, ORIGINAL, TOKEN_LAYER)
COPY = "modules_to_save"  # trained copies of a module
NORM_COPY = "ln_tuning_layers"  # trained copies in LN tuning
COPIES = (COPY, NORM_COPY)
# For these tasks, PEFT trains copies of both heads in addition to the modules that a config names.
CLASSIFYING = ("SEQ_CLS", "TOKEN_CLS")
HEADS = ("classifier", "score")
# the factors of LoRA
LORA_A = "lora_A"
LORA_B = "lora_B"
LORA_EMBEDDING_A = "lora_embedding_A"  # an embedding's first factor
DROPOUTS = "lora_dropout"  # applied to the input of adapters
DORA_MAGNITUDES = "lora_magnitude_vector"  # DoRA's modules (Liu et al. 2024)
TOKEN_ROWS = "trainable_tokens_delta"  # the replaced rows, ``[tokens, hidden]``
IA3_SCALES = "ia3_l"  # scales of IA3 (Liu et al. 2022): ``[out, 1]`` or ``[1, in]``

BEFT_BIAS = "beft_bias"  # bias of BEFT, ``[1, out]``
# RoAd (Liao and Monz 2024): angles and scales of groups of outputs.
ROTATIONS = ("road_theta", "road_alpha")

# Attribute of PEFT's model: adapter name -> prompt encoder. An encoder prepends virtual tokens, or keys and values.
PROMPT_ENCODER = "prompt_encoder"
PROMPT = "prompt"
PREFIX = "prefix"
IN_FRONT = (PROMPT, PREFIX)
_PREFIXES = ("PREFIX_TUNING", "CARTRIDGE")

UNILORA_VECTOR = "unilora_theta_d"  # one vector for all wrappers of a model

# Methods whose wrappers compute a full projection on every tensor rank -> their parameters, which have no dim along
# the inputs or outputs of the projection.
OF_WHOLE_PROJECTIONS: dict[str, tuple[str, ...]] = {
    "BOFT": ("boft_R", "boft_s"),
    "C3A": ("c3a_kernel",),
    "DEFT": ("deft_P", "deft_R"),
    "FOURIERFT": ("fourierft_spectrum",),
    "GRALORA": ("gralora_A", "gralora_B", "gralora_A_general", "gralora_B_general"),
    "HRA": ("hra_u",),
    "LOKR": ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b"),
    "MISS": ("miss_block",),
    "OFT": ("oft_R",),
    "PEANUT": ("peanut_A", "peanut_B", "peanut_decoders", "peanut_encoders"),
    "PVERA": ("pvera_lambda_b", "pvera_lambda_d"),
    "RANDLORA": ("randlora_gamma", "randlora_lambda"),
    "UNILORA": (UNILORA_VECTOR,),
    "VERA": ("vera_lambda_b", "vera_lambda_d"),
    "WAVEFT": ("waveft_spectrum",),
}
WHOLE = tuple(name for names in OF_WHOLE_PROJECTIONS.values() for name in names)

CONVERTS = "supports_lora_conversion"  # a wrapper's method that tells whether it can be converted

ADAPTER_DIMS: dict[str, tuple[int | None, int | None]] = {
    LORA_A: (1, None),
    LORA_B: (None, 0),  # the bias of the second factor too
    LORA_EMBEDDING_A: (1, None),
    "lora_embedding_B": (None, 0),
    DORA_MAGNITUDES: (None, 0),
    "hada_w1_a": (None, 0),  # LoHa, Hyeon-Woo et al. 2021
    "hada_w1_b": (1, None),
    "hada_w2_a": (None, 0),
    "hada_w2_b": (1, None),
    "hira_A": (1, None),  # HiRA
    "hira_B": (None, 0),
    BEFT_BIAS: (None, 1),
    **dict.fromkeys(ROTATIONS, (None, 0)),
    **dict.fromkeys(WHOLE, (None, None)),
}
"""Map of a wrapper's attribute, such as ``lora_A``, to two dims of the parameters in it: the dim along the wrapped
module's input features, and the dim along its output features; ``None`` if there is no such dim.
"""

# Substrings of the names of parameters that PEFT adds.
NEW_WEIGHTS = (
    ".lora_",
    ".ia3_",
    ".hada_",
    f".{TOKEN_ROWS}.",
    ".hira_",
    ".beft_",
    ".road_",
    *(f".{name}." for name in WHOLE),
    f".{COPY}.",
    f".{NORM_COPY}.",
    f"{PROMPT_ENCODER}.",
)


def wrapped(module: nn.Module) -> nn.Module | None:
    """Return the module that a wrapper wraps; ``None`` if ``module`` is no wrapper."""
    held = own_modules(module)
    return next((held[name] for name in WRAPPED if held.get(name) is not None), None)


def trained_copies(wrapper: nn.Module) -> list[nn.Module]:
    """Return the wrapper's trained copies of the wrapped module (``modules_to_save``), one per adapter. The wrapper
    calls the active adapter's copy instead of the wrapped module.
    """
    held = own_modules(wrapper)
    copies = [held[name] for name in COPIES if held.get(name) is not None]
    return [child for copied in copies if copied is not None for child in copied.children()]


def is_wrapper(module: nn.Module | None) -> bool:
    """Return whether ``module`` is of one of PEFT's wrapper classes."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))


@contextmanager
def adapters_switched_off(model: nn.Module) -> Iterator[None]:
    """Let wrappers compute without adapters inside the ``with`` block; unlike PEFT's own switch, keep
    ``requires_grad`` unchanged.
    """
    with ExitStack() as stack:
        for wrapper in filter(is_wrapper, model.modules()):
            stack.enter_context(attribute_replaced(wrapper, "_disable_adapters", True))
        yield


def convertible_layers(model: nn.Module) -> list[nn.Module]:
    """Return the wrappers that PEFT may convert to LoRA."""
    return [module for module in model.modules() if hasattr(type(module), CONVERTS)]


def wrapped_by_peft(model: nn.Module) -> bool:
    """Return whether PEFT's own functions have wrapped a model, or modules in a model."""
    if "peft" not in sys.modules:
        return False
    from peft import PeftModel

    return any(isinstance(module, PeftModel) or is_wrapper(module) for module in model.modules())


def functions_that_adapt() -> list[tuple[type, str]]:
    """Return (class, name) of the methods by which PEFT wraps a model or injects adapters: all public functions of PEFT
    call one of these methods, with the model as first argument. Return an empty list before PEFT is imported.
    """
    if "peft" not in sys.modules:
        return []
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTuner

    return [(PeftModel, "__init__"), (BaseTuner, "inject_adapter")]


def adapted_model(model: Any) -> Any:
    """Return the transformers model inside a PEFT model; a model with injected adapters is returned unchanged."""
    from peft import PeftModel

    return model.get_base_model() if isinstance(model, PeftModel) else model


def is_a_hosts(model: Any) -> bool:
    """Return whether ``model`` is a transformers model, or PEFT's wrapper of one, and not another module that contains
    such a model.
    """
    if isinstance(model, PreTrainedModel):
        return True
    return wrapped_by_peft(model) and isinstance(adapted_model(model), PreTrainedModel)


def puts_tokens_in_front(model: nn.Module) -> bool:
    """Return whether ``model`` is a PEFT model that prepends trained prompt tokens to each row. Prefix tuning, which
    prepends keys and values instead, does not count.
    """
    if "peft" not in sys.modules or not isinstance(model, sys.modules["peft"].PeftModel):
        return False
    config = model.active_peft_config
    return bool(config.is_prompt_learning) and not is_prefix(config)


def is_prefix(config: Any) -> bool:
    """Return whether a prompt's config is for a prefix (keys and values), not for tokens."""
    return str(config.peft_type.value) in _PREFIXES


def computes_loss(model: nn.Module) -> bool:
    """Return whether ``model`` is a PEFT model that itself computes a loss from the logits (CPT)."""
    if "peft" not in sys.modules or not isinstance(model, sys.modules["peft"].PeftModel):
        return False
    return str(model.active_peft_config.peft_type.value) == "CPT"


def wrapped_model(model: nn.Module, config: Any, name: str, autocast: bool = True) -> Any:
    """Return PEFT's model around ``model``, in which modules of ``model`` are wrapped. Adapter weights stay on the meta
    device, without initial values. With ``autocast``, adapters of 16-bit weights have 32 bits; otherwise adapters have
    the dtype of the weights.
    """
    # Not peft.get_peft_model, which scripts may replace by hfscale's function.
    from peft.mapping_func import get_peft_model

    from .peft_shared import fixed_values_stay

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), fixed_values_stay(config):
        # PEFT 0.21 reads a name that transformers 5.23 deprecates.
        warnings.filterwarnings(
            "ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning
        )
        made: Any = get_peft_model(
            model,  # type: ignore[arg-type]
            config,
            adapter_name=name,
            autocast_adapter_dtype=autocast,
            low_cpu_mem_usage=True,
        )
    _tie_copies(made, config, name)
    return made


def _tie_copies(peft_model: Any, config: Any, name: str) -> None:
    """Tie the adapter's trained copies of ``modules_to_tie`` to its trained copy of the embedding. PEFT 0.21 does not
    tie copies that are made on the meta device.
    """
    stock = adapted_model(peft_model)
    for path in getattr(config, "modules_to_tie", None) or ():
        embedding: Any = stock.get_input_embeddings()
        tied: Any = stock.get_submodule(path)
        tied.modules_to_save[name].weight = embedding.modules_to_save[name].weight


def add_adapter(peft_model: Any, config: Any, name: str, autocast: bool = True) -> None:
    """Add an inactive and frozen adapter to a PEFT model; its weights are created as in :func:`wrapped_model`."""
    with torch.random.fork_rng(devices=[]):
        type(peft_model).add_adapter(
            peft_model,
            name,
            config,
            autocast_adapter_dtype=autocast,
            low_cpu_mem_usage=True,
        )
    _tie_copies(peft_model, config, name)


def delete_adapter(peft_model: Any, name: str) -> None:
    """Delete an adapter from a PEFT model by PEFT's own ``delete_adapter``, even if hfscale has replaced this method of
    the model.
    """
    base = peft_model.base_model
    with attribute_replaced(base, "delete_adapter", partial(type(base).delete_adapter, base)):
        type(peft_model).delete_adapter(peft_model, name)


def set_adapters(peft_model: Any, names: Any, *args: Any, **kwargs: Any) -> None:
    """Activate adapters of a PEFT model by PEFT's own ``set_adapter``, even if hfscale has replaced this method of the
    model.
    """
    base = peft_model.base_model
    type(base).set_adapter(base, names, *args, **kwargs)


def is_feedforward(config: Any, name: str) -> bool:
    """Return whether IA3 scales the input of the module ``name``, not its output. The config's ``feedforward_modules``
    is a regular expression for the names of such modules, or a list of endings of their names.
    """
    told = config.feedforward_modules
    if isinstance(told, str):
        return re.fullmatch(told, name) is not None
    return any(name.endswith(end) for end in told)


def ask_before_state_dicts(ask: Callable[[Any], None]) -> None:
    """Call ``ask(model)``, which may raise, in every later call of ``get_peft_model_state_dict``, even where the
    function was imported before.
    """
    from peft.utils import save_and_load

    def check(model: Any) -> tuple[Any, ...]:
        ask(model)
        return (model,)

    check_first(save_and_load, "_get_tp_info", check)


def adds_to_lookup(embedding: nn.Module) -> bool:
    """Return whether ``embedding`` is a wrapper that looks up rows of its first LoRA factor."""
    return hasattr(embedding, "_embed")


def look_up_by(embedding: nn.Module, look_up: Callable[..., Tensor]) -> None:
    """Let a wrapped embedding (see :func:`adds_to_lookup`) look up rows of its first LoRA factor by ``look_up``."""
    embedding._embed = look_up  # type: ignore[assignment]


def adapted_experts(wrapper: Any) -> tuple[str | None, int]:
    """Return the name of the experts' parameter to which ``wrapper`` adds an adapter, and the number of experts. Return
    ``None`` and 0 for a wrapper that adapts a whole module.
    """
    name = getattr(wrapper, "parameter_name", None)
    return name, 0 if name is None else int(getattr(wrapper, "num_experts", 0))


def terms_of_experts(experts: Any) -> Iterator[tuple[str, Tensor, Tensor, int, float]]:
    """Yield, for each active adapter on ``experts``: parameter name, ``A``, ``B``, number of experts, scale."""
    while hasattr(experts, "parameter_name"):  # nested wrappers, one for each parameter
        active = [] if experts.disable_adapters else experts.active_adapters
        for adapter in (name for name in active if name in experts.lora_A):
            a = experts.lora_A[adapter].weight
            b = experts.lora_B[adapter].weight
            yield experts.parameter_name, a, b, experts.num_experts, experts.scaling[adapter]
        experts = experts.base_layer


@cache
def _lora_projections() -> tuple[type, ...]:
    """Return the wrapper classes that add plain LoRA to a projection; those for bitsandbytes' projections only if PEFT
    has imported them.
    """
    from peft.tuners.lora import layer

    over_bytes = sys.modules.get("peft.tuners.lora.bnb")
    kinds = [getattr(over_bytes, name, None) for name in ("Linear4bit", "Linear8bitLt")]
    return (layer.Linear, *(kind for kind in kinds if kind is not None))


def adds_lora(wrapper: nn.Module) -> bool:
    """Return whether ``wrapper`` is of a class that adds LoRA to a projection's output."""
    return type(wrapper) in _lora_projections()


def active_lora(wrapper: Any) -> tuple[nn.Module, nn.Module, float] | str:
    """Return the modules of both factors and the scale, if a wrapper (see :func:`adds_lora`) computes exactly one plain
    LoRA product at present. Otherwise return a phrase that tells why it does not.
    """
    held = vars(
        wrapper
    )  # this runs in every pass of every wrapper, and reading attributes of modules one by one is slow
    if wrapper.disable_adapters or held["merged_adapters"]:
        return "merged or switched off"
    inside: Any = own_modules(wrapper)
    first: Any = own_modules(inside[LORA_A])
    active = [name for name in wrapper.active_adapters if name in first]
    if len(active) != 1:
        return "several adapters at once, or none"
    name = active[0]
    variants = held["lora_variant"]
    if variants and name in variants:
        return f"computed by {type(variants[name]).__name__}"
    dropout: Any = own_modules(inside[DROPOUTS])[name]
    kind = type(dropout)
    drops = kind is nn.Dropout and wrapper.training and dropout.p > 0
    if drops or kind not in (nn.Identity, nn.Dropout) or not held["cast_input_dtype_enabled"]:
        return "with dropout, or without the cast of its input"
    second: Any = own_modules(inside[LORA_B])
    return first[name], second[name], held["scaling"][name]


def note_casts(wrapper: Any, note: Callable[[Tensor, Tensor], None]) -> None:
    """Call ``note(input, copy)`` whenever a wrapper casts its input for its adapters."""
    stock = wrapper._cast_input_dtype

    def cast(x: Any, dtype: Any) -> Any:
        converted = stock(x, dtype)
        if converted is not x:
            note(x, converted)
        return converted

    wrapper._cast_input_dtype = cast


def modules_in(wrapper: nn.Module, attribute: str) -> list[nn.Module]:
    """Return a wrapper's modules in an attribute such as :data:`LORA_A`, one per adapter; empty without
    that attribute.
    """
    return list(getattr(wrapper, attribute, nn.ModuleDict()).values())


def tokens_of(wrapper: Any, name: str) -> tuple[int, ...]:
    """Return the tokens whose rows the adapter ``name`` replaces, in the order of the rows; empty for wrappers that
    replace no rows.
    """
    by_adapter = getattr(wrapper, "token_indices", None) or {}
    return tuple(by_adapter.get(name, ()))


def wrap_tokens(
    model: nn.Module, adapter: str, path: str, tokens: Sequence[int], tied: str | None
) -> None:
    """Wrap the module at ``path`` so that trained rows replace its rows of ``tokens``. ``adapter`` is the full name of
    the parameter with the trained rows, and ``tied`` the path of a wrapped module that shares them.
    """
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.utils.other import TrainableTokensWrapper

    owner, _, child = path.rpartition(".")
    name = adapter.rpartition(".")[2]
    target = model.get_submodule(path)
    shared = None if tied is None else layer_of_tokens(model.get_submodule(tied))
    given: dict[str, Any] = {"token_indices": list(tokens), "tied_adapter": shared}
    made: Any
    if f".{TOKEN_LAYER}." in adapter:  # in addition to other adapters
        made = TrainableTokensWrapper(target, name, **given)
    else:
        made = TrainableTokensLayer(target, name, **given)
        made.update_layer(name, **given)
    made.set_adapter(name)
    setattr(model.get_submodule(owner), child, made)


def layer_of_tokens(wrapper: nn.Module) -> Any:
    """Return the wrapper that replaces rows of tokens by trained rows: the wrapper inside of ``wrapper`` that does so,
    or ``wrapper`` itself if there is none inside.
    """
    return own_modules(wrapper).get(TOKEN_LAYER, wrapper)


def put_original_rows(layer: Any, name: str, rows: Tensor) -> None:
    """Set the original rows that a wrapper of token rows restores when its trained rows are unmerged."""
    layer.trainable_tokens_original[name] = rows


def replaces_rows(layer: Any) -> bool:
    """Return whether a wrapper with trained rows for some tokens uses them: an adapter is active, adapters are not
    disabled, and the rows are not merged into the weight.
    """
    return bool(layer.active_adapters) and not layer.disable_adapters and not layer.merged


def merge_rows_by(layer: Any, merged: Callable[[], Tensor]) -> None:
    """Let a wrapper with trained rows for some tokens compute with the weight that ``merged()`` returns, instead of the
    weight into which PEFT writes these rows.
    """
    layer.get_merged_weights = lambda active_adapters: merged()
