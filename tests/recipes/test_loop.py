"""The training loop of the scripts: the same curves through pipeline stages as in one process."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from datasets import Dataset

import hfscale
from hfscale.recipes.rows import Example, separate_rows
from hfscale.recipes.run_log import read_metrics
from hfscale.recipes.schema import PretrainRecipe, TrainingRecipe
from hfscale.recipes.trainer import Outcome, RecipeTrainer
from hfscale.testing import RankPool
from tests.tiny_models import tiny


def _sequences(count: int, seed: int) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 13, (count,), generator=generator).tolist()
    texts = [torch.randint(0, 20, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_dict(separate_rows([Example(text, text) for text in texts])).with_format(
        "torch"
    )


def _run(
    directory: str, layout: dict, microbatch_size: int | None, balanced: bool = False
) -> Outcome:
    recipe = PretrainRecipe(name=directory)
    recipe.data.sequence_length = 12
    recipe.training = TrainingRecipe(
        steps=3,
        batch_size=4,
        microbatch_size=microbatch_size,
        log_every=1,
        evaluate_every=2,
        learning_rate=0.01,
    )
    recipe.training.balanced_batches = balanced
    model = hfscale.from_config(
        tiny("llama", num_hidden_layers=4), parallel=hfscale.ParallelConfig(**layout)
    )
    return RecipeTrainer(model, recipe, _sequences(20, 0), _sequences(5, 1), None, 4.0).fit()


@pytest.mark.parametrize(
    ("layout", "microbatch_size"),
    [
        (
            {"num_microbatches": 4},
            None,
        ),  # cuts the step's four rows, and the fifth validation row with three that fill
        ({}, 2),  # two batches a step are two microbatches
        pytest.param(
            {"pipeline_schedule": "dualpipev"}, 1, marks=pytest.mark.slow
        ),  # takes no fewer than four
    ],
)
def test_curves_through_stages(
    pools: Callable[[int], RankPool], tmp_path: Path, layout: dict, microbatch_size: int | None
) -> None:
    """Of rows of different lengths, which are shared out by what they cost, and in one process as they come."""
    expected = _run(str(tmp_path / "one"), {}, None)
    (found, other) = pools(2).run(
        _run, str(tmp_path / "two"), {"pp_size": 2, **layout}, microbatch_size, True
    )
    assert found.validation_loss == other.validation_loss
    assert expected.validation_loss < expected.first_validation_loss
    curves = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two")]
    for kind, name in enumerate(("loss", "validation_loss")):
        one, two = ([record[name] for record in curve[kind]] for curve in curves)
        assert two == pytest.approx(one, rel=1e-5)
        assert len(one) == 3
