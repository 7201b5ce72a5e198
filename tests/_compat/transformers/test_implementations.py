"""What ``_compat/transformers/implementations.py`` relies on: names of attention functions in configs."""

from typing import Any

from ..relied_on import relying

CONFIG = "transformers.PreTrainedConfig"
relies_on = relying("transformers/implementations.py")


@relies_on(f"{CONFIG}._attn_implementation", f"{CONFIG}:_attn_implementation_internal")
def test_a_config_names_its_attention(config: Any) -> None:
    """``_attn_implementation`` of a config is the name of its attention function, and what is written to
    ``_attn_implementation_internal`` is read there at once, without a check of the name.
    """
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    model.config._attn_implementation_internal = "a name of ours"
    assert model.config._attn_implementation == "a name of ours"
    assert model.model.layers[0].self_attn.config._attn_implementation == "a name of ours"
