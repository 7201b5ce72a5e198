"""What the host's plans forget inside their blocks, and how a loss is known."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForMaskedLM, MixtralForCausalLM

import hfscale
from hfscale.api.find_blueprint import find_blueprint
from hfscale.models.blueprint import TRANSLATED
from hfscale.models.clone import tiny_clone
from hfscale.models.facts import prove


def test_norms_that_a_plan_forgets_get_a_proved_role() -> None:
    """ESM C's norms of queries and keys are over all heads at once, and its plan says nothing of them."""
    with torch.device("meta"):
        model = AutoModelForMaskedLM.from_config(tiny_clone(AutoConfig.for_model("esmc")))
    found = find_blueprint(model)
    assert found.source == TRANSLATED
    assert found.blocks["self_attn"].across == ("q_norm", "k_norm")
    assert not find_blueprint(model, may_infer=False).blocks["self_attn"].across


def test_a_loss_that_is_taken_by_the_module_around_the_head() -> None:
    plan = hfscale.plan(
        tiny_clone(AutoConfig.for_model("flaubert")),
        hfscale.ParallelConfig(tp_size=2),
        auto_class=AutoModelForMaskedLM,
    )
    assert plan.loss is None
    assert plan.head is None
    assert not plan.no_step  # the loss proves to be a mean over labels


def test_the_loss_of_a_mixture_is_proved_without_its_experts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which tokens they get depends on values, which a model on the meta device has not."""
    with torch.device("meta"):
        model = MixtralForCausalLM(tiny_clone(AutoConfig.for_model("mixtral")))

    def unable(
        self: object, hidden_states: object, top_k_index: object, top_k_weights: object
    ) -> None:
        raise NotImplementedError("no kernel for this type of number")

    monkeypatch.setattr(type(model.model.layers[0].mlp.experts), "forward", unable)
    assert prove("loss", model)[0] is None


def test_what_is_computed_between_lists_of_layers_is_not_cut_along_the_sequence() -> None:
    """Flaubert has its attention in one list and what follows it in another."""
    layout = hfscale.ParallelConfig(tp_size=2, sequence_parallel=True)
    with pytest.raises(
        hfscale.PlanError,
        match=r"several lists of layers \(transformer.attentions, transformer.ffns\)",
    ):
        hfscale.plan(
            tiny_clone(AutoConfig.for_model("flaubert")), layout, auto_class=AutoModelForMaskedLM
        )
