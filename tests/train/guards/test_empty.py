"""A rank without rows takes part in the step and adds nothing to it (the last, short batch of an epoch)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    MixtralConfig,
)

import hfscale
from hfscale import ParallelConfig
from hfscale.extras.pictures.picture_configs import with_pictures
from hfscale.models.clone import tiny_clone
from hfscale.models.precision import keep_float64, make_float64
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.shards import local_tensor

from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
ROUTING = hfscale.RoutingConfig(balance_loss=0.1, z_loss=0.01)
MIXTRAL = MixtralConfig(
    hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=67, num_local_experts=4, num_experts_per_tok=2,
)  # fmt: skip


def batch(rows: int, masked: bool = False) -> dict[str, Tensor]:
    ids = torch.randint(0, 67, (4, 9), generator=torch.Generator().manual_seed(1))[:rows]
    return {
        "input_ids": ids,
        "labels": ids,
        **({"attention_mask": torch.ones_like(ids)} if masked else {}),
    }


def step(
    path: str, layout: dict[str, Any], routing: Any, accumulate: bool
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Rank 0's rows alone: loss, norm, and the worst difference of a gradient from what one process stored."""
    model = hfscale.from_pretrained(
        path, parallel=ParallelConfig(**layout), dtype=torch.float64, routing=routing
    )
    empty = hfscale.batch_rank(model) > 0
    given: Any = batch(0 if empty else 4, masked=empty)
    given = [given, batch(0)] if accumulate else given
    model.train()
    loss = hfscale.train_step(model, given)
    assert hfscale.eval_step(model, given).isfinite()
    gradients = {
        p.name: local_tensor(parameter.grad) for p, parameter in runtime_of(model).parameters()
    }
    reference = Path(path) / "gradients.pt"
    if layout == {}:
        torch.save(gradients, reference)
    expected = torch.load(reference)
    ranks = runtime_of(model).mesh.ranks
    plans = {planned.name: planned for planned, _ in runtime_of(model).parameters()}
    apart = {
        name: float((found - plans[name].take(expected[name], ranks)).abs().max()) for name, found in gradients.items()
        if found.numel()
    }  # fmt: skip
    return loss, hfscale.clip_grad_norm_(model, 1.0), apart


LAYOUTS: dict[str, tuple[dict[str, Any], Any, bool]] = {
    "sharded data": ({"dp_shard_size": 2}, None, False),
    "replicas, accumulating": ({"dp_replicate_size": 2}, None, True),
    "stages": ({"pp_size": 2, "dp_shard_size": 2}, None, False),
    "tensor ranks": ({"tp_size": 2, "dp_shard_size": 2, "sequence_parallel": True}, None, False),
    "experts over data ranks": ({"ep_size": 2, "dp_shard_size": 2}, ROUTING, False),
}


@pytest.mark.daily("stages", "sharded data", "experts over data ranks")
@pytest.mark.parametrize("kind", LAYOUTS)
def test_its_share_is_zero(
    pools: Pools, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, routing, accumulate = LAYOUTS[kind]
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = MIXTRAL if routing else tiny("llama")
    AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(tmp_path)
    loss, norm, _ = step(str(tmp_path), {}, routing, False)
    found = pools(ParallelConfig(**layout).total_size).run(
        step, str(tmp_path), layout, routing, accumulate
    )
    for own_loss, own_norm, apart in found:
        # transformers' norms and softmax compute in float32
        torch.testing.assert_close(own_loss, loss, rtol=1e-6, atol=0.0)
        torch.testing.assert_close(own_norm, norm, rtol=1e-5, atol=0.0)
        assert max(apart.values()) < 1e-5


def _mask(rows: int) -> dict[str, Tensor]:
    whole = torch.ones(9, 9, dtype=torch.bool).tril()
    return {"attention_mask": whole.expand(rows, 1, 9, 9)}


ARGUMENTS: dict[str, tuple[str, Callable[[int], dict[str, Tensor]]]] = {
    "a mask of four dims": ("llama", _mask),
    # a family whose rows cannot hold several examples, which positions of zeros would be
    "positions": (
        "recurrent_gemma",
        lambda rows: {"position_ids": torch.arange(9).expand(rows, 9)},
    ),
    "positions of three axes": (
        "qwen2_vl",
        lambda rows: {"position_ids": torch.arange(9).expand(3, rows, 9)},
    ),
    "pictures": (
        "llava_next",
        lambda rows: (
            {}
            if rows
            else {
                "pixel_values": torch.zeros(0, 5, 3, 16, 16, dtype=torch.float64),
                "image_sizes": torch.zeros(0, 2, dtype=torch.int64),
            }
        ),
    ),
}


def _loss_and_norm(kind: str, layout: dict[str, int]) -> tuple[Tensor, Tensor]:
    family, arguments = ARGUMENTS[kind]
    shows = family in ("qwen2_vl", "llava_next")
    config = with_pictures(family) if shows else tiny_clone(AutoConfig.for_model(family))
    parallel = ParallelConfig(**layout)
    kind_of_class: Any = AutoModelForImageTextToText if shows else AutoModelForCausalLM
    with make_float64():
        model = hfscale.from_config(
            config, auto_class=kind_of_class, parallel=parallel, dtype=torch.float64, seed=0
        )
    model.train()
    rows = 0 if hfscale.batch_rank(model) else 4
    with keep_float64():
        loss = hfscale.train_step(model, {**batch(rows), **arguments(rows)})
    return loss, hfscale.clip_grad_norm_(model, 1.0)


@pytest.mark.daily("pictures")
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments_of_no_rows(pools: Pools, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each argument is filled with what the model takes for padding: not a mask of two heads, one example for each
    token, axes of other rows, or a picture that no token stands for.
    """
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected = _loss_and_norm(kind, {})
    for found in pools(2).run(_loss_and_norm, kind, {"dp_replicate_size": 2}):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0.0)


def _outputs(layout: dict[str, Any]) -> list[tuple[int, ...]]:
    model = hfscale.from_config(tiny("llama"), parallel=ParallelConfig(**layout), seed=0)
    whole, empty = batch(4), batch(0)
    alone = hfscale.eval_step(model, empty, return_outputs=True)[1]
    both = hfscale.eval_step(model, [whole, empty], return_outputs=True)[1]
    scores = hfscale.token_scores(model, empty)
    return [tuple(each.shape) for each in (alone.logits, both[0].logits, both[1].logits)] + [
        tuple(scores.log_probs.shape)
    ]


@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"pp_size": 2, "pipeline_schedule": "gpipe"}])
def test_no_row_has_no_outputs(pools: Pools, layout: dict[str, Any]) -> None:
    for shapes in pools(2).run(_outputs, layout):
        assert shapes == [(0, 9, 67), (4, 9, 67), (0, 9, 67), (0, 9)]


def _uneven(layout: dict[str, Any], counts: dict[int, int]) -> str:
    model = hfscale.from_config(
        tiny("llama", num_hidden_layers=4), parallel=ParallelConfig(**layout)
    )
    count = counts[hfscale.batch_rank(model)]
    ids = torch.arange(count * 7).view(count, 7) % 60
    one_by_one = [{"input_ids": row[None], "labels": row[None]} for row in ids]
    try:
        hfscale.train_step(
            model, {"input_ids": ids, "labels": ids} if "pp_size" in layout else one_by_one
        )
    except hfscale.ConfigError as error:
        return str(error)
    return ""


STAGES = {"pp_size": 2, "dp_shard_size": 2, "pipeline_schedule": "gpipe"}


@pytest.mark.parametrize(
    ("layout", "refused"),
    [
        ({"dp_shard_size": 2}, True),
        ({**STAGES, "weights_regather": True}, True),
        ({**STAGES, "weights_regather": True, "num_microbatches": 2}, False),
        (STAGES, False),  # weights are gathered once a step
    ],
)
def test_data_ranks_with_other_numbers_of_microbatches(
    pools: Pools, layout: dict[str, Any], refused: bool
) -> None:
    """They would wait for each other forever."""
    found = pools(ParallelConfig(**layout).total_size).run(_uneven, layout, {0: 4, 1: 6})
    assert all(("has more or fewer" in error) == refused for error in found), found
