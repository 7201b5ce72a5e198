"""What ``_compat/transformers/experts.py`` relies on of stock mixtures of experts."""

from typing import Any

import torch

from ..relied_on import relying

relies_on = relying("transformers/experts.py")


@relies_on("transformers.PreTrainedConfig._experts_implementation")
def test_a_config_names_how_experts_are_computed(mixture: Any) -> None:
    """``_experts_implementation`` of a config is ``"eager"`` or the name of another way, and is read in each pass."""
    from transformers import MixtralForCausalLM

    model = MixtralForCausalLM(mixture).double()
    model.config._experts_implementation = "eager"
    assert model.model.layers[0].mlp.experts.config._experts_implementation == "eager"
    assert model(input_ids=torch.ones(1, 3, dtype=torch.long)).logits.dtype == torch.float64
    model.config._experts_implementation = "grouped_mm"
    assert model.model.layers[0].mlp.experts.config._experts_implementation == "grouped_mm"


@relies_on("transformers.models.mixtral.modeling_mixtral.MixtralExperts._apply_gate")
def test_experts_apply_their_gate_to_both_halves(mixture: Any) -> None:
    """``_apply_gate`` of a module of experts takes gate and up projections side by side."""
    from transformers import MixtralForCausalLM

    experts = MixtralForCausalLM(mixture).model.layers[0].mlp.experts
    both = torch.randn(3, 16)
    gate, up = both.chunk(2, -1)
    torch.testing.assert_close(experts._apply_gate(both), torch.nn.functional.silu(gate) * up)


@relies_on("transformers.PreTrainedModel.can_record_outputs")
def test_a_model_lists_what_it_records_of_its_routers(mixture: Any) -> None:
    """``can_record_outputs["router_logits"]`` is the class of routers, or a recorder with ``target_class`` and
    ``index``, or a list of such.
    """
    from transformers import MixtralForCausalLM

    model = MixtralForCausalLM(mixture)
    recorded = model.model.can_record_outputs["router_logits"]
    recorder = recorded[0] if isinstance(recorded, list | tuple) else recorded
    kind = getattr(recorder, "target_class", recorder)
    assert any(type(module) is kind for module in model.modules())
    assert isinstance(getattr(recorder, "index", 0), int)
