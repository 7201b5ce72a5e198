"""What ``_compat/transformers/loading.py`` relies on of ``from_pretrained``."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from ..relied_on import found, relying

MODEL = "transformers.PreTrainedModel"
relies_on = relying("transformers/loading.py")


@relies_on(f"{MODEL}._load_pretrained_model")
def test_weights_are_loaded_by_one_function(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``from_pretrained`` calls the static ``_load_pretrained_model(model, state_dict, files, load_config)`` with a
    meta model and files; it takes a state dict in place of files, initializes what is missing by the instance's
    ``initialize_weights``, ties by its ``all_tied_weights_keys``, and tells missing and mismatched keys.
    """
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM, PreTrainedModel

    saved = LlamaForCausalLM(config)
    saved.save_pretrained(tmp_path)
    calls = []
    stock = PreTrainedModel.__dict__["_load_pretrained_model"]
    assert isinstance(stock, staticmethod)

    def load(
        model: Any, state: Any, files: Any, load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        assert state is None
        assert next(model.parameters()).is_meta
        shown = load_file(files[0])
        del shown["model.norm.weight"]
        calls.append((load_config.weight_mapping, load_config.hf_quantizer))
        assert load_config.pretrained_model_name_or_path == str(tmp_path)
        assert isinstance(model.all_tied_weights_keys, dict)
        model.initialize_weights = lambda: calls.append("initialized")
        info, index = stock.__func__(model, shown, None, load_config, *args, **kwargs)
        assert set(info.missing_keys) == {"model.norm.weight"}
        assert not info.mismatched_keys
        return info, index

    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", staticmethod(load))
    loaded = LlamaForCausalLM.from_pretrained(str(tmp_path))
    assert calls[1:] == ["initialized"]
    assert torch.equal(loaded.lm_head.weight, saved.lm_head.weight)


@relies_on("torch.nn.Parameter:_is_hf_initialized", f"{MODEL}._initialize_weights")
def test_loaded_tensors_are_left_alone(config: Any) -> None:
    """``_initialize_weights(module)`` draws a module's tensors anew, but for those that have ``_is_hf_initialized``; it
    takes whether the class is custom code.
    """
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(config)
    layer = model.model.layers[0].mlp.up_proj
    for loaded in (True, False):
        del layer._is_hf_initialized
        layer.weight._is_hf_initialized = loaded
        layer.weight.data.fill_(7)
        with torch.no_grad():
            model._initialize_weights(layer, False)
        assert bool((layer.weight == 7).all()) == loaded


@relies_on(f"{MODEL}._keep_in_fp32_modules")
def test_a_quantizer_leaves_out_what_stays_wide(config: Any) -> None:
    """``_keep_in_fp32_modules`` of a model names modules that no quantizer converts, or is empty or ``None``."""
    from transformers import LlamaForCausalLM
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    model = LlamaForCausalLM(config)
    assert not model._keep_in_fp32_modules
    kept = HfQuantizer.get_modules_to_not_convert(model, None, ["up_proj"])
    assert not should_convert_module("model.layers.0.mlp.up_proj", kept)
    assert not should_convert_module("lm_head", kept)
    assert should_convert_module("model.layers.0.mlp.down_proj", kept)


@relies_on("transformers.AutoModelForCausalLM.from_pretrained")
def test_arguments_of_loading_are_read_in_the_source() -> None:
    """``from_pretrained`` and ``from_config`` of models and Auto classes pop, get or look for their own arguments by
    string, in a way that is found in their source.
    """
    import re

    names = set()
    for taker in (MODEL, "transformers.AutoModelForCausalLM"):
        source = inspect.getsource(found(f"{taker}.from_pretrained"))
        names |= set(re.findall(r'kwargs\.(?:pop|get)\(\s*"(\w+)"', source))
        names |= set(re.findall(r'"(\w+)" in kwargs', source))
    assert {"torch_dtype", "attn_implementation", "device_map", "output_loading_info"} <= names
