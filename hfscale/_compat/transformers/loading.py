"""Hook into transformers' ``from_pretrained``."""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import logging

from ...config.environment import local_rank, without_launcher_switches
from ...errors import CheckpointError


@contextmanager
def loading_through(
    prepare: Callable[[Any, list[Any], list[str], Any], dict[str, Any]],
    name_of_tie: Callable[[str], str | None],
    initialize: Callable[[Any], None],
) -> Iterator[dict[str, Any]]:
    """Call ``prepare`` with each freshly built meta model before ``from_pretrained`` reads weights, inside the ``with``
    block.

    ``prepare(model, weight_mapping, files, quantizer)`` may change the model's shapes and take modules out, and returns
    the state dict to load from. The yielded dict receives the missing and mismatched keys that transformers reports.

    Args:
        name_of_tie: the name by which a tied parameter is still in the model, if it is; only those are tied.
        initialize: replaces transformers' initialization of a model whose weights have been read.
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
        named = {name: (name_of_tie(name), name_of_tie(first)) for name, first in report["ties"].items()}
        model.all_tied_weights_keys = {
            name: first for name, (here, first) in named.items() if here == name and first not in (None, name)
        }
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


@cache
def loading_arguments() -> frozenset[str]:
    """Return the names of arguments of ``from_pretrained`` and ``from_config`` that are no fields of a config, read
    from the source of transformers, which takes most of them out of ``**kwargs`` by name.
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


def quantizes(model: Any, config: Any) -> Callable[[str], bool]:
    """Return a predicate: whether transformers' bitsandbytes quantizer, given ``config``, quantizes a module."""
    kept = HfQuantizer.get_modules_to_not_convert(model, config.llm_int8_skip_modules, model._keep_in_fp32_modules)
    return lambda name: bool(should_convert_module(name, kept))


def forget_quantization(model: Any) -> None:
    """Remove transformers' marks of quantization from a model that is not quantized any more."""
    for name in ("hf_quantizer", "quantization_method", "is_loaded_in_4bit", "is_loaded_in_8bit", "is_quantized"):
        model.__dict__.pop(name, None)
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config.__dict__.pop("quantization_config", None)
