"""One script, transformers' Trainer in one process and hfscale's in a layout: every number that is logged is equal."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from hfscale import ParallelConfig
from hfscale.testing import RankPool

from ...families import config_of
from ...features.quantization.models import four_bits, wide
from ...mixtures import qwen3_moe
from ...tiny_models import tiny
from .script import Case, assert_equal, run

Pools = Callable[[int], RankPool]
Layout = dict[str, Any]
TP2 = {"tp_size": 2}
DP2 = {"dp_shard_size": 2}
CP2 = {"cp_size": 2}
PP2 = {"pp_size": 2, "num_microbatches": 4}
BALANCED_PP2 = {"pp_size": 2, "num_microbatches": 2}  # of rows as they come
ZBV = {"pp_size": 2, "pipeline_schedule": "zbv", "virtual_stages": 2, "num_microbatches": 4}
EP2 = {"ep_size": 2, "dp_shard_size": 2}

CASES = {
    "plain": Case(),
    "own": Case(
        kind="own", rows=16, evaluated=8
    ),  # with what is left over, data ranks repeat rows, as in stock code
    "smoothed": Case({"label_smoothing_factor": 0.1, "num_train_epochs": 1}),
    "loss_only": Case(
        {"num_train_epochs": 1, "train_sampling_strategy": "group_by_length"}, metrics=False
    ),
    "once": Case({"num_train_epochs": 1}),
    "bf16": Case({"num_train_epochs": 1, "bf16": True}),
    "balanced": Case({"train_sampling_strategy": "batch_rebalance"}, rows=20, batch=8),
    "compiled": Case({"num_train_epochs": 1, "torch_compile_backend": "eager"}),
    "lora": Case({"num_train_epochs": 1}),
    "qlora": Case({"num_train_epochs": 1}, load={"quantization_config": four_bits()}),
}


RARER = [("own", TP2), ("smoothed", TP2), ("loss_only", PP2)]
CONFIGS = {
    "llama": tiny("llama", num_hidden_layers=4, tie_word_embeddings=True),
    "qwen3_moe": qwen3_moe(),
    "wide": wide("llama"),
    "bart": config_of("bart"),  # whose loss is its own
}
ADAPTED = "-adapter"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints, and an adapter for each whose factors are not zero."""
    made = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for kind in (name, name + ADAPTED):
            made[kind] = str(tmp_path_factory.mktemp(kind))
        model.save_pretrained(made[name])
        lora = LoraConfig(
            r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
        )
        if name not in ("qwen3_moe", "bart"):
            get_peft_model(model, lora).save_pretrained(made[name + ADAPTED])
    return made


def case_of(name: str, family: str, paths: dict[str, str]) -> Case:
    case = CASES[name]
    return replace(case, lora=paths[family + ADAPTED]) if "lora" in name else case


@pytest.fixture(scope="module")
def expected(
    paths: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Any]:
    """What stock Trainer logs, once per case."""
    known: dict[tuple[str, str], Any] = {}

    def find(name: str, family: str) -> Any:
        if (name, family) not in known:
            out = str(tmp_path_factory.mktemp("stock"))
            known[name, family] = run(case_of(name, family, paths), paths[family], out, None)
        return known[name, family]

    return find


@pytest.mark.daily("plain-layout5", "balanced-layout11", "own-layout7")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(
            ("plain", layout)
            for layout in (TP2, PP2, ZBV, DP2, CP2, {**TP2, "sequence_parallel": True})
        ),
        pytest.param("plain", {"tp_size": 2, "dp_shard_size": 2}, marks=pytest.mark.slow),
        ("own", DP2),
        *(("smoothed", layout) for layout in (PP2, DP2)),
        ("loss_only", TP2),
        ("balanced", DP2),
        *(
            pytest.param("balanced", layout, marks=pytest.mark.slow)
            for layout in (TP2, CP2, BALANCED_PP2)
        ),
        *(pytest.param(name, layout, marks=pytest.mark.slow) for name, layout in RARER),
    ],
)
def test_logs_equal_one_process(
    pools: Pools, expected: Any, paths: dict[str, str], name: str, layout: Layout, tmp_path: Path
) -> None:
    stock = expected(name, "llama")
    for found in pools(ParallelConfig(**layout).total_size).run(
        run, CASES[name], paths["llama"], str(tmp_path), layout
    ):
        assert_equal(found, stock, layout)


@pytest.mark.slow
def test_a_loss_that_is_a_classes_own_over_context_ranks(
    pools: Pools, expected: Any, paths: dict[str, str], tmp_path: Path
) -> None:
    """Which stock code divides by the labels of each microbatch."""
    stock = expected("once", "bart")
    for found in pools(2).run(run, CASES["once"], paths["bart"], str(tmp_path), CP2):
        assert_equal(found, stock, CP2)


@pytest.mark.daily("layout1")
@pytest.mark.parametrize("layout", [TP2, PP2])
def test_mixed_precision_rounds_as_in_one_process(
    pools: Pools, expected: Any, paths: dict[str, str], layout: Layout, tmp_path: Path
) -> None:
    """Within four times of what bfloat16 does to one process, and two of its roundings."""
    exact = expected("once", "llama")["history"]
    stock = expected("bf16", "llama")["history"]
    (found, *_) = pools(2).run(run, CASES["bf16"], paths["llama"], str(tmp_path), layout)
    assert len(found["history"]) == len(stock) == len(exact)
    compared = 0
    for ours, theirs, whole in zip(found["history"], stock, exact, strict=True):
        for name in ("loss", "grad_norm", "eval_loss"):
            if name in theirs:
                allowed = max(4 * abs(theirs[name] - whole[name]), 2**-7 * abs(theirs[name]))
                assert abs(ours[name] - theirs[name]) <= allowed, (
                    theirs["step"],
                    name,
                    ours[name],
                    theirs[name],
                )
                compared += ours[name] != whole[name]
    assert compared > 3  # it did round


def run_compiled(case: Case, path: str, out: str, layout: Layout) -> tuple[dict[str, Any], int]:
    """What is logged, and how many graphs torch made of the layers."""
    torch.compiler.reset()
    counters.clear()
    found = run(case, path, out, layout), int(counters["stats"]["unique_graphs"])
    torch.compiler.reset()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [TP2, *(pytest.param(each, marks=pytest.mark.slow) for each in (PP2, DP2))]
)
def test_compiled_layers_log_what_plain_ones_do(
    pools: Pools, expected: Any, paths: dict[str, str], layout: Layout, tmp_path: Path
) -> None:
    stock = expected("once", "llama")
    for found, graphs in pools(2).run(
        run_compiled, CASES["compiled"], paths["llama"], str(tmp_path), layout
    ):
        assert_equal(found, stock, layout)
        assert graphs > 0


@pytest.mark.daily("layout1")
@pytest.mark.parametrize("layout", [EP2, TP2, PP2])
def test_mixtures_of_experts(
    pools: Pools, expected: Any, paths: dict[str, str], layout: Layout, tmp_path: Path
) -> None:
    stock = expected("plain", "qwen3_moe")
    for found in pools(2).run(run, CASES["plain"], paths["qwen3_moe"], str(tmp_path), layout):
        assert_equal(found, stock, layout)


@pytest.mark.daily("qlora-wide-layout4")
@pytest.mark.parametrize(
    ("name", "family", "layout"),
    [
        *(("lora", "llama", layout) for layout in (TP2, PP2, DP2)),
        *(("qlora", "wide", layout) for layout in (TP2, PP2, DP2)),
    ],
)
def test_adapters(
    pools: Pools,
    expected: Any,
    paths: dict[str, str],
    name: str,
    family: str,
    layout: Layout,
    tmp_path: Path,
) -> None:
    stock = expected(name, family)
    case = case_of(name, family, paths)
    for found in pools(2).run(run, case, paths[family], str(tmp_path), layout):
        assert_equal(found, stock, layout)
    assert (tmp_path / "final" / "adapter_model.safetensors").exists()
