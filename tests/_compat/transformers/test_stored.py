"""What ``_compat/transformers/stored.py`` and ``prediction.py`` rely on of checkpoints' conversions."""

from typing import Any

import pytest
import torch

from ..relied_on import relying

MODEL = "transformers.PreTrainedModel"
relies_on = relying("transformers/stored.py")


@relying("transformers/stored.py", "transformers/prediction.py")(f"{MODEL}:_weight_conversions")
def test_a_model_keeps_the_conversions_that_it_was_loaded_by(mixture: Any, tmp_path: Any) -> None:
    """A loaded model has a list of conversions in ``_weight_conversions``, which saving reverts; ``None`` or no such
    attribute means those of its class, and an empty list none.
    """
    from transformers import MixtralForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    made = MixtralForCausalLM(mixture)
    assert getattr(made, "_weight_conversions", None) is None
    state = made.state_dict()
    assert "model.layers.0.mlp.experts.gate_up_proj" not in revert_weight_conversion(made, state)
    made.save_pretrained(tmp_path)
    loaded = MixtralForCausalLM.from_pretrained(tmp_path)
    assert loaded._weight_conversions
    assert set(revert_weight_conversion(loaded, state)) == set(
        revert_weight_conversion(made, state)
    )
    loaded._weight_conversions = []
    assert set(revert_weight_conversion(loaded, state)) == set(state)


@relies_on("transformers.core_model_loading.WeightRenaming:_was_used")
def test_a_conversion_notes_that_it_was_used() -> None:
    """``_was_used`` of an entry is what ``was_used()`` returns: whether it has matched a key."""
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    entry = WeightRenaming(source_patterns="old", target_patterns="new")
    assert not entry.was_used()
    assert rename_source_key("old.weight", [entry], [])[0] == "new.weight"
    assert entry.was_used()
    entry._was_used = False
    assert not entry.was_used()


@relies_on(f"{MODEL}._keys_to_ignore_on_save")
def test_a_class_names_what_is_not_saved(config: Any, tmp_path: Any) -> None:
    """``_keys_to_ignore_on_save`` names tensors that ``save_pretrained`` leaves out, or is ``None``."""
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(config)
    assert not model._keys_to_ignore_on_save
    model._keys_to_ignore_on_save = {"lm_head.weight"}
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")


@relying("transformers/prediction.py")(f"{MODEL}._keys_to_ignore_on_load_unexpected")
def test_a_class_names_what_it_does_not_expect() -> None:
    """``_keys_to_ignore_on_load_unexpected`` has patterns of stored tensors that a class leaves out, those of layers
    ahead in a form of their own among them, or is ``None``.
    """
    from transformers import Qwen3NextForCausalLM

    assert any("mtp" in each for each in Qwen3NextForCausalLM._keys_to_ignore_on_load_unexpected)


@relies_on(f"{MODEL}.is_remote_code")
def test_a_class_of_a_checkpoint_knows_that_it_is() -> None:
    """``is_remote_code()`` is true of classes that were registered for an Auto class, whose code is saved too."""
    from transformers import LlamaForCausalLM

    class Own(LlamaForCausalLM):
        pass

    assert not Own.is_remote_code()
    Own.register_for_auto_class("AutoModelForCausalLM")
    assert Own.is_remote_code()
    assert not LlamaForCausalLM.is_remote_code()


@pytest.mark.filterwarnings("ignore")
@relies_on("transformers.quantizers.base.HfQuantizer.preprocess_model")
def test_a_quantizer_prepares_a_meta_model(config: Any) -> None:
    """``preprocess_model(model)`` of the quantizer of ``FineGrainedFP8Config`` puts its own layers
    into a meta model, on a machine without a GPU too; ``param_needs_quantization`` tells their weights, and
    ``get_quantize_ops().convert`` quantizes one.
    """
    from transformers import FineGrainedFP8Config, LlamaForCausalLM
    from transformers.quantizers.auto import AutoHfQuantizer

    quantizer: Any = AutoHfQuantizer.from_config(
        FineGrainedFP8Config(weight_block_size=(8, 8)), pre_quantized=False
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    quantizer.preprocess_model(model)
    name = "model.layers.0.mlp.up_proj.weight"
    assert quantizer.param_needs_quantization(model, name)
    assert not quantizer.param_needs_quantization(model, "model.norm.weight")
    made = quantizer.get_quantize_ops().convert({name: torch.randn(8, 8)})
    assert made[name].dtype == torch.float8_e4m3fn
    assert f"{name}_scale_inv" in made
