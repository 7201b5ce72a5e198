"""Sequences that are cut equal one process: loss, every gradient, norm, weights after two steps, in float64."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ParallelConfig
from hfscale.models.precision import keep_float64
from hfscale.testing import Case, RankPool, assert_layout_equal
from hfscale.testing.parity import ragged_batch

from ...families import config_of
from ...mixtures import EAGER, gpt_oss, qwen2_moe, qwen3_moe
from ...sweeps import cases, pairs
from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
METHODS = ("gather", "ring", "heads")
ODD = (17, 8, 13)


def equal(pools: Pools, case: Case, **sizes: Any) -> None:
    layout = ParallelConfig(**sizes)
    assert_layout_equal(case, layout, pools(layout.total_size))


@pytest.mark.daily("mistral-gather")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_methods(pools: Pools, family: str, method: str) -> None:
    """Two key/value heads for four of queries; a window; padding at the end of a row; uneven lengths."""
    changes = {"sliding_window": 5} if family == "mistral" else {}
    equal(pools, Case(tiny(family, **changes), lengths=ODD), cp_size=2, cp_method=method)


@pytest.mark.daily("heads")
@pytest.mark.parametrize("method", METHODS)
def test_four_ranks(pools: Pools, method: str) -> None:
    """More ranks than key/value heads, and pieces of a single token."""
    equal(pools, Case(tiny("llama"), lengths=(17, 7)), cp_size=4, cp_method=method)


@pytest.mark.daily("gpt_oss")
@pytest.mark.parametrize(
    "family", cases(["llama", "mistral", "gpt_oss"], daily=["llama", "gpt_oss"])
)
def test_heads_in_groups_around_a_ring(pools: Pools, family: str) -> None:
    """Six heads are shared out to groups of two of four ranks."""
    heads = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
    if family == "gpt_oss":
        case = Case(gpt_oss(**heads), hf_kwargs=EAGER, lengths=(17, 9))
    else:
        case = Case(
            tiny(family, **heads, **({"sliding_window": 5} if family == "mistral" else {})),
            lengths=(17, 9),
        )
    equal(pools, case, cp_size=4, cp_method="heads_ring")


@pytest.mark.slow
def test_heads_in_groups_with_other_axes(pools: Pools) -> None:
    heads = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
    equal(
        pools,
        Packed(tiny("llama", **heads), lengths=(17, 9)),
        cp_size=4,
        cp_method="heads_ring",
        dp_shard_size=2,
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_sinks_and_windows_in_a_mixture(pools: Pools, method: str) -> None:
    equal(pools, Case(gpt_oss(), hf_kwargs=EAGER, lengths=ODD), cp_size=2, cp_method=method)


AXES: dict[str, dict[str, Any]] = {
    "tp": {"tp_size": 2},
    "sequence": {"tp_size": 2, "sequence_parallel": True},
    "shard": {"dp_shard_size": 2},
    "replicate": {"dp_replicate_size": 2},
    "pp": {"pp_size": 2, "num_microbatches": 2},
    "pp-zbv": {"pp_size": 2, "num_microbatches": 4, "pipeline_schedule": "zbv"},
    "pp-tp": {"pp_size": 2, "tp_size": 2, "num_microbatches": 2},
}


@pytest.mark.daily("pp-zbv", "sequence")
@pytest.mark.parametrize("axes", cases(AXES, daily=AXES.keys() - {"tp", "replicate", "pp"}))
def test_with_other_axes(pools: Pools, axes: str) -> None:
    layers = {"num_hidden_layers": 4} if "zbv" in axes else {}
    accumulation = AXES[axes].get("num_microbatches", 2)
    case = Case(
        tiny("llama", tie_word_embeddings=True, **layers),
        lengths=(17, 17, 8, 8),
        accumulation=accumulation,
    )
    equal(pools, case, cp_size=2, **AXES[axes])


@pytest.mark.daily("{'ep_size': 2}")
@pytest.mark.parametrize(
    "sizes", [{"ep_size": 2}, {"ep_size": 2, "tp_size": 2}, {"ep_size": 4}], ids=str
)
def test_experts_over_context_ranks(pools: Pools, sizes: dict[str, int]) -> None:
    equal(pools, Case(qwen2_moe(), hf_kwargs=EAGER, lengths=ODD), cp_size=2, **sizes)


class Packed(Case):
    """Two examples in every row."""

    def batches(self, batch_world: int) -> Any:
        found = super().batches(batch_world)
        for microbatch in (m for step in found for rank in step for m in rank):
            del microbatch["attention_mask"]
            rows, length = microbatch["input_ids"].shape
            positions = torch.cat((torch.arange(5), torch.arange(length - 5)))
            microbatch["position_ids"] = positions.expand(rows, -1)
            microbatch["labels"][:, 5] = -100  # predicted across the border
        return found

    def reference_step(self, model: Any, step: Any) -> list[Tensor]:
        return super().reference_step(
            model, [[{**m, "use_cache": False} for m in rank] for rank in step]
        )


@pytest.mark.daily("mistral-ring")
@pytest.mark.parametrize(
    ("family", "method"),
    pairs(
        ["llama", "mistral"],
        METHODS,
        daily=[*(("mistral", method) for method in METHODS), ("llama", "heads")],
    ),
)
def test_packed_rows(pools: Pools, family: str, method: str) -> None:
    """Windows count from where an example begins."""
    changes = {"sliding_window": 3} if family == "mistral" else {}
    equal(pools, Packed(tiny(family, **changes), lengths=(17, 9)), cp_size=2, cp_method=method)


class Apart(Packed):
    """The same, compared with the examples one by one: stock code hands states from one to the next."""

    def reference_step(self, model: Any, step: Any) -> list[Tensor]:
        names = ("input_ids", "labels")
        alone = [
            [
                {name: m[name][:, part] for name in names}
                for m in rank
                for part in (slice(5), slice(5, None))
            ]
            for rank in step
        ]
        return super().reference_step(model, alone)


@pytest.mark.daily("opt")
@pytest.mark.parametrize("family", ["inkling_text", "qwen4_exp_text", "opt"])
def test_packed_rows_of_attention_or_positions_in_a_familys_own_code(
    pools: Pools, family: str
) -> None:
    equal(pools, Apart(config_of(family), lengths=(17, 9), hf_kwargs=EAGER), cp_size=2)


def _plainly(directory: str, layout: dict[str, Any]) -> list[Tensor]:
    model = hfscale.from_pretrained(
        directory, parallel=ParallelConfig(**layout), dtype=torch.float64
    ).eval()
    ids = torch.arange(2, 28).view(2, 13)
    logits = model(input_ids=ids).logits
    model(input_ids=ids, labels=ids).loss.backward()
    norm = hfscale.clip_grad_norm_(model, 1e9)
    with torch.no_grad():
        made = model.generate(ids[:1], max_new_tokens=3, do_sample=False)
    return [
        logits.detach(),
        norm,
        made,
        hfscale.eval_step(model, {"input_ids": ids, "labels": ids}),
    ]


@pytest.mark.daily("{}")
@pytest.mark.parametrize("axes", [{}, {"tp_size": 2}], ids=str)
def test_whole_sequences_go_through_each_rank_outside_of_steps(
    pools: Pools, tmp_path: Path, axes: dict[str, int]
) -> None:
    """Plain loops, generation and logits are right, and nothing is cut."""
    AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float64).save_pretrained(tmp_path)
    wanted = _plainly(str(tmp_path), {})
    for found in pools(ParallelConfig(cp_size=2, **axes).total_size).run(
        _plainly, str(tmp_path), {"cp_size": 2, **axes}
    ):
        for here, one in zip(found, wanted, strict=True):
            torch.testing.assert_close(here, one, rtol=1e-6, atol=1e-9)


@pytest.mark.daily("lfm2-axes0-True")
@pytest.mark.parametrize(
    ("family", "axes", "checkpointing"),
    [
        ("lfm2", {}, True),
        ("bamba", {}, False),
        ("falcon_h1", {"tp_size": 2}, False),
        pytest.param("recurrent_gemma", {"dp_shard_size": 2}, True, marks=pytest.mark.slow),
        ("jamba", {"pp_size": 2, "num_microbatches": 2}, False),
    ],
)
def test_mixers_besides_attention(
    pools: Pools, family: str, axes: dict[str, int], checkpointing: bool
) -> None:
    """Convolutions and recurrences, on parts with states, or on whole sequences where the code of a family takes none
    (recurrent_gemma); half of the rows are padded, which one rank alone sees.
    """
    case = Case(config_of(family), lengths=(17, 9), checkpointing=checkpointing, hf_kwargs=EAGER)
    equal(pools, case, cp_size=2, **axes)


OWN_ATTENTION: dict[str, tuple[str, dict[str, int], bool]] = {
    "alibi": ("bloom", {}, True),
    "alibi-dp": ("mpt", {"dp_shard_size": 2}, False),
    "rotary-tp": ("falcon", {"tp_size": 2}, False),
    "windows-pp": ("gpt_neo", {"pp_size": 2, "num_microbatches": 2}, True),
    "indexer": ("glm_moe_dsa", {}, True),
    "compressed keys": ("deepseek_v4", {"dp_shard_size": 2}, True),
    "bias of distances-tp": ("inkling_text", {"tp_size": 2}, False),
    "table of positions-pp": ("roformer", {"pp_size": 2, "num_microbatches": 2}, False),
    "convolved keys": ("zaya", {}, True),
    "blocks of keys": ("qwen4_exp_text", {}, True),
    "positions from padding": ("roberta", {"tp_size": 2}, True),
}


@pytest.mark.daily("alibi", "positions from padding")
@pytest.mark.parametrize(
    "case", cases(OWN_ATTENTION, daily=["alibi", "rotary-tp", "positions from padding"])
)
def test_attention_in_a_familys_own_code(pools: Pools, case: str) -> None:
    """It reads masks and biases by itself, and runs on whole sequences; rows are padded, and layers recomputed."""
    family, axes, checkpointing = OWN_ATTENTION[case]
    config = config_of(family)
    equal(
        pools,
        Case(config, lengths=(17, 9), checkpointing=checkpointing, hf_kwargs=EAGER),
        cp_size=2,
        **axes,
    )


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_a_rank_with_one_token_takes_no_bias_for_it(pools: Pools, family: str) -> None:
    """Ranks have two tokens and one, or one each; biases are ``[heads, 1, tokens]``."""
    case = Case(config_of(family), lengths=(3, 2), hf_kwargs=EAGER)
    equal(pools, case, cp_size=2)


class OtherPadding(Case):
    """Microbatches that differ in nothing but what they hide, and in lengths whose parts are alike on some rank."""

    def batches(self, batch_world: int) -> Any:
        found = super().batches(batch_world)
        for step in found:
            for rank in step:
                rank[0]["attention_mask"][0, :5] = 0
        return found


@pytest.mark.slow
def test_recomputed_mixers_know_their_microbatch(pools: Pools) -> None:
    config = config_of("lfm2", layer_types=["conv", "full_attention"] * 2, num_hidden_layers=4)
    case = OtherPadding(config, lengths=(13, 13, 12), accumulation=3, checkpointing=True)
    equal(pools, case, cp_size=2, pp_size=2, num_microbatches=3)


ROUTING = hfscale.RoutingConfig(balance_loss=0.3, z_loss=0.05)


def _balanced(directory: str, layout: dict[str, Any]) -> list[Any]:
    model = hfscale.from_pretrained(
        directory, parallel=ParallelConfig(**layout), dtype=torch.float64, routing=ROUTING, **EAGER
    ).train()
    generator = torch.Generator().manual_seed(4)
    batch = [ragged_batch(generator, 67, 2, length, masked=False) for length in (13, 8)]
    with keep_float64():
        loss = hfscale.train_step(model, batch)
        norm = hfscale.clip_grad_norm_(model, 1e9)
    load = hfscale.expert_load(model)
    layers = [[*each.tokens, each.balance_loss, each.z_loss] for each in load.layers]
    return [loss.item(), norm.item(), *(value for layer in layers for value in layer)]


@pytest.mark.daily("{'ep_size': 2}")
@pytest.mark.parametrize("axes", [{}, {"ep_size": 2}, {"ep_size": 2, "tp_size": 2}], ids=str)
def test_experts_are_balanced_over_whole_sequences(
    pools: Pools, tmp_path: Path, axes: dict[str, int]
) -> None:
    AutoModelForCausalLM.from_config(qwen3_moe(), dtype=torch.float64).save_pretrained(tmp_path)
    wanted = _balanced(str(tmp_path), {})
    layout = {"cp_size": 2, **axes}
    for found in pools(ParallelConfig(**layout).total_size).run(_balanced, str(tmp_path), layout):
        assert found == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize(
    "routing", [{"router": "switch"}, {"router": "noisy_topk"}, {"capacity_factor": 1.0}]
)
def test_routers_that_look_at_whole_sequences_are_refused(routing: dict[str, Any]) -> None:
    with pytest.raises(hfscale.ConfigError, match="cp_size=2 splits sequences over ranks"):
        hfscale.from_config(
            qwen3_moe(),
            parallel=ParallelConfig(cp_size=2),
            routing=hfscale.RoutingConfig(**routing),
        )


def _left_padded(directory: str) -> str:
    model = hfscale.from_pretrained(directory, parallel=ParallelConfig(cp_size=2)).train()
    ids = torch.arange(2, 28).view(2, 13)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    try:
        hfscale.train_step(model, {"input_ids": ids, "attention_mask": mask, "labels": ids})
    except hfscale.ConfigError as error:
        return str(error)
    return ""


def test_padding_that_counts_is_refused(pools: Pools, tmp_path: Path) -> None:
    """OPT counts positions from where padding ends."""
    AutoModelForCausalLM.from_config(config_of("opt")).save_pretrained(tmp_path)
    assert all(
        "counts the positions of tokens from the end of a row's padding" in found
        for found in pools(2).run(_left_padded, str(tmp_path))
    )


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("cpmant", "something besides attention reads other tokens"),
        ("prophetnet", "the loss of this model is not one"),
    ],
)
def test_families_that_read_other_tokens_are_refused_by_the_plan(family: str, words: str) -> None:
    with pytest.raises(
        hfscale.PlanError, match=f"cp_size=2 does not fit '{family}'.*{words}.*use cp_size=1"
    ):
        hfscale.plan(config_of(family), ParallelConfig(cp_size=2))


@pytest.mark.daily("ring")
@pytest.mark.parametrize("method", METHODS)
def test_rotary_embeddings_that_look_at_the_length(pools: Pools, method: str) -> None:
    """Longer than what the family was trained on, as a whole; a part of it is not."""
    factors = {
        "long_factor": [4.0] * 4,
        "short_factor": [1.0] * 4,
        "original_max_position_embeddings": 12,
    }
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    config = tiny("llama", rope_parameters=rope, max_position_embeddings=64)
    equal(pools, Case(config, lengths=(17, 9)), cp_size=2, cp_method=method)


def test_recomputed_and_frozen(pools: Pools) -> None:
    case = Case(tiny("llama"), checkpointing=True, frozen=("layers.0", "embed"), lengths=ODD)
    equal(pools, case, cp_size=2)


class ShiftedByCaller(Case):
    def layout_step(self, model: Any, microbatches: list[dict[str, Tensor]]) -> Tensor:
        shifted = [functional.pad(each["labels"], (0, 1), value=-100) for each in microbatches]
        return hfscale.train_step(
            model,
            [
                {**each, "shift_labels": labels[:, 1:]}
                for each, labels in zip(microbatches, shifted, strict=True)
            ],
        )


def test_labels_that_the_caller_shifts(pools: Pools) -> None:
    """Models pass them on to every attention call, which ignores them."""
    equal(pools, ShiftedByCaller(tiny("llama"), lengths=ODD), cp_size=2)


@pytest.mark.daily("ring")
@pytest.mark.parametrize("method", METHODS)
def test_adapters(pools: Pools, method: str) -> None:
    peft = LoraConfig(r=3, target_modules="all-linear", lora_alpha=4)
    equal(pools, Case(tiny("llama"), peft=peft, lengths=ODD), cp_size=2, cp_method=method)
