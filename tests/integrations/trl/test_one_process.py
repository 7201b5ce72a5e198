"""In one process TRL's trainers take what is refused for reasons of several ranks, and log what stock ones do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hfscale.testing import RankPool

from ...refusals import refusal_of
from ...tiny_models import tiny
from .script import Case, assert_equal, length_reward, rollouts, run, save_rows, tokenizer
from .test_parity import GENERATES

Pools = Callable[[int], RankPool]
pytestmark = pytest.mark.filterwarnings("ignore")


def made(path: Path, tied: bool) -> str:
    torch.manual_seed(0)
    config = tiny(
        "llama", eos_token_id=1, bos_token_id=None, pad_token_id=0, tie_word_embeddings=tied
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    tokenizer(path)
    save_rows(path, "prompt", 24, 1)
    return str(path)


def case(cast: bool, beta: float) -> Case:
    asked = {**GENERATES, "cast_lm_head_to_fp32": cast, "beta": beta, "max_grad_norm": 1e9}
    more = {"reward_funcs": length_reward, "rollout_func": rollouts}
    return Case("GRPOTrainer", "prompt", asked, load={"dtype": torch.bfloat16}, more=more)


def logged(
    path: str, out: Path, layout: dict[str, Any] | None, cast: bool, beta: float
) -> list[dict[str, float]]:
    """Return what was logged but norms, whose squares stock code sums in bfloat16."""
    rows = run(case(cast, beta), path, str(out), layout)
    return [{name: value for name, value in row.items() if name != "grad_norm"} for row in rows]


@pytest.mark.parametrize(("tied", "beta"), [(False, 0.1), (True, 0.0)])
def test_a_head_in_float32_is_that_of_stock(tmp_path: Path, tied: bool, beta: float) -> None:
    path = made(tmp_path, tied)
    expected = logged(path, tmp_path / "stock", None, True, beta)
    found = logged(path, tmp_path / "ours", {}, True, beta)
    assert_equal(found, expected, {})
    without = logged(path, tmp_path / "without", None, False, beta)
    assert without != expected


def refused(path: str, out: str) -> str:
    return refusal_of(lambda: run(case(True, 0.0), path, out, {"tp_size": 2}))


def test_a_cut_head_is_not_cast(pools: Pools, tmp_path: Path) -> None:
    path = made(tmp_path, False)
    for message in pools(2).run(refused, path, str(tmp_path / "ours")):
        assert "cast_lm_head_to_fp32=True needs the full output head" in message
