"""Second models of TRL's trainers, stock ones too: reward models and references log the numbers of one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)
from trl.trainer.base_config import _BaseConfig

import hfscale.trl
from hfscale import ParallelConfig
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of

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
from .test_parity import GENERATES

Pools = Callable[[int], RankPool]
Layout = dict[str, Any]
TP2 = {"tp_size": 2}
DP2 = {"dp_shard_size": 2}
PP2 = {"pp_size": 2}


def reward_by_path(path: str) -> dict[str, Any]:
    return {"reward_funcs": f"{path}/ranker"}


def rewards_of_every_form(path: str) -> dict[str, Any]:
    """A stock model, a base whose head is drawn anew, and a function."""
    ranker = AutoModelForSequenceClassification.from_pretrained(f"{path}/ranker", num_labels=1)
    return {"reward_funcs": [ranker, path, length_reward]}


def stock_reference(path: str) -> dict[str, Any]:
    return {
        "ref_model": AutoModelForCausalLM.from_pretrained(f"{path}/reference", dtype=torch.float32)
    }


# Other than zero at the start, so that their copy is no model without adapters.
ADAPTERS = LoraConfig(
    r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
)
PLAIN = {"optim": "sgd", "learning_rate": 0.1, "gradient_checkpointing": True}
CASES = {
    "adapted": Case("DPOTrainer", "pair", PLAIN, adapted=ADAPTERS),
    "kto_adapted": Case(
        "KTOTrainer", "label", {**PLAIN, "gradient_checkpointing": False}, adapted=ADAPTERS
    ),
    "grpo_adapted": Case(
        "GRPOTrainer",
        "prompt",
        GENERATES,
        adapted=ADAPTERS,
        more={"rollout_func": rollouts, "reward_funcs": length_reward},
    ),
    "dpo": Case("DPOTrainer", "pair", made=stock_reference),
    "kto": Case("KTOTrainer", "label", {"max_steps": 2}, made=stock_reference),
    "grpo": Case(
        "GRPOTrainer", "prompt", GENERATES, more={"rollout_func": rollouts}, made=reward_by_path
    ),
    "forms": Case(
        "GRPOTrainer",
        "prompt",
        GENERATES,
        more={"rollout_func": rollouts},
        made=rewards_of_every_form,
    ),
    "rloo": Case("RLOOTrainer", "prompt", GENERATES, made=rewards_of_every_form),
}


def comparable(name: str, logs: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return logs without what counts the parameters of TRL's adapter ``ref``, which are none of the model's here."""
    left_out = {"total_flos"} if "adapted" in name else set()
    return [{key: value for key, value in row.items() if key not in left_out} for row in logs]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("start")
    config = tiny(
        "llama",
        num_hidden_layers=4,
        num_labels=1,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(made)
    ranker = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    ranker.save_pretrained(made / "ranker")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
        made / "reference"
    )
    tokenizer(made)
    tokenizer(made / "ranker")
    for kind in {case.data for case in CASES.values()}:
        save_rows(made, kind, 24, 1)
    return str(made)


@pytest.fixture(scope="module")
def expected(path: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    return once_each(
        lambda name: run(CASES[name], path, str(tmp_path_factory.mktemp("stock")), None)
    )


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("forms", TP2),
        ("forms", DP2),
        ("grpo", PP2),
        ("dpo", PP2),
        ("kto", TP2),
        *(("adapted", layout) for layout in (TP2, DP2, PP2)),
        *(
            pytest.param(name, DP2, marks=pytest.mark.slow)
            for name in ("kto_adapted", "grpo_adapted")
        ),
        pytest.param("dpo", DP2, marks=pytest.mark.slow),
        pytest.param("rloo", TP2, marks=pytest.mark.slow),
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
        run, CASES[name], path, str(tmp_path), layout
    ):
        assert_equal(comparable(name, found), comparable(name, stock), layout)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["forms", "dpo", "adapted"])
def test_one_process_logs_what_stock_does(
    expected: Callable[[str], Any], path: str, name: str, tmp_path: Path
) -> None:
    found = run(CASES[name], path, str(tmp_path), {})
    assert_equal(comparable(name, found), comparable(name, expected(name)), {})


def made_without_args(path: str, model: Any, layout: Layout) -> list[Any]:
    """A trainer that gets no config: its model's precision, whether it computes in bfloat16, where it writes."""

    def on_cpu(config: Any) -> None:
        config.use_cpu = True
        stock(config)

    stock = _BaseConfig.__post_init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_BaseConfig, "__post_init__", on_cpu)
        given = {
            "train_dataset": rows(path, "pair", 1),
            "processing_class": PreTrainedTokenizerFast.from_pretrained(path),
        }
        trainer = hfscale.trl.DPOTrainer(model, None, parallel=ParallelConfig(**layout), **given)
    precisions = {
        runtime_of(each).options.mixed_precision for each in (trainer.model, trainer.ref_model)
    }
    return [precisions, trainer.args.bf16, trainer.args.output_dir]


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_without_args_computes_as_trl_does(pools: Pools, path: str) -> None:
    expected = [{"bf16"}, True, f"{Path(path).name}-DPO"]
    assert made_without_args(path, path, {}) == expected
    for found in pools(2).run(made_without_args, path, path, TP2):
        assert found == expected


@pytest.mark.filterwarnings("ignore")
def test_a_built_model_keeps_its_precision_without_args(path: str) -> None:
    model = hfscale.from_pretrained(path, parallel=ParallelConfig(), dtype=torch.float32)
    assert made_without_args(path, model, {})[:2] == [{"no"}, False]
