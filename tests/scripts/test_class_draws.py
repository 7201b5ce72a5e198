"""What draws of classes take from a layout, and which of several ranks' errors is a draw's."""

import class_draws
import pytest
from class_cases import RewardCase
from class_sweep import ended
from transformers import GPT2Config

from hfscale import ParallelConfig
from tests.fuzz.children import Ended
from tests.fuzz.forked import RanksFailed

FIELDS = {"accumulation": 1, "build": "from_pretrained"}


def test_stages_have_whole_batches_of_pairs() -> None:
    pairs = RewardCase(GPT2Config())
    stages = ParallelConfig(pp_size=2, pipeline_schedule="1f1b")
    assert class_draws.fitted(pairs.by_step(), stages, FIELDS).accumulation == 2
    assert class_draws.fitted(pairs, stages, FIELDS).accumulation == 1
    assert class_draws.fitted(pairs, ParallelConfig(tp_size=2), FIELDS).accumulation == 1


@pytest.mark.parametrize("refused", [False, True])
def test_the_error_of_a_draw_is_of_the_rank_that_says_why(refused: bool) -> None:
    heard = Ended("", "ConfigError: loss_fn failed on 1 other rank(s): see their error", True)
    why = Ended("", "ValueError: not enough values to unpack", refused)
    verdict = "refused" if refused else "crash"
    assert ended(RanksFailed([heard, why])) == (verdict, why.error)
