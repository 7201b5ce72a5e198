"""TRL's trainers with ``use_vllm=True``: a run in a layout logs the numbers of one in a single process. The engine is a
stand-in, which scores with the weights that it was sent; tests/engines has the real one.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
)

import hfscale
import hfscale.trl
from hfscale import ParallelConfig
from hfscale.testing import RankPool

from ...refusals import refusal_of
from ...tiny_models import tiny
from .script import Case, assert_equal, length_reward, rows, run, save_rows, tokenizer
from .stand_in import GROUP, NF4, standing_in
from .test_parity import GENERATES, LORA

Pools = Callable[[int], RankPool]
Layout = dict[str, Any]
SERVER = {**GENERATES, "num_generations": GROUP, "use_vllm": True, "vllm_mode": "server"}
SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
GRPO = Case("GRPOTrainer", "prompt", SERVER, more={"reward_funcs": length_reward})
CASES = {
    "grpo": GRPO,
    "mixture": replace(GRPO, arguments={**SERVER, "beta": 0.0, "router_aux_loss_coef": 0.0}),
    "lora": replace(GRPO, lora=LORA),
    "qlora": replace(
        GRPO, lora=replace(LORA, init_lora_weights=False), load={"quantization_config": NF4}
    ),
    "rloo": replace(GRPO, trainer="RLOOTrainer"),
    "8 bits": replace(
        GRPO,
        arguments={**SERVER, "vllm_mode": "colocate"},
        lora=replace(LORA, init_lora_weights=False),
        load={"quantization_config": BitsAndBytesConfig(load_in_8bit=True)},
    ),
}
TP2 = {"tp_size": 2}
DP2 = {"dp_shard_size": 2}
PP2 = {"pp_size": 2}
CP2 = {"cp_size": 2}
RUNS: list[tuple[str, Layout, str]] = [
    *(("grpo", layout, "server") for layout in (TP2, DP2, PP2, CP2)),
    *(("grpo", layout, "colocate") for layout in (TP2, DP2, PP2)),
    *(("lora", layout, mode) for layout, mode in ((TP2, "colocate"), (PP2, "server"))),
    ("rloo", PP2, "server"),
    ("mixture", {"ep_size": 2}, "server"),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("start")
    tokens = {"eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0}
    dense = tiny("llama", num_hidden_layers=4, **tokens)
    mixture = MixtralConfig(**SIZES, **tokens)
    for place, config in ((made, dense), (made / "mixture", mixture)):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(place)
        tokenizer(place)
        save_rows(place, "prompt", 24, 1)
        save_rows(place, "prompt", 8, 2)
    return str(made)


def start_of(name: str, path: str) -> str:
    return f"{path}/mixture" if name == "mixture" else path


def run_with_engine(
    case: Case, path: str, out: str, layout: Layout | None
) -> list[dict[str, float]]:
    with standing_in(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(case, path, out, layout)


@pytest.fixture(scope="module")
def expected(path: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    known: dict[str, Any] = {}

    def find(name: str) -> Any:
        if name not in known:
            out = str(tmp_path_factory.mktemp("stock"))
            known[name] = run_with_engine(CASES[name], start_of(name, path), out, None)
        return known[name]

    return find


@pytest.mark.daily("grpo-layout2-server")
@pytest.mark.parametrize(("name", "layout", "mode"), RUNS)
def test_logs_equal_one_process(
    pools: Pools,
    expected: Callable[[str], Any],
    path: str,
    name: str,
    layout: Layout,
    mode: str,
    tmp_path: Path,
) -> None:
    stock = expected(name)
    case = replace(CASES[name], arguments={**CASES[name].arguments, "vllm_mode": mode})
    size = ParallelConfig(**layout).total_size
    for found in pools(size).run(
        run_with_engine, case, start_of(name, path), str(tmp_path), layout
    ):
        steps = [row for row in found if "loss" in row]
        assert len(steps) == 3
        assert all(row["sampling/sampling_logp_difference/max"] < 1e-5 for row in steps)
        if name == "rloo":  # TRL's drops the engine's log-probabilities
            found = [
                {key: value for key, value in row.items() if "logp_difference" not in key}
                for row in found
            ]
        assert_equal(found, stock, layout)


def test_an_engine_serves_adapters_over_weights_in_4_bits(
    pools: Pools, path: str, tmp_path: Path
) -> None:
    case = replace(
        CASES["qlora"], arguments={**SERVER, "vllm_mode": "colocate", "learning_rate": 0.3}
    )
    for found in pools(2).run(run_with_engine, case, path, str(tmp_path), PP2):
        for row in (row for row in found if "loss" in row):
            # TRL casts the adapters that train to bfloat16, and PEFT those that it loads to float32.
            assert row["sampling/sampling_logp_difference/max"] < 2e-2


def refused(name: str, path: str, out: str) -> str:
    def without_case() -> Any:
        with standing_in(path):
            parallel = ParallelConfig(**TP2)
            if name == "resized":
                model = hfscale.from_pretrained(path, parallel=parallel, resize_token_embeddings=99)
            else:
                model = hfscale.from_config(tiny("llama"), parallel=parallel)
            arguments = {
                **SERVER,
                "vllm_mode": "colocate",
                "beta": 0.0,
                "bf16": False,
                "use_cpu": True,
                "report_to": [],
            }
            config = trl.GRPOConfig(out, per_device_train_batch_size=4, **arguments)
            prompts = rows(path, "prompt", 1)
            words = PreTrainedTokenizerFast.from_pretrained(path)
            return hfscale.trl.GRPOTrainer(
                model, length_reward, config, prompts, processing_class=words
            )

    if name not in CASES:
        return refusal_of(without_case)
    return refusal_of(lambda: run_with_engine(CASES[name], path, out, TP2))


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("qlora", "vllm_mode='colocate' without"),
        ("8 bits", "nf4 alone, and this model's weights are in int8"),
        ("from no checkpoint", "hfscale.from_pretrained"),
        ("resized", "must have the model's 99 tokens"),
    ],
)
def test_what_an_engine_cannot_be_sent_is_refused(
    pools: Pools, path: str, name: str, advice: str, tmp_path: Path
) -> None:
    for message in pools(2).run(refused, name, path, str(tmp_path)):
        assert advice in message


def stale(path: str, out: str) -> tuple[int, int]:
    """The step of the engine's weights, before and after the best checkpoint is loaded."""
    with standing_in(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = hfscale.from_pretrained(path, dtype=torch.float32)
        arguments = {
            **SERVER,
            "bf16": False,
            "use_cpu": True,
            "report_to": [],
            "save_strategy": "steps",
        }
        arguments |= {
            "max_steps": 1,
            "save_steps": 1,
            "per_device_train_batch_size": GROUP,
            "beta": 0.0,
        }
        config = trl.GRPOConfig(out, **arguments)
        prompts = rows(path, "prompt", 1)
        words = PreTrainedTokenizerFast.from_pretrained(path)
        trainer = hfscale.trl.GRPOTrainer(
            model, length_reward, config, prompts, processing_class=words
        )
        trainer.train()
        before = trainer._last_loaded_step
        trainer.state.best_model_checkpoint = f"{out}/checkpoint-1"
        trainer._load_best_model()
        return before, trainer._last_loaded_step


def test_the_best_weights_are_sent_anew(path: str, tmp_path: Path) -> None:
    before, after = stale(path, str(tmp_path))
    assert before >= 0
    assert after == -1
