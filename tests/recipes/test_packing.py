"""Packed rows: where examples go, and that none of them sees another."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

import hfscale
from hfscale import ParallelConfig
from hfscale.recipes.batch_sizes import evaluation_steps
from hfscale.recipes.rows import (
    IGNORED,
    Example,
    Rows,
    cut,
    divided,
    first_fit,
    packed_rows,
    separate_rows,
)
from hfscale.recipes.run_log import read_metrics
from hfscale.recipes.schema import PretrainRecipe, TrainingRecipe
from hfscale.recipes.tasks import TEXT
from hfscale.recipes.trainer import RecipeTrainer, measure
from hfscale.testing import Case, RankPool, assert_layout_equal

from ..tiny_models import tiny

Pools = Callable[[int], RankPool]

LENGTHS = (1, 6, 1, 4, 1, 9, 5, 2, 1, 12, 3)


def make_examples(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[Example]:
    """Random tokens; about a third of the labels do not count."""
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for length in lengths:
        ids = torch.randint(0, 67, (length,), generator=generator)
        labels = ids.masked_fill(torch.rand(length, generator=generator) < 0.3, IGNORED)
        examples.append(Example(ids.tolist(), labels.tolist()))
    return examples


def as_dataset(columns: dict[str, Any]) -> Dataset:
    return Dataset.from_dict(columns).with_format("torch")


def as_rows(columns: dict[str, Any]) -> Rows:
    return Rows(as_dataset(columns))


def test_each_example_goes_to_the_first_row_with_room():
    assert first_fit([5, 4, 3, 6, 2, 1], 8) == [[0, 2], [1, 4, 5], [3]]
    assert first_fit([8, 8], 8) == [[0], [1]]
    assert first_fit([], 8) == []
    lengths = torch.randint(1, 33, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    rows: list[list[int]] = []
    for index, length in enumerate(lengths):
        fitting = [row for row in rows if sum(lengths[i] for i in row) + length <= 32]
        fitting[0].append(index) if fitting else rows.append([index])
    assert first_fit(lengths, 32) == rows


def test_rows_hold_whole_examples_and_positions_restart():
    columns = packed_rows(
        [Example([5, 6, 7], [IGNORED, 6, 7]), Example([8], [8]), Example([9, 3], [9, 3])], 4
    )
    assert [row.tolist() for row in columns["input_ids"]] == [[5, 6, 7, 8], [9, 3]]
    assert [row.tolist() for row in columns["position_ids"]] == [[0, 1, 2, 0], [0, 1]]
    assert [row.tolist() for row in columns["labels"]] == [[IGNORED, 6, 7, IGNORED], [IGNORED, 3]]
    batch = as_rows(columns).batch([0, 1])
    assert batch["input_ids"][1].tolist() == [9, 3, 0, 0]
    assert batch["position_ids"][1].tolist() == [0, 1, 0, 0]  # padding sees itself alone
    assert batch["labels"][1].tolist() == [IGNORED, 3, IGNORED, IGNORED]
    # As long, whatever the layout.
    assert as_rows(columns).batch([1])["input_ids"].tolist() == [[9, 3, 0, 0]]


def test_examples_are_cut_and_those_without_a_label_left_out():
    examples = [
        Example([1, 2, 3], [1, IGNORED, 3]),
        Example([4, 5], [4, IGNORED]),
        Example([6], [6]),
        Example([7, 8], [7, 8]),
    ]
    kept, shortened, dropped = cut(examples, 2)
    assert kept == [Example([7, 8], [IGNORED, 8])]
    assert (shortened, dropped) == (0, 3)
    assert cut(examples[:1], 3) == ([Example([1, 2, 3], [IGNORED, IGNORED, 3])], 0, 0)
    assert cut([Example([7, 8, 9], [7, 8, 9])], 2) == ([Example([7, 8], [IGNORED, 8])], 1, 0)


def test_rows_of_their_own_are_padded_on_the_right_and_counted_without_padding():
    rows = as_rows(separate_rows(make_examples((3, 5))))
    batch = rows.batch([0, 1])
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert batch["labels"][0, 3:].tolist() == [IGNORED] * 2
    assert set(batch) == {"input_ids", "labels", "attention_mask"}
    assert rows.tokens.tolist() == [3, 5]
    assert rows.labels.tolist() == [int((row[1:] != IGNORED).sum()) for row in batch["labels"]]
    text = as_rows({"input_ids": [[1, 2, 3], [4, 5, 6]]})
    assert text.batch([1])["labels"].tolist() == [[4, 5, 6]]
    assert text.labels.tolist() == [2, 2]
    assert [part["labels"].tolist() for part in divided(text.batch([0, 1]), 1)] == [
        [[1, 2, 3]],
        [[4, 5, 6]],
    ]


@dataclass
class ExamplesCase(Case):
    """Rows of several examples for the layout; for the reference, the examples one by one."""

    packed: bool = True
    steps: int = 2
    learning_rate: float = 0.1
    examples: list[Example] = field(default_factory=make_examples)

    def batches(self, batch_world: int) -> list[list[list[dict[str, Tensor]]]]:
        columns = packed_rows(self.examples, 14) if self.packed else separate_rows(self.examples)
        data = as_rows(columns)
        assert len(data) == (4 if self.packed else len(LENGTHS))
        rows = list(range(len(data) - len(data) % (2 * batch_world)))
        microbatches = divided(data.batch(rows), len(rows) // (2 * batch_world))
        shares = [microbatches[2 * rank : 2 * rank + 2] for rank in range(batch_world)]
        return [shares] * self.steps

    def reference_step(self, model: Any, step: list[list[dict[str, Tensor]]]) -> list[Tensor]:
        examples = (
            self.examples
            if self.packed
            else self.examples[: len(LENGTHS) - len(LENGTHS) % (2 * len(step))]
        )
        counts = [sum(label != IGNORED for label in example.labels[1:]) for example in examples]
        total = torch.zeros((), dtype=torch.float64)
        for example, count in zip(examples, counts, strict=True):
            if count:
                ids = torch.tensor([example.input_ids])
                labels = torch.tensor([example.labels])
                part = (
                    model(input_ids=ids, labels=labels, use_cache=False).loss * count / sum(counts)
                )
                part.backward()
                total += part.detach()
        return [total] * len(step)


LAYOUTS = {
    "one": {},
    "tp2-sequence": {"tp_size": 2, "sequence_parallel": True},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "shard2": {"dp_shard_size": 2},
}


@pytest.mark.daily("gpt2-tp2-sequence", "llama-pp2")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_a_packed_row_computes_what_its_examples_do(pools: Pools, family: str, layout: str) -> None:
    parallel = ParallelConfig(**LAYOUTS[layout])
    pool = pools(2) if parallel.total_size > 1 else None
    assert_layout_equal(ExamplesCase(tiny(family)), parallel, pool)


@pytest.mark.daily("gpt2-eager", "mistral-sdpa")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_both_ways_to_attend(family: str, attention: str) -> None:
    changes = {"sliding_window": 3} if family == "mistral" else {}
    case = ExamplesCase(tiny(family, **changes), hf_kwargs={"attn_implementation": attention})
    assert_layout_equal(case, ParallelConfig(), None)


def test_padded_rows_compute_what_their_examples_do(pools: Pools) -> None:
    layout = ParallelConfig(tp_size=2, sequence_parallel=True)
    assert_layout_equal(ExamplesCase(tiny("llama"), packed=False), layout, pools(2))


def _train(directory: str, layout: dict[str, Any], packed: bool) -> tuple[float, float, int]:
    """Losses and tokens of a short run on rows with uneven labels, whose last evaluation step is not full."""
    examples = make_examples(LENGTHS * 4)
    make: Any = (lambda chosen: packed_rows(chosen, 14)) if packed else separate_rows
    kept, _, _ = cut(examples, 14)
    recipe = PretrainRecipe(name=directory)
    layout = dict(layout)
    size = layout.pop("microbatch_size", None)
    recipe.training = TrainingRecipe(
        steps=3,
        batch_size=4,
        microbatch_size=size,
        log_every=1,
        evaluate_every=3,
        learning_rate=0.01,
    )
    model = hfscale.from_config(tiny("llama"), parallel=ParallelConfig(**layout))
    outcome = RecipeTrainer(
        model, recipe, as_dataset(make(kept)), as_dataset(make(kept[:7])), None, 4.0
    ).fit()
    return outcome.first_validation_loss, outcome.validation_loss, outcome.tokens


@pytest.mark.daily("True-layout3")
@pytest.mark.parametrize(
    "layout",
    [{"dp_shard_size": 2}, {"tp_size": 2}, {"pp_size": 2}, {"pp_size": 2, "microbatch_size": 2}],
)
@pytest.mark.parametrize("packed", [True, False])
def test_curves_do_not_depend_on_the_layout(
    pools: Pools, tmp_path: Path, layout: dict[str, Any], packed: bool
) -> None:
    expected = _train(str(tmp_path / "one"), {}, packed)
    found, other = pools(2).run(_train, str(tmp_path / "two"), layout, packed)
    assert found == other
    assert found[:2] == pytest.approx(expected[:2], rel=1e-5)
    assert found[2] == expected[2] < 3 * 4 * 14
    assert expected[1] < expected[0]
    curves = [
        [r["loss"] for r in read_metrics(tmp_path / name / "metrics.jsonl")[0]]
        for name in ("one", "two")
    ]
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


def test_evaluation_is_the_mean_over_labels():
    model = hfscale.from_config(tiny("llama"), parallel=ParallelConfig())
    data = as_rows(separate_rows(cut(make_examples(), 14)[0]))
    whole = float(hfscale.eval_step(model, data.batch(list(range(len(data))))))
    for size in (1, 2, 5):
        assert len(list(evaluation_steps(len(data), 0, 1, size))) > 1
        assert measure(model, TEXT, data, 1, size)[0] == pytest.approx(whole, rel=1e-6)
