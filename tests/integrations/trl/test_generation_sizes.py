"""How many completions a generation has, and in how many batches they are used, over ranks that share batches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trl

import hfscale.trl
from hfscale import ConfigError
from hfscale.integrations.trainer.generations import count_generations
from hfscale.testing import RankPool

from ...refusals import refusal_of

Pools = Callable[[int], RankPool]
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
TRAINERS = ("GRPO", "RLOO")
ON_CPU: dict[str, Any] = {"use_cpu": True, "bf16": False}


def sizes(out: str, kind: str, batches: int, given: dict[str, Any]) -> tuple[int, int]:
    """Return what a trainer makes of a config over so many distinct batches."""
    assert hasattr(hfscale.trl, f"{kind}Trainer")
    config = getattr(trl, f"{kind}Config")(
        out,
        per_device_train_batch_size=4 // batches,
        gradient_accumulation_steps=2,
        num_generations=2,
        **ON_CPU,
        **given,
    )
    count_generations(config, batches)
    return config.generation_batch_size, config.steps_per_generation


def sizes_or_refusal(out: str, kind: str, batches: int, given: dict[str, Any]) -> Any:
    try:
        return sizes(out, kind, batches, given)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize("batches", [1, 2])  # tensor ranks or stages, and data ranks
def test_what_is_asked_is_generated(pools: Pools, tmp_path: Path, kind: str, batches: int) -> None:
    expected = {
        None: (8, 2),
        "steps_per_generation=3": (12, 3),
        **{f"generation_batch_size={size}": (size, size // 4) for size in (4, 8, 12, 16)},
    }
    for asked, (size, steps) in expected.items():
        name, _, value = (asked or "").partition("=")
        given = {name: int(value)} if name else {}
        assert sizes(str(tmp_path), kind, 1, given) == (size, steps)
        for found in pools(2).run(sizes_or_refusal, str(tmp_path), kind, batches, given):
            assert found == (size, steps), asked


@pytest.mark.parametrize("size", [2, 10])
def test_a_size_that_does_not_divide_is_refused_by_the_numbers_of_the_user(
    pools: Pools, tmp_path: Path, size: int
) -> None:
    given = {"generation_batch_size": size}
    for message in pools(2).run(sizes_or_refusal, str(tmp_path), "GRPO", 1, given):
        assert f"got {size}: use {max(size // 4, 1) * 4}" in message
        assert "multiple of 4, which is" in message


def size_of_an_earlier_config(out: str, steps: int) -> Any:
    """A config of a class that no trainer of ours has met."""
    assert hasattr(hfscale.trl, "GRPOTrainer")
    config = trl.GRPOConfig(out, gradient_accumulation_steps=2, num_generations=2, **ON_CPU)
    del config._hfscale_asked_generation_batch_size
    config.steps_per_generation = steps
    found = refusal_of(lambda: count_generations(config, 1))
    return found, config.generation_batch_size


def test_a_config_from_before_the_import_is_refused_where_it_may_mean_two_things(
    pools: Pools, tmp_path: Path
) -> None:
    for message, _ in pools(2).run(size_of_an_earlier_config, str(tmp_path), 4):
        assert "import the trainer first" in message
    for message, size in pools(2).run(size_of_an_earlier_config, str(tmp_path), 2):
        assert message == "accepted"
        assert size == 2 * 8
