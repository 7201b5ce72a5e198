"""What the first layer of a list lends to the others: found by structure, and proved on a tiny clone."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from hfscale import ParallelConfig
from hfscale.extras.proofs.layer_probes import proved
from hfscale.models.clone import tiny_clone
from hfscale.plan.drafting.boundary_modules import candidate
from hfscale.plan.stages import Loan
from tests.tiny_models import assign_stages

TABLE = Loan(
    "decoder.block",
    "layer.0.SelfAttention",
    "relative_attention_bias",
    (("has_relative_attention_bias", True),),
)


@pytest.fixture(scope="module")
def t5() -> Any:
    torch.manual_seed(0)
    return AutoModelForSeq2SeqLM.from_config(
        tiny_clone(AutoConfig.for_model("t5"), layers=3, decoder_start_token_id=0)
    )


def test_every_stage_of_a_stack_holds_its_table_once(t5: Any) -> None:
    plan = assign_stages(t5, ParallelConfig(pp_size=3, stage_layers=[2, 2, 2]))
    assert [loan.name for loan in plan.loans] == [
        f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
        for stack in ("encoder", "decoder")
    ]
    held = [
        [loan.name.partition(".")[0] for loan in plan.loans if stage.is_local(loan.name)]
        for stage in plan.stages
    ]
    assert held == [["encoder"], ["encoder", "decoder"], ["decoder"]]
    tied = {tie.names: tie.stages for tie in plan.ties if "relative_attention_bias" in tie.names[0]}
    assert sorted(tied.values()) == [(0, 1), (1, 2)]


def test_the_loan_is_proved(t5: Any) -> None:
    assert candidate(list(t5.decoder.block), "decoder.block") == TABLE
    assert proved(copy.deepcopy(t5), TABLE)


def test_layers_that_do_not_know_of_the_table_are_not(t5: Any) -> None:
    assert not proved(copy.deepcopy(t5), replace(TABLE, flags=()))


def test_what_layers_make_of_the_stream_is_no_loan(t5: Any) -> None:
    changed = copy.deepcopy(t5)
    for layer in changed.decoder.block:
        layer.register_forward_hook(
            lambda _, args, output: (output[0], output[1] + output[0].mean(), *output[2:])
        )
    assert not proved(changed, TABLE)


def test_layers_that_differ_otherwise_have_none(t5: Any) -> None:
    changed = copy.deepcopy(t5)
    del changed.decoder.block[2].layer[0].layer_norm
    assert candidate(list(changed.decoder.block), "decoder.block") is None
    assert candidate(list(t5.decoder.block)[1:], "decoder.block") is None
