"""One script with a trainer of TRL's, in one process and in a layout: every number that is logged is equal."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

import hfscale
from hfscale import ParallelConfig
from hfscale.testing import RankPool

from ...refusals import refusal_of
from ...tiny_models import tiny
from .script import (
    Case,
    assert_equal,
    length_reward,
    once_each,
    rollouts,
    rows,
    run,
    save_rows,
    tokenizer,
)

Pools = Callable[[int], RankPool]
Layout = dict[str, Any]
TP2 = {"tp_size": 2}
DP2 = {"dp_shard_size": 2}
PP2 = {"pp_size": 2}
BOTH = {"tp_size": 2, "dp_shard_size": 2}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
# Adam divides by gradients, some of which are roundings.
GENERATES = {
    "num_generations": 4,
    "max_completion_length": 6,
    "beta": 0.1,
    "optim": "sgd",
    "learning_rate": 0.1,
}
DISTILLS = {
    **{"max_completion_length": 6, "temperature": 1.3, "optim": "sgd", "learning_rate": 0.1},
    **{"teacher_model_init_kwargs": {"dtype": "float32"}, **EVALUATED},
}
CASES = {
    "sft": Case("SFTTrainer", "text", EVALUATED),
    "completion": Case(
        "SFTTrainer", "completion", {"loss_type": "dft", "gradient_checkpointing": True}
    ),
    "packed": Case("SFTTrainer", "text", {"packing": True, "max_length": 16}),
    "assistant": Case("SFTTrainer", "chat", {"assistant_only_loss": True}),
    "sft_lora": Case(
        "SFTTrainer", "text", {"seed": 7}, lora=LORA
    ),  # from which PEFT's first values are drawn
    "dpo": Case("DPOTrainer", "pair", {**EVALUATED, "gradient_checkpointing": True}),
    # Adam divides by gradients, which of some factors are roundings here.
    "dpo_lora": Case("DPOTrainer", "pair", {"optim": "sgd", "learning_rate": 0.1}, lora=LORA),
    "precomputed": Case("DPOTrainer", "pair", {"precompute_ref_log_probs": True}),
    "kto": Case("KTOTrainer", "label", {**EVALUATED, "max_steps": 2}),
    "reward": Case("RewardTrainer", "pair", EVALUATED),
    "grpo": Case("GRPOTrainer", "prompt", GENERATES, more={"reward_funcs": length_reward}),
    "rollouts": Case(
        "GRPOTrainer",
        "prompt",
        GENERATES,
        more={"reward_funcs": length_reward, "rollout_func": rollouts},
    ),
    "quantile": Case(
        "GRPOTrainer",
        "prompt",
        {**GENERATES, "top_entropy_quantile": 0.5},
        more={"reward_funcs": length_reward, "rollout_func": rollouts},
    ),
    "distillation": Case("DistillationTrainer", "prompt", DISTILLS, taught=True),
    "distillation_lora": Case(
        "DistillationTrainer", "prompt", {**DISTILLS, "beta": 0.5}, lora=LORA, taught=True
    ),
    "rloo": Case("RLOOTrainer", "prompt", GENERATES, more={"reward_funcs": length_reward}),
}


RARER = [
    ("completion", PP2),
    ("sft", {"cp_size": 2}),
    *((name, TP2) for name in ("completion", "packed", "assistant", "precomputed", "rloo")),
    *((name, DP2) for name in ("kto", "reward", "rollouts", "dpo_lora")),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("start")
    tokens = {"eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0}
    config = tiny("llama", num_hidden_layers=4, num_labels=1, **tokens)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(made)
    for place in (made, made / "ranker"):
        tokenizer(place)
        for kind in {case.data for case in CASES.values()}:
            save_rows(place, kind, 24, 1)
            save_rows(place, kind, 9, 2)  # which two data ranks cannot share evenly
    wider = tiny("llama", num_hidden_layers=3, hidden_size=48, **tokens)
    AutoModelForCausalLM.from_config(wider, dtype=torch.float32).save_pretrained(made / "teacher")
    ranker = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    ranker.save_pretrained(made / "ranker")
    return str(made)


def start_of(name: str, path: str) -> str:
    return f"{path}/ranker" if name == "reward" else path


@pytest.fixture(scope="module")
def expected(path: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    return once_each(
        lambda name: run(
            CASES[name], start_of(name, path), str(tmp_path_factory.mktemp("stock")), None
        )
    )


@pytest.mark.daily("grpo-layout16", "reward-layout15")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("sft", layout) for layout in (TP2, PP2)),
        ("completion", BOTH),
        *((name, PP2) for name in ("packed", "assistant")),
        *((name, PP2) for name in ("sft_lora", "dpo", "dpo_lora")),
        *((name, TP2) for name in ("dpo", "kto")),
        ("dpo", DP2),
        *(pytest.param(name, TP2, marks=pytest.mark.slow) for name in ("sft_lora", "dpo_lora")),
        pytest.param("kto", PP2, marks=pytest.mark.slow),
        ("precomputed", PP2),
        ("reward", TP2),
        ("grpo", TP2),
        ("rollouts", BOTH),
        ("distillation", TP2),
        pytest.param("distillation_lora", TP2, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in RARER),
    ],
)
def test_logs_equal_one_process(
    pools: Pools,
    expected: Callable[[str], Any],
    path: str,
    name: str,
    layout: Layout,
    tmp_path: Path,
) -> None:
    stock = expected(name)
    for found in pools(ParallelConfig(**layout).total_size).run(
        run, CASES[name], start_of(name, path), str(tmp_path), layout
    ):
        assert_equal(found, stock, layout)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "distillation"])
def test_data_ranks_generate_each_for_itself(
    pools: Pools, path: str, name: str, tmp_path: Path
) -> None:
    one, other = pools(2).run(run, CASES[name], path, str(tmp_path), DP2)
    assert one == other
    length = "completions/mean_length" if name == "grpo" else "entropy"
    assert all(row[length] > 0 for row in one if "loss" in row)


def refused(path: str, out: str, name: str, layout: Layout) -> str:
    short = replace(CASES[name], arguments={**CASES[name].arguments, "max_steps": 1})
    return refusal_of(lambda: run(short, path, out, layout))


def refused_without_accumulation(path: str, out: str) -> str:
    case = replace(CASES["sft"], arguments={"max_steps": 1, "gradient_accumulation_steps": 1})
    return refusal_of(lambda: run(case, path, out, PP2))


def test_what_was_not_given_is_not_to_be_left_out(pools: Pools, path: str, tmp_path: Path) -> None:
    for message in pools(2).run(refused_without_accumulation, path, str(tmp_path)):
        assert message.endswith(
            "use gradient_accumulation_steps=4 and per_device_train_batch_size=1, for the same rows per step"
        )
        assert "num_microbatches" not in message


@pytest.mark.parametrize(
    ("name", "advice"),
    [("grpo", "set use_vllm=True"), ("distillation", "generates with"), ("reward", "full output")],
)
def test_what_stages_cannot_do_is_refused(
    pools: Pools, path: str, name: str, advice: str, tmp_path: Path
) -> None:
    for message in pools(2).run(refused, start_of(name, path), str(tmp_path), name, PP2):
        assert advice in message
        assert "pp_size=1" in message


def test_context_ranks_do_not_generate(pools: Pools, path: str, tmp_path: Path) -> None:
    for message in pools(2).run(refused, path, str(tmp_path), "grpo", {"cp_size": 2}):
        assert "only some tokens of each sequence" in message
        assert "tp_size" in message


def test_a_stage_does_not_wait_for_entropies_of_others(
    pools: Pools, path: str, tmp_path: Path
) -> None:
    for message in pools(2).run(refused, path, str(tmp_path), "quantile", PP2):
        assert "top_entropy_quantile=0.5" in message


def trained_from_a_path(path: str, out: str) -> list[float]:
    """A policy given as a path, and the reference that TRL makes of it."""
    config = trl.DPOConfig(
        out, max_steps=1, per_device_train_batch_size=4, bf16=False, use_cpu=True, report_to=[], disable_tqdm=True,
        save_strategy="no", logging_steps=1,
    )  # fmt: skip

    class Mine(hfscale.TrainerMixin, trl.DPOTrainer):
        """A subclass of one's own."""

    trainer = Mine(
        path,
        args=config,
        train_dataset=rows(path, "pair", 1),
        processing_class=PreTrainedTokenizerFast.from_pretrained(path),
        parallel=ParallelConfig(tp_size=2),
    )
    trainer.train()
    held = [
        sum(p.numel() for p in model.parameters()) for model in (trainer.model, trainer.ref_model)
    ]
    return [*held, trainer.state.log_history[0]["loss"]]


def test_a_path_and_its_reference_are_cut(pools: Pools, path: str, tmp_path: Path) -> None:
    whole = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(path).parameters())
    for policy, reference, loss in pools(2).run(trained_from_a_path, path, str(tmp_path)):
        assert policy == reference < 0.6 * whole
        assert loss == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_a_stock_trainer_takes_a_model_of_one_process(
    expected: Callable[[str], Any], path: str, tmp_path: Path
) -> None:
    found = run(replace(CASES["sft"], ours=True), path, str(tmp_path), None)
    assert_equal(found, expected("sft"), {})
