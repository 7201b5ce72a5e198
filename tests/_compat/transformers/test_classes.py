"""What ``_compat/transformers/classes.py`` relies on of stock models and Auto classes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ..relied_on import found, relying

MODEL = "transformers.PreTrainedModel"
relies_on = relying("transformers/classes.py")


@relying("transformers/classes.py", "transformers/loading.py")(f"{MODEL}._from_config")
def test_a_stock_class_builds_of_a_config(config: Any) -> None:
    """``_from_config(config, dtype=)`` of a stock class builds a model as ``from_config`` of an Auto class does."""
    from transformers import LlamaForCausalLM

    made = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    assert type(made) is LlamaForCausalLM
    assert made.dtype == torch.bfloat16
    assert not hasattr(LlamaForCausalLM, "from_config")


@relies_on("transformers.AutoModelForCausalLM._model_mapping")
def test_an_auto_class_lists_its_classes() -> None:
    """``_model_mapping`` of an Auto class maps classes of configs to those of models, or several of these."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    mapping = AutoModelForCausalLM._model_mapping
    assert mapping[LlamaConfig] is LlamaForCausalLM
    assert LlamaConfig in mapping.keys()  # noqa: SIM118


@relies_on(f"{MODEL}._no_split_modules")
def test_a_model_names_the_classes_of_its_layers(config: Any) -> None:
    """``_no_split_modules`` of a class names the classes that stay on one device: its layers'."""
    from transformers import LlamaForCausalLM

    assert set(LlamaForCausalLM._no_split_modules) == {"LlamaDecoderLayer"}
    assert set(LlamaForCausalLM(config)._no_split_modules) == {"LlamaDecoderLayer"}


@relying("transformers/classes.py", "transformers/trainer.py")(f"{MODEL}._hf_peft_config_loaded")
def test_a_model_with_adapters_of_its_own_says_so(config: Any) -> None:
    """``_hf_peft_config_loaded`` is false until ``add_adapter`` sets it, and lets a quantized model pass for one that
    trains adapters in a Trainer.
    """
    import inspect

    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM(config)
    assert not model._hf_peft_config_loaded
    assert "self._hf_peft_config_loaded = True" in inspect.getsource(model.add_adapter)
    check = found("transformers.trainer.validate_quantization_for_training")
    model.is_quantized = True
    model.hf_quantizer = SimpleNamespace(is_trainable=True, is_qat_trainable=False)
    with pytest.raises(ValueError, match="quantized"):
        check(model)
    model._hf_peft_config_loaded = True
    check(model)


@relies_on(f"{MODEL}.tp_size")
def test_a_model_that_transformers_distributed_says_over_how_many_ranks(config: Any) -> None:
    """``tp_size`` is ``None`` unless transformers itself has distributed the model, in any way."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    assert LlamaForCausalLM(config).tp_size is None
    assert DistributedConfig(fsdp_size=2).tp_size == 1


@relies_on(f"{MODEL}:_loss_function", "transformers.loss.loss_utils.LOSS_MAPPING")
def test_a_model_calls_its_loss_function(config: Any) -> None:
    """An instance's ``_loss_function`` is what ``loss_function`` returns and a pass with labels calls; without one it
    is that of ``LOSS_MAPPING`` for ``loss_type``.
    """
    from transformers import LlamaForCausalLM
    from transformers.loss.loss_utils import LOSS_MAPPING

    model = LlamaForCausalLM(config)
    assert "_loss_function" not in vars(model)
    assert model.loss_function is LOSS_MAPPING["ForCausalLM"]
    model._loss_function = lambda *_, **__: torch.tensor(7.0)
    ids = torch.ones(1, 3, dtype=torch.long)
    assert float(model(input_ids=ids, labels=ids).loss) == 7
    model.loss_function = max
    assert vars(model)["_loss_function"] is max
    del model._loss_function
    assert model.loss_function is LOSS_MAPPING["ForCausalLM"]


@pytest.mark.parametrize("name", ["forward", "layer", "layer_ahead"])
@relying("transformers/caches.py")(
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer.forward:cache or "
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer.forward:past_key_values"
)
def test_the_cache_is_called_by_a_known_name(name: str) -> None:
    """The argument of models and layers with the keys and values of earlier tokens is called ``cache`` or
    ``past_key_values``.
    """
    import inspect

    takers = {
        "forward": "transformers.LlamaModel",
        "layer": "transformers.models.llama.modeling_llama.LlamaDecoderLayer",
        "layer_ahead": "transformers.modeling_layers.MtpLayer",
    }
    forward = inspect.unwrap(found(takers[name]).forward)
    assert {"cache", "past_key_values"} & inspect.signature(forward).parameters.keys()
