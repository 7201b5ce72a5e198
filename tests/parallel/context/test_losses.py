"""Classes that compute their own loss, a mean over tokens, with sequences cut over context ranks."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForTokenClassification,
)

import hfscale
from hfscale import ParallelConfig
from hfscale.extras.proofs.loss_proofs import prove_token_loss
from hfscale.models.clone import tiny_clone
from hfscale.models.precision import keep_float64
from hfscale.testing import RankPool, assert_layout_equal, plain

from ...families import config_of
from ...proved_anew import proved_anew
from ...sweeps import cases
from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
SHORT = 9


def few_labels(
    case: plain.PlainCase, generator: torch.Generator, length: int
) -> dict[str, torch.Tensor]:
    """Rows of an odd length; in short ones, the tokens of rank 1 of two have no label."""
    batch = plain.causal_lm(case, generator, length)
    if length == SHORT:
        batch["labels"][:, 2:] = -100
    return batch


def decoder(family: str, layers: int = 2, **changes: Any) -> plain.OwnLossCase:
    config = config_of(family, layers)
    return plain.OwnLossCase(
        config, make_batch=few_labels, over="labels", lengths=(17, SHORT), **changes
    )


LAYOUTS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "tp": ("bart", {"tp_size": 2}, False),
    "shard": ("bart", {"dp_shard_size": 2}, True),
    "pp": ("bart", {"pp_size": 2, "num_microbatches": 2}, False),
    "zbv": ("pegasus", {"pp_size": 2, "num_microbatches": 2, "pipeline_schedule": "zbv"}, False),
    "replicate-heads": ("marian", {"dp_replicate_size": 2, "cp_method": "heads"}, False),
    "ring": ("whisper", {"cp_method": "ring"}, True),
    "own attention": ("mvp", {"tp_size": 2}, True),
    "own attention-pp": ("trocr", {"pp_size": 2, "num_microbatches": 2}, True),
}


@pytest.mark.daily("tp")
@pytest.mark.parametrize("name", cases(LAYOUTS, daily=["tp", "shard"]))
def test_decoders_that_label_tokens_without_a_shift(pools: Pools, name: str) -> None:
    """They count positions by themselves; a rank, and a whole microbatch, without any label."""
    family, axes, checkpointing = LAYOUTS[name]
    layout = ParallelConfig(cp_size=2, **axes)
    case = decoder(family, 4 if layout.pp > 1 else 2, checkpointing=checkpointing)
    assert_layout_equal(case, layout, pools(layout.total_size))


CLASSES: dict[str, tuple[str, Any, plain.Maker]] = {
    "masked": ("bert", AutoModelForMaskedLM, few_labels),
    "masked-windows": ("modernbert", AutoModelForMaskedLM, few_labels),
    "tokens": ("qwen2", AutoModelForTokenClassification, plain.token_classification),
}


@pytest.mark.parametrize("name", cases(CLASSES, daily=["masked"]))
def test_other_classes_whose_loss_is_a_mean_over_tokens(pools: Pools, name: str) -> None:
    """Attention in both directions, and padding."""
    family, auto_class, maker = CLASSES[name]
    config = tiny_clone(AutoConfig.for_model(family), pad_token_id=None)
    given: dict[str, Any] = {
        "auto_class": auto_class,
        "make_batch": maker,
        "over": "labels",
        "lengths": (17, SHORT),
    }
    layout = ParallelConfig(cp_size=2)
    assert_layout_equal(plain.OwnLossCase(config, **given), layout, pools(2))


def _divided(directory: str, layout: dict[str, Any] | None) -> list[float]:
    """Loss and norm of two batches, each divided by twice its labels, as Trainer accumulates such a class's means."""
    case = replace(decoder("bart"), accumulation=2)
    batches = case.batches(1)[1][0]
    with keep_float64():
        if layout is None:
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
            loss = sum(model(**batch).loss / 2 for batch in batches)
            loss.backward()
            return [
                float(loss.detach()),
                float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)),
            ]
        model = hfscale.from_pretrained(
            directory, parallel=ParallelConfig(**layout), dtype=torch.float64
        ).eval()
        items = [2 * case.count(batch["labels"]) for batch in batches]
        loss = hfscale.train_step(model, batches, num_items_in_batch=items)
        positions = torch.arange(17).expand(3, -1)
        with pytest.raises(hfscale.ConfigError, match="would ignore the given position_ids"):
            hfscale.train_step(model, {**batches[0], "position_ids": positions})
        _, output = hfscale.eval_step(model, batches[0], return_outputs=True)
        assert output.logits.shape[:2] == (3, 17)
        return [float(loss), float(hfscale.clip_grad_norm_(model, 1e9))]


def test_a_mean_of_means_and_positions_of_its_own(pools: Pools, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(config_of("bart"), dtype=torch.float64).save_pretrained(
        tmp_path
    )
    wanted = _divided(str(tmp_path), None)
    for found in pools(2).run(_divided, str(tmp_path), {"cp_size": 2}):
        assert found == pytest.approx(wanted, rel=1e-10)


def test_only_a_mean_over_tokens_is_proved() -> None:
    for family, auto_class, wanted in (
        ("bart", AutoModelForCausalLM, True),
        ("prophetnet", AutoModelForCausalLM, False),  # of several tokens ahead
        ("bert", AutoModelForTokenClassification, True),
        ("biogpt", AutoModelForTokenClassification, False),  # leaves out labels on padding
    ):
        model = auto_class.from_config(config_of(family))
        assert prove_token_loss(model) == (wanted, True)
    # It shifts labels.
    assert not prove_token_loss(AutoModelForCausalLM.from_config(tiny("llama")))[0]
    with (
        proved_anew(),
        pytest.raises(
            hfscale.PlanError, match="mean over tokens, and the loss of this model is not one"
        ),
    ):
        hfscale.plan(
            tiny_clone(AutoConfig.for_model("t5")),
            ParallelConfig(cp_size=2),
            auto_class=AutoModelForSeq2SeqLM,
        )
