"""What the host's plans forget inside their blocks, and losses that are taken around the head."""

import torch
from transformers import AutoConfig, AutoModelForMaskedLM

import hfscale
from hfscale.families.blueprint import TRANSLATED
from hfscale.families.clone import tiny_clone
from hfscale.planner.resolve import find_blueprint


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
        tiny_clone(AutoConfig.for_model("flaubert")), hfscale.ParallelConfig(tp_size=2), auto_class=AutoModelForMaskedLM
    )
    assert plan.loss is None
    assert plan.head is None
    assert not plan.no_step  # the loss proves to be a mean over labels
