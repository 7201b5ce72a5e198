"""The one file that touches private names of transformers, but for :mod:`hfscale._host_init`.

Read and run against transformers 5.17.0 and 5.23.0.
"""

import copy
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, masking_utils
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.dynamic_module_utils import custom_object_save
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import logging

from .config import local_rank, without_launcher_switches
from .errors import CheckpointError


@contextmanager
def loading_through(
    prepare: Callable[[Any, list[Any], list[str], Any], dict[str, Any]],
    present: Callable[[str], bool],
    initialize: Callable[[Any], None],
) -> Iterator[dict[str, Any]]:
    """Within: ``from_pretrained`` shows every freshly built meta model to ``prepare`` before it reads weights.

    ``prepare(model, weight_mapping, files, quantizer)`` may change the model's shapes and take modules out, and returns
    the state dict to load from. What the host reports as missing and mismatched is left in the yielded dict.

    Args:
        present: whether a parameter is still there, by name; the host ties only what is.
        initialize: takes the place of the host's initialization of a model whose weights have been read.
    """
    report: dict[str, Any] = {}
    original = PreTrainedModel.__dict__["_load_pretrained_model"]

    def load(model: Any, state_dict: Any, files: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
        if state_dict is not None or not files or not str(files[0]).endswith(".safetensors"):
            raise CheckpointError(
                f"hfscale loads safetensors checkpoints, and {load_config.pretrained_model_name_or_path!r} has "
                f"{Path(files[0]).name if files else 'none'}: convert it once with "
                "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
            )
        shown = prepare(model, load_config.weight_mapping or [], files, load_config.hf_quantizer)
        report["model"], report["ties"] = model, model.all_tied_weights_keys
        model.all_tied_weights_keys = {a: b for a, b in report["ties"].items() if present(a) and present(b)}
        model.initialize_weights = lambda: initialize(model)
        info, index = original.__func__(model, shown, None, load_config, *args, **kwargs)
        report["missing"] = set(info.missing_keys)
        report["mismatched"] = list(info.mismatched_keys)
        return info, index

    host: Any = PreTrainedModel
    host._load_pretrained_model = staticmethod(load)
    # One progress bar per machine is enough.
    quiet = local_rank() > 0 and logging.is_progress_bar_enabled()
    if quiet:
        logging.disable_progress_bar()
    try:
        with without_launcher_switches():
            yield report
    finally:
        if quiet:
            logging.enable_progress_bar()
        host._load_pretrained_model = original
        if "model" in report:
            report["model"].all_tied_weights_keys = report["ties"]
            del report["model"].initialize_weights


@dataclass(frozen=True)
class Merge:
    """How a converter lays stored tensors side by side, and does nothing else to them.

    Tensors come in the host's order: by source, then by the numbers in their names (``experts.9`` before
    ``experts.10``).

    Attributes:
        source: which of the converter's sources this tensor is: a gate projection, say, before an up projection.
        stack: the new dim along which the tensors of one source are stacked; ``None``: they are not.
        join: the dim along which what comes of each source is then joined; ``None`` for one source.
    """

    source: int
    stack: int | None
    join: int | None


@dataclass(frozen=True)
class Destination:
    """Where a stored tensor goes.

    Attributes:
        name: the parameter or buffer it loads into; the first, where a converter makes several of it.
        converter: what the host does to it; ``None`` where it loads as it is.
        pattern: which of the converter's sources its key matched.
        others: what else the converter makes of it.
        merge: what the converter does, if it does not change values or their order.
    """

    name: str
    converter: WeightConverter | None = None
    pattern: str = ""
    others: tuple[str, ...] = ()
    merge: Merge | None = None


def checkpoint_targets(model: Any, keys: list[str], weight_mapping: list[Any]) -> dict[str, Destination]:
    """Stored key -> where it goes, in the host's order.

    Entries of ``weight_mapping`` that these keys use are marked as used: the host saves through those, and a rank that
    loads but its stage's keys has to save every stage's.
    """
    copies = copy.deepcopy(weight_mapping)  # matching leaves other marks too
    result = _destinations(keys, copies, model.base_model_prefix, model.state_dict())
    for entry, copied in zip(weight_mapping, copies, strict=True):
        entry._was_used = entry.was_used() or copied.was_used()
    return result


def loaded_targets(model: Any, keys: list[str], names: Collection[str]) -> dict[str, Destination]:
    """Where the keys of the checkpoint that ``model`` was loaded from, or was saved to, belong.

    Args:
        names: of the parameters of the whole model, of which there may be but a stage here.
    """
    used = getattr(model, "_weight_conversions", None)  # what loading noted for saving
    used = copy.deepcopy(get_model_conversion_mapping(model, add_legacy=False) if used is None else used)
    return _destinations(keys, used, model.base_model_prefix, dict.fromkeys(names, True))


def _destinations(
    keys: list[str], weight_mapping: list[Any], prefix: str, expected: dict[str, Any]
) -> dict[str, Destination]:
    renamings = [entry for entry in weight_mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in weight_mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    result = {}
    for key in sorted(keys, key=dot_natural_key):  # the host's order, which some entries depend on
        target, pattern = rename_source_key(key, renamings, converters, prefix, expected)
        if target not in expected and key in expected:
            target, pattern = rename_source_key(key, [], [], prefix, expected)
        if pattern is None:
            result[key] = Destination(target)
            continue
        converter = by_pattern[pattern]
        first, *rest = converter.target_patterns
        others = tuple(target.replace(first, other) for other in rest)
        result[key] = Destination(target, converter, pattern, others, _merge(converter, pattern))
    return result


def _merge(converter: WeightConverter, pattern: str) -> Merge | None:
    kinds = [type(operation) for operation in converter.operations]
    dims = {type(operation): operation.dim for operation in converter.operations if hasattr(operation, "dim")}
    sources = converter.source_patterns
    known = kinds in ([Concatenate], [MergeModulelist, Concatenate]) or (
        kinds == [MergeModulelist] and len(sources) < 2
    )
    if not known or len(converter.target_patterns) > 1 or min(dims.values()) < 0:
        return None
    return Merge(sources.index(pattern), dims.get(MergeModulelist), dims.get(Concatenate))


def assemble(tensors: Mapping[str, Tensor], found: Mapping[str, Destination], like: Any, config: Any) -> Tensor:
    """One parameter as the host makes it of all that is stored of it.

    Args:
        tensors: whole, by stored key, in the host's order.
        found: where those keys go.
        like: a stand-in for the model: ``like.get_parameter(name)`` has the shape that a converter may ask for.
        config: the model's.
    """
    first = found[next(iter(tensors))]
    if first.converter is None:
        return next(iter(tensors.values()))
    converter: Any = copy.deepcopy(first.converter)
    for key, tensor in tensors.items():
        converter.add_tensor(first.name, key, found[key].pattern, tensor)
    result = converter.convert(first.name, model=like, config=config)[first.name]
    return result[0] if isinstance(result, list) else result


def as_stored(model: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """One parameter as a plain Hugging Face checkpoint of this model holds it: under its stored name, or as the several
    tensors that the host fuses on load. Works on the meta device too.
    """
    reverted: dict[str, Tensor] = revert_weight_conversion(model, {name: tensor})
    return reverted


def _note_conversions(model: Any) -> None:
    """What loading notes for saving, where nothing was loaded: the host would look it up under the name of the class,
    and FSDP2 gives the model a class of another name.
    """
    if getattr(model, "_weight_conversions", None) is None and type(model) is not stock_class(model):
        found = get_model_conversion_mapping(empty_copy(model), add_legacy=False)
        # A prefix is known from loading only, as in the host's own `revert_weight_conversion`.
        model._weight_conversions = [entry for entry in found if type(entry).__name__ != "PrefixChange"] or None


def never_stored(model: Any) -> set[str]:
    """Names of tensors that the host's ``save_pretrained`` leaves out, since it makes them itself."""
    return set(getattr(model, "_keys_to_ignore_on_save", None) or ())


def stored_layout(model: Any, contents: dict[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of a plain checkpoint of this model, on the meta device; ``contents`` are the model's own.

    Raises:
        CheckpointError: the host stores several parameters as one, which cannot be written one at a time.
    """
    _note_conversions(model)
    together: dict[str, Tensor] = revert_weight_conversion(model, contents)
    apart: dict[str, Tensor] = {}
    for name, tensor in contents.items():
        apart.update(as_stored(model, name, tensor))
    if {name: t.shape for name, t in together.items()} != {name: t.shape for name, t in apart.items()}:
        odd = sorted(set(together) ^ set(apart))
        raise CheckpointError(
            f"the host stores several parameters of {class_name(model)} as one ({', '.join(odd[:4])}), which this "
            "version cannot write: save the model with one process"
        )
    return apart


def write_configs(model: Any, directory: Path) -> None:
    """Write ``config.json`` and, for models that generate, ``generation_config.json``, as ``save_pretrained`` would."""
    config = model.config
    config.architectures = [stock_class(model).__name__]
    config.save_pretrained(directory)
    if getattr(model, "_auto_class", None) is not None:  # the code of a class that came with its checkpoint
        custom_object_save(model, directory, config=config)
    if model.can_generate() and getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(directory)


def uses_flash_attention(model: Any) -> bool:
    """Whether attention is a flash kernel's, of whatever version or origin, which is told of borders by lengths."""
    config = model.config.get_text_config()
    return "flash" in str(getattr(config, "_attn_implementation", None))


def runs_grouped_products(experts: Any) -> bool:
    """Whether the host's module of experts calls torch's grouped matrix product."""
    return getattr(getattr(experts, "config", None), "_experts_implementation", None) == "grouped_mm"


@contextmanager
def packing(restarts: bool | None, given: bool) -> Iterator[None]:
    """Within: the host is told whether positions restart within rows, instead of asking the device in every pass.

    Args:
        restarts: ``None``: it is to ask.
        given: whether positions are the caller's. The host's own, which are alike in all rows, do not restart; of any
            others it asks.
    """
    if restarts is None:
        yield
        return
    original = masking_utils.find_packed_sequence_indices

    def known(position_ids: Tensor) -> Tensor | None:
        if not given and len(position_ids) > 1 and position_ids.stride(0):
            return original(position_ids)
        if not restarts:
            return None
        first = position_ids[:, :1] - 1
        return (torch.diff(position_ids, prepend=first, dim=-1) != 1).cumsum(-1)

    masking_utils.find_packed_sequence_indices = known
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


def use_eager_experts(model: nn.Module) -> None:
    """Let mixtures of experts compute by the stock classes' own code, which takes every type: grouped products do not
    take float64. No-op for other models.
    """
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    for config in configs.values():
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = "eager"


# What these record under the name of logits is a softmax of them.
_RECORD_PROBABILITIES = ("Gemma4TextRouter", "DiffusionGemmaTextRouter")


def router_logits(model: nn.Module) -> dict[type[nn.Module], int]:
    """Classes of routers that the host records logits of -> where in a router's output they are.

    Not those whose logits are recorded behind a softmax, nor modules recorded by another mark than their class.
    """
    found: dict[type[nn.Module], int] = {}
    for part in model.modules():
        recorded = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits", ())
        for recorder in recorded if isinstance(recorded, list | tuple) else [recorded]:
            kind = getattr(recorder, "target_class", recorder)
            if isinstance(kind, type) and kind.__name__ not in _RECORD_PROBABILITIES:
                found[kind] = getattr(recorder, "index", 0)
    return found


@cache
def loading_arguments() -> frozenset[str]:
    """Names of what the host's ``from_pretrained`` and ``from_config`` take besides fields of a config.

    They take most of it out of ``**kwargs``, by name.
    """
    names: set[str] = set()
    for taker in (PreTrainedModel, _BaseAutoModelClass):
        for method in (
            taker.from_pretrained,
            getattr(taker, "from_config", None),
            getattr(taker, "_from_config", None),
        ):
            if method is not None:
                source = inspect.getsource(method)
                names.update(re.findall(r'kwargs\.(?:pop|get)\(\s*"(\w+)"', source))
                names.update(re.findall(r'"(\w+)" in kwargs', source))
                names.update(re.findall(r'"(\w+)"', "".join(re.findall(r"for name in \[(.*?)\]", source))))
                names.update(inspect.signature(method).parameters)
    return frozenset(names)


def is_distributed_by_host(model: nn.Module) -> str | None:
    """Why ``model`` cannot be parallelized any more, or ``None``."""
    if getattr(model, "_device_mesh", None) is not None or getattr(
        model, "_is_distributed_loading_by_transformers", False
    ):
        return "transformers already distributed it (distributed_config or tp_plan)"
    if getattr(model, "hf_device_map", None):
        return "it was loaded with a device_map"
    return None


def enable_checkpointing(model: Any, **kwargs: Any) -> None:
    """Recompute activations in the backward pass, layer by layer, without re-entering autograd."""
    # The host renamed it in 5.2x and warns about the old name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, **kwargs})


def quantizes(model: Any, config: Any) -> Callable[[str], bool]:
    """Whether the host's bitsandbytes quantizers would quantize a module of that name, given their ``config``."""
    kept = HfQuantizer.get_modules_to_not_convert(model, config.llm_int8_skip_modules, model._keep_in_fp32_modules)
    return lambda name: bool(should_convert_module(name, kept))


def stock_class(model: nn.Module) -> Any:
    """The stock class of a model; FSDP2 gives it one of its own, derived from that."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def class_name(model: nn.Module) -> str:
    """The name of its stock class, which is what users know it by."""
    return str(stock_class(model).__name__)


def empty_copy(model: Any) -> Any:
    """A whole model like the one that ``model`` is a part of, on the meta device."""
    with torch.device("meta"):
        return stock_class(model)._from_config(copy.deepcopy(model.config), dtype=model.dtype)


def forget_quantization(model: Any) -> None:
    """Let a model whose weights are quantized no more say so."""
    for name in ("hf_quantizer", "quantization_method", "is_loaded_in_4bit", "is_loaded_in_8bit", "is_quantized"):
        model.__dict__.pop(name, None)
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config.__dict__.pop("quantization_config", None)
