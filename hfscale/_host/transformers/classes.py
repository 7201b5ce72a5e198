"""Stock classes and whole models of them."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...errors import ConfigError
from ..replaced import attribute_replaced


def stock_class(model: nn.Module) -> Any:
    """The stock class of a model; FSDP2 gives it one of its own, derived from that."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def class_name(model: nn.Module) -> str:
    """The name of its stock class, which is what users know it by."""
    return str(stock_class(model).__name__)


def from_config(kind: Any, config: Any, **kwargs: Any) -> Any:
    """A model of ``kind``, an Auto class or a stock one, with first values."""
    build = kind.from_config if hasattr(kind, "from_config") else kind._from_config
    return build(config, **kwargs)


def model_class(given: Any) -> Any:
    """Return the class that ``auto_class=`` means: an Auto class or a model's, or the name of one of transformers'.

    Raises:
        ConfigError: it is neither; close names are given.
    """
    found = getattr(transformers, given, None) if isinstance(given, str) else given
    if (
        isinstance(found, type)
        and hasattr(found, "from_pretrained")
        and (hasattr(found, "from_config") or issubclass(found, nn.Module))
    ):
        return found
    names = [name for name in dir(transformers) if name.startswith("AutoModel") or "For" in name]
    close = get_close_matches(str(given), names, n=3) or ["AutoModelForCausalLM"]
    raise ConfigError(
        f"auto_class must be one of transformers' Auto classes, a model's class, or the name of one, got {given!r}: "
        f"did you mean {' or '.join(close)}?"
    )


def classes_by_config(auto_class: Any) -> Any:
    """Class of config -> the class, or classes, that ``auto_class`` builds of it; ``None`` for a stock class."""
    return getattr(auto_class, "_model_mapping", None)


def layer_classes(model: Any) -> set[str]:
    """Names of the classes that the host keeps on one device; ``model`` or its class."""
    return set(getattr(model, "_no_split_modules", None) or ())


def empty_copy(model: Any) -> Any:
    """A whole model like the one that ``model`` is a part of, on the meta device."""
    with torch.device("meta"):
        return from_config(stock_class(model), copy.deepcopy(model.config), dtype=model.dtype)


def empty_model(directory: Path, trusted: bool) -> Any:
    """A whole model on the meta device, of the class that the config in ``directory`` names.

    Raises:
        LookupError: transformers has no such class, and no code came with the config.
    """
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trusted)
    name = (config.architectures or [""])[0]
    kind, extra = getattr(transformers, name, None), dict[str, Any]()
    if kind is None:
        auto = [auto for auto, path in (getattr(config, "auto_map", None) or {}).items() if path.endswith(f".{name}")]
        if not auto:
            raise LookupError(f"transformers has no class {name!r}")
        kind, extra = getattr(transformers, auto[0]), {"trust_remote_code": trusted}
    with torch.device("meta"):
        return from_config(kind, config, **extra)


def is_distributed_by_host(model: nn.Module) -> str | None:
    """Why ``model`` cannot be parallelized any more, or ``None``."""
    if getattr(model, "_device_mesh", None) is not None or getattr(
        model, "_is_distributed_loading_by_transformers", False
    ):
        return "transformers already distributed it (distributed_config or tp_plan)"
    if getattr(model, "hf_device_map", None):
        return "it was loaded with a device_map"
    return None


def is_host_model(module: nn.Module) -> bool:
    """Whether a module is a model of the host's, with a config of its own."""
    return isinstance(module, PreTrainedModel)


def has_causal_loss(model: Any) -> bool:
    """Whether the loss function of a model's class is that of causal language models, whatever its name."""
    return LOSS_MAPPING.get(getattr(model, "loss_type", None) or "ForCausalLM") is LOSS_MAPPING["ForCausalLM"]


def loss_replaced(model: Any, loss: Callable[..., Any]) -> AbstractContextManager[None]:
    """Within: the model calls ``loss`` for its loss."""
    return attribute_replaced(model, "_loss_function", loss)


def loss_function_of(model: Any) -> Any:
    """What was set as ``model.loss_function``; ``None`` where the class chooses by its config."""
    return vars(model).get("_loss_function")


def is_causal_lm(name: str) -> bool:
    """Whether the host knows a class of that name as a causal language model; its Trainer then shifts labels."""
    return name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def takes_argument(model: nn.Module, name: str) -> bool:
    """Whether the forward pass of a model has a parameter of that name."""
    return name in signature(stock_class(model).forward).parameters


def input_embedding(model: Any) -> Any:
    """What the model looks its tokens up in, where the host can say: one with two towers, or of sounds, cannot."""
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None
