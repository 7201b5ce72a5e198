"""TRL's trainers with an optimizer of the script's own, which was made before the model is cut."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from torch.optim.lr_scheduler import ExponentialLR
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import hfscale.trl
from hfscale import ParallelConfig
from hfscale.testing import RankPool

from ...tiny_models import tiny
from .script import length_reward, rollouts, rows, save_rows, tokenizer

Pools = Callable[[int], RankPool]
Layout = dict[str, Any]
GENERATES = {"num_generations": 4, "max_completion_length": 6, "beta": 0.0}
ROWS_AND_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "SFT": ("text", {}),
    "DPO": ("pair", {}),
    "GRPO": ("prompt", GENERATES),
}
REWARDED = {"reward_funcs": length_reward, "rollout_func": rollouts}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("start")
    config = tiny("llama", eos_token_id=1, bos_token_id=None, pad_token_id=0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(made)
    tokenizer(made)
    for kind, _ in ROWS_AND_OPTIONS.values():
        save_rows(made, kind, 24, 1)
    return str(made)


def trained(path: str, out: str, name: str, layout: Layout | None) -> list[float]:
    """Return loss, norm and rate of three steps; the optimizer and its schedule are older than the cut."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = ExponentialLR(optimizer, 0.8)
    kind, options = ROWS_AND_OPTIONS[name]
    world = ParallelConfig(**layout or {}).batch_world
    config = getattr(trl, f"{name}Config")(
        out,
        per_device_train_batch_size=4 // world,
        max_steps=3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **options,
    )
    made = getattr(trl if layout is None else hfscale.trl, f"{name}Trainer")
    if layout is not None:
        made = partial(made, parallel=ParallelConfig(**layout))
    trainer = made(
        model=model,
        args=config,
        train_dataset=rows(path, kind, 1),
        processing_class=PreTrainedTokenizerFast.from_pretrained(path),
        optimizers=(optimizer, schedule),
        **(REWARDED if name == "GRPO" else {}),
    )
    trainer.train()
    keys = ("loss", "grad_norm", "learning_rate")
    return [row[key] for row in trainer.state.log_history if "loss" in row for key in keys]


@pytest.fixture(scope="module")
def expected(path: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[float]]:
    known: dict[str, list[float]] = {}

    def find(name: str) -> list[float]:
        if name not in known:
            known[name] = trained(path, str(tmp_path_factory.mktemp("stock")), name, None)
        return known[name]

    return find


@pytest.mark.filterwarnings("ignore")
@pytest.mark.daily("SFT-layout1", "DPO-layout0", "GRPO-layout1")
@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"dp_shard_size": 2}])
@pytest.mark.parametrize("name", ROWS_AND_OPTIONS)
def test_an_earlier_optimizer_trains_the_cut_model(
    pools: Pools,
    expected: Callable[[str], list[float]],
    path: str,
    name: str,
    layout: Layout,
    tmp_path: Path,
) -> None:
    stock = expected(name)
    for found in pools(2).run(trained, path, str(tmp_path), name, layout):
        assert found == pytest.approx(stock, rel=1e-4, abs=1e-6)
