"""Stock classes and the models built from them; errors about configs and models in hfscale's words."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from difflib import get_close_matches
from functools import lru_cache
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...errors import ConfigError, HFScaleError
from ..replaced import attribute_replaced
from .added_layers import added_layers
from .implementations import name_hosts


def stock_class(model: nn.Module) -> Any:
    """Return the stock class of a model, which FSDP2 replaces by a class derived from it."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def class_name(model: nn.Module) -> str:
    """Return the name of a model's stock class, the name that users know."""
    return str(stock_class(model).__name__)


def from_config(kind: Any, config: Any, **kwargs: Any) -> Any:
    """Build a randomly initialized model of ``kind``, an Auto class or a stock model class."""
    build = kind.from_config if hasattr(kind, "from_config") else kind._from_config
    return build(config, **kwargs)


def model_class(given: Any) -> Any:
    """Return the class for ``auto_class=``, which is an Auto class, a model class, or the name of one in
    transformers.
    """
    chosen = getattr(transformers, given, None) if isinstance(given, str) else given
    if (
        isinstance(chosen, type)
        and hasattr(chosen, "from_pretrained")
        and (hasattr(chosen, "from_config") or issubclass(chosen, nn.Module))
    ):
        return chosen
    names = [name for name in dir(transformers) if name.startswith("AutoModel") or "For" in name]
    close = get_close_matches(str(given), names, n=3) or ["AutoModelForCausalLM"]
    raise ConfigError(
        f"auto_class must be one of transformers' Auto classes, a model's class, or the name of one, got {given!r}: "
        f"did you mean {' or '.join(close)}?"
    )


def classes_by_config(auto_class: Any) -> Any:
    """Return the map of config classes to the model classes that ``auto_class`` builds; ``None`` for a model class."""
    return getattr(auto_class, "_model_mapping", None)


def layer_classes(model: Any) -> set[str]:
    """Return the names of the model's layer classes, which transformers never splits over devices (``model`` may be a
    class).
    """
    return set(getattr(model, "_no_split_modules", None) or ())


def is_adapted_by_host(model: Any) -> bool:
    """Return whether adapters were added to a model by transformers' own ``add_adapter`` or ``load_adapter``; the
    model's ``save_pretrained`` then saves these adapters.
    """
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def empty_copy(model: Any) -> Any:
    """Return the full stock model, on the meta device, of which ``model`` holds one rank's shards."""
    config = copy.deepcopy(model.config)
    name_hosts(config)
    with torch.device("meta"):
        made = from_config(stock_class(model), config, dtype=model.dtype)
    added = added_layers(model)
    if added is not None:
        added.add(made)
    return made


def empty_model(directory: Path, trusted: bool) -> Any:
    """Return a full meta model of the class that the config in ``directory`` names; raise LookupError if it
    names none.
    """
    return model_of(AutoConfig.from_pretrained(directory, trust_remote_code=trusted), trusted)


def model_of(config: Any, trusted: bool = False) -> Any:
    """Return a full meta model of the class that a config names; raise LookupError if the class does not exist."""
    name = (config.architectures or [""])[0]
    kind = getattr(transformers, name, None)
    extra = dict[str, Any]()
    if kind is None:
        auto = [
            auto
            for auto, path in (getattr(config, "auto_map", None) or {}).items()
            if path.endswith(f".{name}")
        ]
        if not auto:
            raise LookupError(
                f"transformers has no class {name!r}, which the config names in architectures"
            )
        kind = getattr(transformers, auto[0])
        extra = {"trust_remote_code": trusted}
    with torch.device("meta"):
        return from_config(kind, config, **extra)


def is_distributed_by_host(model: nn.Module, spread: bool) -> str | None:
    """Return why ``model`` is already distributed; ``None`` if it is not. ``spread``: whether the model will run on
    several processes.
    """
    if isinstance(model, PreTrainedModel) and model.tp_size is not None:
        return "transformers already distributed it (distributed_config or tp_plan)"
    placed = set((getattr(model, "hf_device_map", None) or {}).values())
    # Scripts use a device map with a single device to load onto that device; the model is then not distributed.
    if placed and (spread or len(placed) > 1 or "disk" in placed):
        return "it was loaded with a device_map"
    return None


def has_causal_loss(model: Any) -> bool:
    """Return whether a model's loss function is that of causal language models, whatever the class's name is."""
    return (
        LOSS_MAPPING.get(getattr(model, "loss_type", None) or "ForCausalLM")
        is LOSS_MAPPING["ForCausalLM"]
    )


def loss_replaced(model: Any, loss: Callable[..., Any]) -> AbstractContextManager[None]:
    """Let the model call ``loss`` as its loss function inside the ``with`` block."""
    return attribute_replaced(model, "_loss_function", loss)


def loss_function_of(model: Any) -> Any:
    """Return the loss function that the user set as ``model.loss_function``; ``None`` if the config decides."""
    return vars(model).get("_loss_function")


def is_causal_lm(name: str) -> bool:
    """Return whether transformers lists a class as a causal language model, for which its Trainer shifts labels."""
    return name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def takes_argument(model: nn.Module, name: str) -> bool:
    """Return whether a model's forward has a parameter of that name."""
    return name in forward_arguments(stock_class(model).forward)[0]


@lru_cache(maxsize=64)
def forward_arguments(forward: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """Return the argument names of a class's forward pass, and whether it also takes other named arguments."""
    parameters = signature(forward).parameters.values()
    named = frozenset(
        parameter.name for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD
    )
    return named, len(named) < len(parameters)


def input_embedding(model: Any) -> Any:
    """Return the token embedding; ``None`` if transformers has no token embedding for the model (two towers, audio)."""
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None


@contextmanager
def made_or_explained(source: str) -> Iterator[None]:
    """Raise ConfigError with the reason if a config of ``source`` cannot be made inside the ``with`` block."""
    try:
        yield
    except ArithmeticError as error:  # division by a size of 0
        raise ConfigError(
            f"no config could be made of {source}, because one of its sizes is 0 ({error}): set every size to at least "
            "1"
        ) from error
    except StrictDataclassError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        kind, _, words = reason.partition(": ")
        raise ConfigError(
            f"{source} is invalid: {words if kind.endswith('Error') else reason}: correct this field of the config"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"no config could be read from {source}, which must have a valid config.json or be a Hub id: {reason}"
        ) from error


@contextmanager
def built_or_explained(auto_class: Any, config: Any, *others: type[Exception]) -> Iterator[None]:
    """Raise ConfigError, with the reason, if building a model inside the ``with`` block raises ValueError or one of the
    exceptions ``others``. If ``auto_class`` does not support the config, the error names the Auto classes that do.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, HFScaleError) or not isinstance(error, (ValueError, *others)):
            raise
        reason = str(error).strip().partition("\n")[0]
        if not reason.startswith("Unrecognized configuration class"):
            raise ConfigError(
                f"no {config.model_type!r} model can be built from this config and these arguments: "
                f"{type(error).__name__}: {reason}: correct the field or the argument that causes this error"
            ) from error
        built = {
            name: classes_by_config(getattr(transformers, name)) or () for name in auto_classes()
        }
        fitting = [name for name, kinds in built.items() if type(config) in kinds]
        use = f"the Auto class {', '.join(fitting)}" if fitting else "another Auto class"
        kind = getattr(auto_class, "__name__", auto_class)
        raise ConfigError(
            f"{kind} cannot build a {config.model_type!r} model: use {use}"
        ) from error


def auto_classes() -> list[str]:
    """Return the names of transformers' Auto classes of models."""
    return [name for name in dir(transformers) if name.startswith("AutoModel")]
