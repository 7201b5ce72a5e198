"""Pipeline stages equal one process under every schedule: loss, every gradient, norm, weights after two steps."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, OPTConfig, PreTrainedConfig

import hfscale
from hfscale import ConfigError, ParallelConfig, PlanError
from hfscale.models.precision import keep_float64
from hfscale.parallel.pipeline.csv_table import write_csv
from hfscale.parallel.pipeline.orders import order
from hfscale.testing import Case, RankPool, assert_layout_equal
from hfscale.testing.parity import ragged_batch
from hfscale.train.runtime import runtime_of

from ..sweeps import cases, pairs
from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
)


def deep(family: str, layers: int = 5, **changes: Any) -> PreTrainedConfig:
    """Layers that four stages share unevenly."""
    return tiny(
        family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": layers}, **changes
    )


def _equal(pools: Pools, case: Case, **layout: Any) -> None:
    parallel = ParallelConfig(**layout)
    assert_layout_equal(case, parallel, pools(parallel.total_size))


@pytest.mark.daily("dualpipev-gpt2")
@pytest.mark.parametrize(
    ("schedule", "family"),  # gpt2: embedding and head are tied, on two ranks, or on one (V)
    pairs(
        SCHEDULES,
        ("llama", "gpt2"),
        daily=[*((at, "gpt2") for at in SCHEDULES), ("1f1b", "llama"), ("zbv", "llama")],
    ),
)
def test_schedule(pools: Pools, schedule: str, family: str) -> None:
    _equal(pools, Case(deep(family), accumulation=4), pp_size=2, pipeline_schedule=schedule)


@pytest.mark.daily("zbv-2")
@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    pairs(
        ("gpipe", "1f1b", "zbv"),
        (1, 2, 3),
        daily=[("gpipe", 1), ("1f1b", 1), ("1f1b", 3), ("zbv", 2), ("zbv", 3)],
    ),
)
def test_fewer_and_odd_numbers_of_microbatches(
    pools: Pools, schedule: str, microbatches: int
) -> None:
    _equal(
        pools, Case(deep("llama"), accumulation=microbatches), pp_size=2, pipeline_schedule=schedule
    )


@pytest.mark.daily("interleaved_zero_bubble")
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble", "dualpipev"])
def test_four_ranks(pools: Pools, schedule: str) -> None:
    case = Case(deep("llama", 8, tie_word_embeddings=True), accumulation=8, lengths=(13, 8, 1))
    _equal(pools, case, pp_size=4, pipeline_schedule=schedule)


@pytest.mark.daily("frozen1-1f1b", "frozen2-zbv")
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize(
    "frozen",
    [("embed", ".0.", ".1.", ".2."), ("norm", "q_proj"), (".3.", ".4.", "head", "model.norm")],
)
def test_frozen(pools: Pools, frozen: tuple[str, ...], schedule: str) -> None:
    """A first stage that does not train at all, one that trains in part, a last stage that does not."""
    _equal(
        pools,
        Case(deep("llama"), frozen=frozen, accumulation=3),
        pp_size=2,
        pipeline_schedule=schedule,
    )


@pytest.mark.daily("1f1b-frozen1")
@pytest.mark.parametrize("frozen", [(), ("embed", ".0.", ".1.", ".2.")])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved1f1b", "zbv"])
def test_recomputed(pools: Pools, schedule: str, frozen: tuple[str, ...]) -> None:
    case = Case(deep("llama"), checkpointing=True, frozen=frozen, accumulation=4)
    _equal(pools, case, pp_size=2, pipeline_schedule=schedule)


@pytest.mark.daily("stages0-parallelize")
@pytest.mark.parametrize("build", ["from_pretrained", "parallelize"])
@pytest.mark.parametrize("stages", [[1, 4], [4, 1]])
def test_stages_by_hand(pools: Pools, stages: list[int], build: str) -> None:
    _equal(pools, Case(deep("gpt2"), build=build), pp_size=2, stage_layers=stages)


def test_virtual_stages_by_hand(pools: Pools) -> None:
    layout = {
        "pp_size": 2,
        "virtual_stages": 2,
        "stage_layers": [2, 1, 1, 1],
        "pipeline_schedule": "looped_bfs",
    }
    _equal(pools, Case(deep("gpt2"), accumulation=3), **layout)


def test_a_schedule_of_ones_own(pools: Pools, tmp_path: Path) -> None:
    """Stage 0 on rank 1, and microbatches in another order on the way back."""
    path = tmp_path / "own.csv"
    path.write_text("1F0,1F1,1F2,1B2,1I0,1B1,1W0\n0F0,0F1,0F2,0B2,0B0,0B1\n")
    _equal(pools, Case(deep("gpt2"), accumulation=3), pp_size=2, pipeline_schedule=str(path))
    write_csv(order("zbv", 2, 4, 2), path)
    _equal(
        pools,
        Case(deep("llama"), accumulation=4),
        pp_size=2,
        virtual_stages=2,
        pipeline_schedule=str(path),
    )


OTHER_AXES: list[dict[str, Any]] = [
    {"tp_size": 2},
    {"tp_size": 2, "sequence_parallel": True},
    {"tp_size": 2, "sequence_parallel": True, "sequence_regather": True},
    {"dp_shard_size": 2},
    {"dp_shard_size": 2, "weights_regather": True},
    {"dp_shard_size": 2, "reduce_each_microbatch": True},
    {"dp_replicate_size": 2, "weights_regather": True, "reduce_each_microbatch": True},
    {"dp_replicate_size": 2},
]
# Split backward passes meet each axis once; what is gathered or reduced again is so under any schedule.
_BESIDE_SPLIT = [{"tp_size": 2, "sequence_parallel": True}, {"dp_shard_size": 2}, OTHER_AXES[6]]


@pytest.mark.daily(
    "dp_replicate_size-weights_regather-reduce_each_microbatch-zbv",
    "tp_size-sequence_parallel-sequence_regather-1f1b",
)
@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        pytest.param(
            layout,
            schedule,
            id="-".join([*layout, schedule]),
            marks=pytest.mark.slow if (layout in _BESIDE_SPLIT) == (schedule == "1f1b") else (),
        )
        for schedule in ("1f1b", "zbv")
        for layout in OTHER_AXES
    ],
)
def test_with_other_axes(pools: Pools, layout: dict[str, Any], schedule: str) -> None:
    case = Case(deep("llama", tie_word_embeddings=True), accumulation=3)
    _equal(pools, case, pp_size=2, pipeline_schedule=schedule, **layout)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved1f1b"])
def test_key_value_heads_on_several_ranks(pools: Pools, schedule: str) -> None:
    case = Case(deep("llama", num_key_value_heads=1), accumulation=2)
    _equal(pools, case, pp_size=2, tp_size=2, pipeline_schedule=schedule)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_recomputed_with_the_stream_cut(pools: Pools, schedule: str) -> None:
    case = Case(deep("llama"), accumulation=3, checkpointing=True, lengths=(13,))
    _equal(pools, case, pp_size=2, tp_size=2, sequence_parallel=True, pipeline_schedule=schedule)


EIGHT: dict[str, dict[str, Any]] = {
    "shard": {"dp_shard_size": 2},
    "replicate-sp": {"dp_replicate_size": 2, "sequence_parallel": True},
    "shard-sp-zbv": {"dp_shard_size": 2, "sequence_parallel": True, "pipeline_schedule": "zbv"},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", cases(EIGHT, daily=["shard-sp-zbv"]))
def test_eight_ranks(pools: Pools, layout: str) -> None:
    _equal(
        pools, Case(deep("llama", tie_word_embeddings=True)), pp_size=2, tp_size=2, **EIGHT[layout]
    )


def _split(directory: str, layout: ParallelConfig, batch: dict[str, torch.Tensor]) -> list[Any]:
    model = hfscale.from_pretrained(directory, parallel=layout, dtype=torch.float64)
    with keep_float64():
        evaluated = hfscale.eval_step(model, batch)
        # The second adds to the gradients of the first.
        losses = [hfscale.train_step(model, batch) for _ in range(2)]
        model.eval()
        evaluated_again = hfscale.eval_step(model, batch)
    norm = hfscale.clip_grad_norm_(model, 1e9, float("inf"))
    total = hfscale.clip_grad_norm_(model, 1e9)
    return [evaluated, *losses, evaluated_again, norm, total]


@pytest.mark.parametrize(
    ("schedule", "numbers"),
    cases(
        [("1f1b", (None, 4)), ("1f1b", (2, 8)), ("zbv", (None, 2, 4, 8))],
        daily=[("1f1b", (None, 4))],
    ),
)
def test_one_batch_is_cut_into_microbatches(
    pools: Pools, tmp_path: Path, schedule: str, numbers: tuple[int | None, ...]
) -> None:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(deep("gpt2"), dtype=torch.float64).save_pretrained(tmp_path)
    batch = ragged_batch(torch.Generator().manual_seed(2), 67, 8, 9, masked=False)
    batch["position_ids"] = torch.arange(9)[None]  # one row for all samples
    one = _split(str(tmp_path), ParallelConfig(), batch)
    for number in numbers:
        layout = ParallelConfig(pp_size=2, num_microbatches=number, pipeline_schedule=schedule)
        for rank in pools(2).run(_split, str(tmp_path), layout, batch):
            torch.testing.assert_close(rank, one, rtol=1e-12, atol=1e-12)


def _refusals(directory: str) -> list[str]:
    found = []

    def refused(layout: ParallelConfig, call: Callable[[Any], Any]) -> None:
        with pytest.raises(ConfigError) as caught:
            call(hfscale.from_pretrained(directory, parallel=layout))
        found.append(str(caught.value))

    generator = torch.Generator().manual_seed(2)
    layout = ParallelConfig(pp_size=2, num_microbatches=3)
    batch = ragged_batch(generator, 67, 8, 9, masked=False)
    refused(layout, lambda model: hfscale.train_step(model, batch))
    interleaved = ParallelConfig(pp_size=2, pipeline_schedule="interleaved1f1b")
    three = [ragged_batch(generator, 67, 1, 9, masked=False) for _ in range(3)]
    refused(
        replace(interleaved, num_microbatches=None),
        lambda model: hfscale.train_step(model, three[:1] * 5),
    )
    refused(ParallelConfig(pp_size=2), lambda model: model(**batch))
    rank = torch.distributed.get_rank()
    refused(
        ParallelConfig(pp_size=2), lambda model: hfscale.train_step(model, [batch] * (1 + rank))
    )
    return found


def test_what_is_refused(pools: Pools, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(deep("llama")).save_pretrained(tmp_path)
    for uneven, odd, alone, different in pools(2).run(_refusals, str(tmp_path)):
        assert "num_microbatches=3 does not divide a batch of 8 rows" in uneven
        assert "use num_microbatches 1, 2, 4, 8" in uneven
        assert "length is one of 1, 2, 3, 4, 6, 8" in odd
        assert "use hfscale.train_step and hfscale.eval_step" in alone
        assert "given different batches" in different
    with pytest.raises(ConfigError, match="num_microbatches=5 does not divide into 2 groups"):
        hfscale.plan(
            deep("llama"),
            ParallelConfig(pp_size=2, pipeline_schedule="interleaved1f1b", num_microbatches=5),
        )


def _masks(directory: str) -> torch.Tensor:
    """Which entries the dropout inside the rank's first layer drops, seeded alike everywhere."""
    torch.manual_seed(7)
    model = hfscale.from_pretrained(
        directory, parallel=ParallelConfig(pp_size=2, tp_size=2)
    ).train()
    layers = runtime_of(model).plan.stages.of_rank(runtime_of(model).mesh.ranks["pp"])[0].layers  # type: ignore[union-attr]
    seen: list[torch.Tensor] = []
    model.get_submodule(layers[0]).mlp.dropout.register_forward_hook(
        lambda _, args, output: seen.append(output == 0)
    )
    batch = ragged_batch(torch.Generator().manual_seed(2), 67, 2, 9, masked=False)
    hfscale.train_step(model, batch)
    return seen[0]


def test_stages_drop_different_entries(pools: Pools) -> None:
    with tempfile.TemporaryDirectory() as name:
        AutoModelForCausalLM.from_config(deep("gpt2", resid_pdrop=0.5)).save_pretrained(name)
        first, first_too, second, second_too = pools(4).run(_masks, name)
    assert torch.equal(first, first_too)
    assert torch.equal(second, second_too)
    assert not torch.equal(first, second)


def _tied_copies(directory: str) -> list[str]:
    layout = ParallelConfig(pp_size=2)
    batch = ragged_batch(torch.Generator().manual_seed(2), 67, 2, 9, masked=False)
    found = []

    def refused(model: Any) -> None:
        with pytest.raises(ConfigError) as caught:
            hfscale.train_step(model, batch)
        found.append(str(caught.value))

    model = hfscale.from_pretrained(directory, parallel=layout).train()
    named = dict(model.named_parameters(remove_duplicate=False))  # each stage has a name of its own
    chosen = [named.pop(name) for name in list(named) if "wte" in name]
    groups = [
        {"params": list(named.values())},
        *([{"params": chosen, "weight_decay": 0.0}] if chosen else []),
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.5)
    hfscale.train_step(model, batch)
    optimizer.step()
    refused(model)
    model = hfscale.from_pretrained(directory, parallel=layout).train()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    refused(model)
    model = hfscale.from_pretrained(directory, parallel=layout).train()
    batch["logits_to_keep"] = 1  # type: ignore[assignment]
    refused(model)
    return found


def test_tied_copies_stay_equal_or_are_refused(pools: Pools, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(deep("gpt2")).save_pretrained(tmp_path)
    for drifted, hooked, kept in pools(2).run(_tied_copies, str(tmp_path)):
        assert "transformer.wte.weight = lm_head.weight is one tied tensor" in drifted
        assert "the same optimizer options under all of its names" in drifted
        assert "hook that runs when its gradient is accumulated" in hooked
        assert "leave logits_to_keep out" in kept


def _frozen_by_a_name(
    directory: str, word: str, every_name: bool
) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Losses and gradients of two steps with all tensors named like ``word`` frozen, and of two after they thawed."""
    layout = ParallelConfig(pp_size=2) if dist.is_initialized() else None
    model = hfscale.from_pretrained(directory, parallel=layout, dtype=torch.float64).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    batch = ragged_batch(torch.Generator().manual_seed(2), 67, 4, 9, masked=False)
    found = []
    for trains in (False, True):
        for name, parameter in model.named_parameters(remove_duplicate=not every_name):
            if word in name:
                parameter.requires_grad_(trains)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(hfscale.train_step(model, batch).item())
            optimizer.step()
        every = model.named_parameters(remove_duplicate=False)
        found.append((losses, {name: p.grad.clone() for name, p in every if p.grad is not None}))
    return found


@pytest.mark.daily("lm_head-True")
@pytest.mark.parametrize(
    ("word", "every_name"), [("wte", False), ("lm_head", False), ("lm_head", True)]
)
def test_a_tied_tensor_frozen_by_one_name(
    pools: Pools, tmp_path: Path, word: str, every_name: bool
) -> None:
    """Each stage has its own name for it; in one process there is one tensor, listed once, under its first name."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(deep("gpt2"), dtype=torch.float64).save_pretrained(
            tmp_path
        )
    asked = str(tmp_path), word, every_name
    expected = _frozen_by_a_name(*asked)
    ranks = pools(2).run(_frozen_by_a_name, *asked)
    assert ("transformer.wte.weight" in expected[0][1]) == (word == "lm_head" and not every_name)
    assert "transformer.wte.weight" in expected[1][1]
    for part, (losses, gradients) in enumerate(expected):
        both = {**ranks[0][part][1], **ranks[1][part][1]}
        assert both.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(both[name], gradient, rtol=1e-5, atol=1e-8)
        for rank in ranks:
            assert rank[part][0] == pytest.approx(losses, rel=1e-6)


def test_recomputed_by_reentering_behind_a_frozen_stage(pools: Pools, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(deep("llama")).save_pretrained(tmp_path)
    plain, reentrant = (
        pools(2).run(_gradients, str(tmp_path), recompute) for recompute in (False, True)
    )
    assert plain[1].keys() == reentrant[1].keys() != set()
    for name, gradient in plain[1].items():
        torch.testing.assert_close(reentrant[1][name], gradient)


def _gradients(directory: str, recompute: bool) -> dict[str, torch.Tensor]:
    model = hfscale.from_pretrained(directory, parallel=ParallelConfig(pp_size=2)).train()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": True})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".4." in name or ".3." in name)
    batch = ragged_batch(torch.Generator().manual_seed(2), 67, 4, 9, masked=False)
    hfscale.train_step(model, batch)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_layers_that_return_a_view(pools: Pools) -> None:
    config = OPTConfig(
        hidden_size=32, ffn_dim=48, num_hidden_layers=4, num_attention_heads=4, vocab_size=67, word_embed_proj_dim=32,
        max_position_embeddings=64, dropout=0.0, attention_dropout=0.0, layerdrop=0.0,
    )  # fmt: skip
    _equal(pools, Case(config, accumulation=4), pp_size=2, pipeline_schedule="zbv")
    config.layerdrop = 0.2
    with pytest.raises(
        PlanError, match=r"layerdrop=0\.2 skips layers at random.*use config\.layerdrop = 0"
    ):
        hfscale.plan(config, ParallelConfig(pp_size=2))
    with pytest.raises(
        PlanError, match=r"layerdrop=0\.2 skips layers at random, different ones on every rank"
    ):
        hfscale.plan(config, ParallelConfig(dp_shard_size=2))


def test_schedules_that_cannot_run_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    for text, words in (
        ("0F0,0B0,0U0\n1F0,1B0\n", "has updates"),
        ("(0F0;1F0)OVERLAP_F_B,1B0,0B0\n2F0,3F0,3B0,2B0\n", "split the pair"),
    ):
        path.write_text(text)
        layout = {"pp_size": 2, "virtual_stages": 2 if "3F0" in text else 1}
        with pytest.raises(ConfigError, match=words):
            hfscale.plan(deep("llama"), ParallelConfig(pipeline_schedule=str(path), **layout))
