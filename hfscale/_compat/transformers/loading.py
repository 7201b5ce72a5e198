"""Hook into transformers' ``from_pretrained`` and initialization of modules, and use its mark of loaded tensors."""

import copy
import inspect
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial, wraps
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    initialization as host_init,
)
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import GENERATION_CONFIG_NAME, logging

from ...config.environment import local_rank, without_launcher_switches
from ...errors import CheckpointError
from ..replaced import attribute_replaced
from ..torch import own_buffers
from .classes import empty_copy

_LOADED = "_is_hf_initialized"
_READ = (".safetensors", ".bin")
FILE = "gguf_file"
"""Argument of ``from_pretrained`` that names a single file with config, tokenizer and weights."""
HUB_ARGUMENTS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "token",
    "revision",
    "subfolder",
    "trust_remote_code",
)
"""Arguments of ``from_pretrained`` that tell where the files are, and whether their code may run."""


@contextmanager
def loading_through(
    prepare: Callable[
        [
            Any,
            list[Any],
            list[str],
            Any,
        ],
        dict[str, Any],
    ],
    name_of_tie: Callable[[str], str | None],
    initialize: Callable[[Any], None],
    sourced: bool = False,
) -> Iterator[dict[str, Any]]:
    """Let hfscale prepare each model that ``from_pretrained`` builds inside the ``with`` block, and choose the state
    dict from which it is loaded.

    ``prepare(model, weight_mapping, files, quantizer)`` is called with the new meta model before weights are read. It
    may change the model's shapes and remove modules, and returns the state dict. With ``sourced``, ``prepare`` itself
    knows where the weights are, and gets no files. ``name_of_tie(name)`` returns the name of a parameter in the
    prepared model, or ``None`` if it was removed: two parameters are tied only if the model has both. After the weights
    are read, ``initialize(model)`` runs instead of transformers' initialization.

    The yielded dict receives the missing and mismatched keys that transformers reports.
    """
    report: dict[str, Any] = {}
    original = PreTrainedModel.__dict__["_load_pretrained_model"]

    def load(
        model: Any, state_dict: Any, files: Any, load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        read = bool(files) and str(files[0]).endswith(_READ)
        if not sourced and (state_dict is not None or not read):
            raise CheckpointError(
                "hfscale loads weights from safetensors files or pytorch_model.bin, but "
                f"{load_config.pretrained_model_name_or_path!r} has {Path(files[0]).name if files else 'none'}: "
                "convert the checkpoint once with AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
            )
        quantizer = load_config.hf_quantizer
        shown = prepare(model, load_config.weight_mapping or [], files or [], quantizer)
        report["model"], report["ties"] = model, model.all_tied_weights_keys
        named = {
            name: (name_of_tie(name), name_of_tie(first)) for name, first in report["ties"].items()
        }
        model.all_tied_weights_keys = {
            name: first
            for name, (here, first) in named.items()
            if here == name and first not in (None, name)
        }
        model.initialize_weights = lambda: initialize(model)
        info, index = original.__func__(model, shown, None, load_config, *args, **kwargs)
        report["missing"] = set(info.missing_keys)
        report["mismatched"] = list(info.mismatched_keys)
        return info, index

    # One progress bar per machine is enough.
    quiet = local_rank() > 0 and logging.is_progress_bar_enabled()
    if quiet:
        logging.disable_progress_bar()
    try:
        replaced = attribute_replaced(PreTrainedModel, "_load_pretrained_model", staticmethod(load))
        with replaced, without_launcher_switches():
            yield report
    finally:
        if quiet:
            logging.enable_progress_bar()
        if "model" in report:
            report["model"].all_tied_weights_keys = report["ties"]
            del report["model"].initialize_weights


def from_no_path(kind: Any, directory: Path, kwargs: dict[str, Any]) -> Any:
    """Run ``from_pretrained`` of the model class ``kind`` with the config ``kwargs["config"]`` and without a path,
    because the caller's hooks load the weights. Set the model's ``name_or_path`` to ``directory``, and read its
    generation config from ``directory`` if one is stored.
    """
    config = copy.deepcopy(kwargs.pop("config"))
    kwargs = {name: value for name, value in kwargs.items() if name not in HUB_ARGUMENTS}
    # The empty state dict tells transformers not to search for weights.
    model = kind.from_pretrained(None, config=config, state_dict={}, **kwargs)
    model.name_or_path = model.config.name_or_path = str(directory)
    if (directory / GENERATION_CONFIG_NAME).exists() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model


@cache
def loading_arguments() -> frozenset[str]:
    """Return the arguments of ``from_pretrained`` and ``from_config`` that are no config fields, found in
    their source.
    """
    names = set[str]()
    takers = (PreTrainedModel, AutoModelForCausalLM)
    for taker, name in product(takers, ("from_pretrained", "from_config", "_from_config")):
        if (method := getattr(taker, name, None)) is not None:
            source = inspect.getsource(method)
            names.update(re.findall(r'kwargs\.(?:pop|get)\(\s*"(\w+)"', source))
            names.update(re.findall(r'"(\w+)" in kwargs', source))
            names.update(
                re.findall(r'"(\w+)"', "".join(re.findall(r"for name in \[(.*?)\]", source)))
            )
            names.update(inspect.signature(method).parameters)
    return frozenset(names)


def quantizes(model: Any, config: Any) -> Callable[[str], bool]:
    """Return a predicate for module names: whether transformers' bitsandbytes quantizer quantizes them with
    ``config``.
    """
    kept = HfQuantizer.get_modules_to_not_convert(
        model, config.llm_int8_skip_modules, model._keep_in_fp32_modules
    )
    return lambda name: bool(should_convert_module(name, kept))


def forget_quantization(model: Any) -> None:
    """Remove transformers' marks of quantization from a model that is no longer quantized."""
    for name in (
        "hf_quantizer",
        "quantization_method",
        "is_loaded_in_4bit",
        "is_loaded_in_8bit",
        "is_quantized",
    ):
        model.__dict__.pop(name, None)
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config.__dict__.pop("quantization_config", None)


def initialize_weights(model: Any, unit: nn.Module, recurse: bool) -> None:
    """Initialize ``unit``, a module of ``model`` in real memory, as transformers would within the full model."""
    owner = model
    for module in model.modules():  # the innermost model that contains the unit
        if isinstance(module, PreTrainedModel) and any(part is unit for part in module.modules()):
            owner = module
    with torch.no_grad():
        if not recurse:
            owner._initialize_weights(unit)
            return
        for _, module, its_owner in _children_first(unit, "", owner):
            its_owner._initialize_weights(module)


def initializations(model: Any) -> Iterator[tuple[str, nn.Module, Callable[[], None]]]:
    """Yield (name, module, initializer) in transformers' order; initializers leave loaded tensors unchanged."""
    custom = model.is_custom_code()

    def initialize(module: nn.Module, owner: Any) -> None:
        with torch.no_grad(), host_init.guard_torch_init_functions():
            owner._initialize_weights(module, custom)

    for name, module, owner in _children_first(model, "", model):
        yield name, module, partial(initialize, module, owner)


def _children_first(
    module: nn.Module, name: str, owner: Any
) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield ``(name, module, model)`` for every module, children before parents; ``model`` is the innermost model that
    contains the module.
    """
    owner = module if isinstance(module, PreTrainedModel) else owner
    for key, child in module.named_children():
        yield from _children_first(child, f"{name}.{key}" if name else key, owner)
    yield name, module, owner


def construct(model: Any, kinds: Collection[type[nn.Module]]) -> Any:
    """Build a copy of ``model`` on the meta device in which only the modules of the classes ``kinds`` have real
    tensors. The real tensors get the values that the constructors set, and then those of transformers' initialization
    (of these modules and of the modules around them). A tensor that neither sets is NaN.
    """
    with ExitStack() as stack:
        stack.enter_context(attribute_replaced(PreTrainedModel, "init_weights", lambda _: None))
        for kind in kinds:
            stack.enter_context(
                attribute_replaced(kind, "__init__", _over_memory(kind.__init__, kinds))
            )
        made = empty_copy(model)
    for module in made.modules():
        for name, buffer in own_buffers(module).items() if type(module) in kinds else ():
            if buffer is not None and buffer.is_meta:  # set by the module around this one
                own_buffers(module)[name] = torch.full_like(buffer, torch.nan, device="cpu")
    initialize_weights(made, made, recurse=True)
    return made


def _over_memory(
    constructor: Callable[..., None], kinds: Collection[type[nn.Module]]
) -> Callable[..., None]:
    @wraps(constructor)
    def construct_really(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        with torch.device("cpu"):
            constructor(module, *args, **kwargs)
        for inner in module.modules():
            if type(inner) not in kinds:
                inner.to_empty(device="meta", recurse=False)

    return construct_really


def is_loaded(tensor: Tensor) -> bool:
    """Return whether transformers has marked a parameter or buffer as loaded."""
    return bool(getattr(tensor, _LOADED, False))


def mark_loaded(tensor: Tensor) -> None:
    """Mark a parameter or buffer as loaded, like transformers does."""
    setattr(tensor, _LOADED, True)
