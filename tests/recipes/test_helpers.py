import json
import math
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset

from hfscale import CheckpointError, ParallelConfig, RoutingConfig
from hfscale.recipes import main_process, run_log, schema
from hfscale.recipes.batch_sizes import by_cost, dealt, evaluation_steps, order_of, per_rank
from hfscale.recipes.corpus import is_for_validation, is_wanted, read
from hfscale.recipes.dataset import pack, train_tokenizer, unigram_entropy
from hfscale.recipes.generating import recompute_field
from hfscale.recipes.read import load_recipe
from hfscale.recipes.rows import Example, Rows, packed_rows, separate_rows
from hfscale.recipes.run import config_of
from hfscale.recipes.run_log import RunLog
from hfscale.recipes.schema import DataRecipe, FinetuneRecipe, PretrainRecipe, RecipeError

RECIPES = Path(__file__).parents[2] / "scripts" / "recipes"
DEMO = RECIPES / "demo_pretrain.yaml"


def test_shipped_recipes_fit_their_schema():
    for path in sorted(RECIPES.glob("*.yaml")):
        load_recipe(PretrainRecipe if "pretrain" in path.name else FinetuneRecipe, path)


def test_the_demo_fine_tunes_what_it_pretrained_on_what_it_has_not_seen():
    first = load_recipe(PretrainRecipe, DEMO)
    second = load_recipe(FinetuneRecipe, RECIPES / "demo_finetune.yaml")
    assert second.base == str(first.directory / "checkpoint")
    assert first.data.exclude == second.data.include != []


def test_overrides_win():
    recipe = load_recipe(
        PretrainRecipe, DEMO, ["training.steps=3", "parallel.tp_size=1", "parallel.dp_shard_size=2"]
    )
    assert recipe.training.steps == 3
    assert recipe.parallel == {"tp_size": 1, "dp_shard_size": 2}


def test_a_layout_takes_every_field_of_a_pipeline():
    fields = [
        "pp_size=2",
        "pipeline_schedule=zbv",
        "virtual_stages=2",
        "num_microbatches=4",
        "stage_layers=[1,2,3,2]",
    ]
    overrides = [f"parallel.{field}" for field in (*fields, "weights_regather=true")]
    layout = ParallelConfig(**load_recipe(PretrainRecipe, DEMO, overrides).parallel)
    assert (layout.size("pp"), layout.size("tp")) == (2, 2)
    assert (layout.pipeline_schedule, layout.virtual_stages, layout.num_microbatches) == (
        "zbv",
        2,
        4,
    )
    assert (layout.stage_layers, layout.weights_regather) == ((1, 2, 3, 2), True)
    recipe = load_recipe(
        PretrainRecipe, DEMO, ["parallel.pp_size=2", "parallel.pipeline_schedule=1f1b"]
    )
    assert ParallelConfig(**recipe.parallel).pipeline_schedule == "1f1b"  # which is no number
    assert layout.describe_schedule() == "tp2 x pp2, zbv over 4 stages, 4 microbatches"
    assert ParallelConfig(tp_size=2).describe_schedule() == "tp2"


def test_the_demo_runs_under_another_name_and_number_of_processes(tmp_path):
    log = tmp_path / "log"
    python = tmp_path / "python"
    python.write_text(f'#!/usr/bin/env bash\necho "$@" >> {log}\n')
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "PROCESSES": "4", "RUN": "mine"}
    demo = RECIPES.parent / "demo.sh"
    subprocess.run(
        ["bash", str(demo), "parallel.pp_size=2"], env=environment, check=True, capture_output=True
    )
    pretrain, finetune, check, summary = log.read_text().splitlines()
    assert pretrain.endswith("demo_pretrain.yaml name=mine-base replace=true parallel.pp_size=2")
    assert finetune.endswith(
        "demo_finetune.yaml name=mine replace=true base=runs/mine-base/checkpoint parallel.pp_size=2"
    )
    assert "--num_processes 4 " in pretrain
    assert "--num_processes 4 " in finetune
    assert check.endswith("check_checkpoint.py runs/mine")
    assert summary.endswith("summary.py runs/mine-base runs/mine")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.stepz=3", "training.stepz .* is not a key.*did you mean 'steps'"),
        ("nmae=x", "nmae .* is not a key.*did you mean 'name'"),
        ("training.steps=many", "training.steps .* impossible value"),
        ("training.steps=0", "training.steps=0 is invalid"),
        ("training.steps", "write key=value"),
        ("data.validation_fraction=1", "leaves nothing"),
        ("data.include=asyncio", "include .* impossible value"),
    ],
)
def test_a_wrong_key_or_value_is_named(override, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(PretrainRecipe, DEMO, [override])


def test_a_recipe_that_is_not_there_names_those_that_are():
    with pytest.raises(RecipeError, match=r"no such file.*demo_pretrain\.yaml"):
        load_recipe(PretrainRecipe, RECIPES / "missing.yaml")


def test_a_key_left_out_is_named(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("name: x\n")
    with pytest.raises(RecipeError, match="leaves out base"):
        load_recipe(FinetuneRecipe, path)


def test_a_file_that_is_not_yaml_is_refused(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("name: [x\n")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(PretrainRecipe, path)


def test_about_as_much_is_kept_out_as_asked():
    kept_out = [is_for_validation(f"module_{index}.py", 0.1) for index in range(2000)]
    assert abs(sum(kept_out) / 2000 - 0.1) < 0.03


def test_patterns_select_documents():
    assert is_wanted("os.py", [], [])
    assert is_wanted("asyncio/events.py", ["email/*", "asyncio/*"], [])
    assert not is_wanted("asyncio/events.py", [], ["asyncio/*"])
    assert not is_wanted("os.py", ["asyncio/*"], [])


def test_texts_are_read_from_files_records_and_directories(tmp_path):
    texts = [f"text number {index}" for index in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    (tmp_path / "b.txt").write_text("\n\n".join(texts))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("a.jsonl", "b.txt"):
        train, validation = read(
            DataRecipe(source=str(tmp_path / name), text_column="body", validation_fraction=0.2)
        )
        assert sorted(document.columns["body"] for document in train + validation) == sorted(texts)
    both = read(DataRecipe(source=str(tmp_path), text_column="body", validation_fraction=0.2))
    assert sum(map(len, both)) == 41
    with pytest.raises(RecipeError, match="its records have body"):
        read(DataRecipe(source=str(tmp_path / "a.jsonl"), text_column="content"))


def test_a_source_too_small_to_validate_on_is_refused(tmp_path):
    (tmp_path / "one.txt").write_text("one")
    with pytest.raises(RecipeError, match=r"1 document.* to train on and 0 to validate"):
        read(DataRecipe(source=str(tmp_path / "one.txt")))


def test_packing_puts_an_end_after_each_document():
    rows = pack([[1, 2], [3, 4, 5], [6]], end=0, length=4)
    assert rows.tolist() == [[1, 2, 0, 3], [4, 5, 0, 6]]
    assert pack([], end=0, length=4).shape == (0, 4)


def test_the_tokenizer_gives_back_every_text():
    tokenizer = train_tokenizer(["def one():\n    return 1\n"] * 3, 300)
    text = "def två(x):\n\treturn '日本' # \x00\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == 0
    with pytest.raises(RecipeError, match="too small"):
        train_tokenizer(["x"], 100)


def test_unigram_entropy_of_known_distributions():
    assert unigram_entropy(np.array([[0, 1], [2, 3]])) == pytest.approx(math.log(4))
    assert unigram_entropy(np.array([5, 5])) == 0


def test_an_epoch_visits_every_sequence_once_and_the_next_in_another_order():
    visited = order_of(6, 4, available=12, seed=1).flatten().tolist()
    assert sorted(visited[:12]) == sorted(visited[12:]) == list(range(12))
    assert visited[:12] != visited[12:]
    assert not torch.equal(order_of(1, 12, 12, seed=1), order_of(1, 12, 12, seed=2))


def test_a_step_may_span_epochs_and_exceed_the_data():
    assert sorted(order_of(1, 6, available=3, seed=0)[0].tolist()) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(("batch_world", "microbatch_size"), [(1, None), (2, None), (2, 2), (4, 1)])
def test_ranks_share_a_step(batch_world, microbatch_size):
    microbatches, size = per_rank(8, batch_world, microbatch_size)
    order = torch.arange(16).view(2, 8)
    batches = torch.tensor(dealt(order, batch_world, microbatches, size)).view(-1, size)
    for step in range(2):
        own = batches[step * len(batches) // 2 : (step + 1) * len(batches) // 2]
        shares = [own[rank::batch_world].flatten().tolist() for rank in range(batch_world)]
        assert [row for share in shares for row in share] == order[step].tolist()


def test_steps_that_do_not_divide_are_refused():
    with pytest.raises(RecipeError, match="use a multiple of 3"):
        per_rank(8, 3, None)
    with pytest.raises(RecipeError, match="use a divisor of 4"):
        per_rank(8, 2, 3)


@pytest.mark.parametrize("available", [1, 7, 12, 13])
@pytest.mark.parametrize("batch_world", [1, 2, 4])
def test_evaluation_visits_every_sequence_once(available, batch_world):
    ranks = [
        list(evaluation_steps(available, rank, batch_world, size=3)) for rank in range(batch_world)
    ]
    assert len({len(steps) for steps in ranks}) == 1
    visited = [row for steps in ranks for rows, counted, _ in steps for row in rows[:counted]]
    assert sorted(visited) == list(range(available))
    for together in zip(*ranks, strict=True):
        counted = [row for rows, count, _ in together for row in rows[:count]]
        assert all(counted == list(everywhere) for _, _, everywhere in together)
        # As in training, which a pipeline relies on.
        assert {len(rows) for rows, _, _ in together} == {3}


def test_the_demo_of_experts_is_a_mixture_that_computes_as_much_as_the_dense_demo():
    recipe = load_recipe(PretrainRecipe, RECIPES / "demo_experts_pretrain.yaml")
    config = config_of(recipe)
    dense = config_of(load_recipe(PretrainRecipe, DEMO))
    assert (config.model_type, dense.model_type) == ("qwen3_moe", "llama")
    assert config.num_experts_per_tok * config.moe_intermediate_size == dense.intermediate_size
    assert ParallelConfig(**recipe.parallel).slices_tokens
    assert RoutingConfig(**recipe.routing).has_loss
    finetuned = load_recipe(FinetuneRecipe, RECIPES / "demo_experts_finetune.yaml")
    assert finetuned.base == str(recipe.directory / "checkpoint")
    assert finetuned.data.include == recipe.data.exclude != []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.family=lama", "model.family='lama' is no model_type of transformers"),
        ("model.options.num_expert=4", "llama has no num_expert: use fields of LlamaConfig"),
    ],
)
def test_a_family_and_its_options_are_checked(override, message):
    with pytest.raises(RecipeError, match=message):
        config_of(load_recipe(PretrainRecipe, DEMO, [override]))


@pytest.mark.parametrize(("rank", "waited"), [("0", []), ("3", [6.5])])
def test_one_rank_after_the_other_says_what_nobody_foresaw(
    rank: str,
    waited: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise KeyError("colour")

    slept = list[float]()
    ended = list[int]()
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr("os._exit", ended.append)
    main_process.run(fail)
    said = capsys.readouterr().err
    assert (slept, ended) == (waited, [1])
    assert said.count("Traceback") == 1
    assert f"error (rank {rank}): 'colour'" in said


def test_rows_of_a_step_are_moved_to_where_they_run_beside_rows_that_cost_alike():
    """The same rows in every step; who has the longest of a microbatch has the shortest of the next."""
    costs = torch.tensor([2.0, 30, 4, 8, 16, 5, 6, 7])
    moved = by_cost(torch.arange(8).view(1, 8), costs, batch_world=2, size=2)
    assert moved.tolist() == [[1, 4, 2, 0, 3, 7, 6, 5]]


def test_a_row_costs_the_squares_of_its_texts():
    packed = Dataset.from_dict(
        packed_rows([Example([1] * length, [1] * length) for length in (5, 3)], 8)
    )
    apart = Dataset.from_dict(
        separate_rows([Example([1] * length, [1] * length) for length in (5, 3)])
    )
    assert Rows(packed.with_format("torch")).costs(0.5).tolist() == [8 + 0.5 * (25 + 9)]
    assert Rows(apart.with_format("torch")).costs(0.5).tolist() == [5 + 0.5 * 25, 3 + 0.5 * 9]


@pytest.mark.parametrize(
    ("why", "code"),
    [
        ("rank 1: [Errno 28] No space left on device", 1),
        ("[enforce fail at inline_container.cc:603] . unexpected pos 64 vs 0", 1),
        ("unable to mmap 64 bytes from file <x>: Cannot allocate memory (12)", 1),
        ("[Errno 13] Permission denied", 2),
        ("it is damaged", 2),
    ],
)
def test_what_the_machine_refuses_may_be_tried_again(
    why: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise CheckpointError(f"the state could not be written: {why}")

    ended = list[int]()
    monkeypatch.setattr("os._exit", ended.append)
    main_process.run(fail)
    assert ended == [code]


def test_memory_that_only_another_machine_has_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory counts if it is of the run that the disk names, whichever machine has it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(schema, "memory_of", lambda _: tmp_path / "memory")
    asked = ["name=mine", "training.memory_every=2", "training.resume=true"]
    recipe = load_recipe(PretrainRecipe, DEMO, asked)
    for path in ("memory/before/step-2", "memory/now/step-2", "runs/mine/state"):
        Path(path).mkdir(parents=True)
    for name in ("recipe.yaml", "metrics.jsonl"):
        Path("runs/mine", name).touch()
    assert not recipe.has_state
    named = Path("runs/mine/state/_hfscale_run")
    named.write_text("now")
    assert recipe.has_state
    named.write_text("gone")
    assert not run_log.resumes_of(recipe)
    monkeypatch.setattr(run_log, "gathered", lambda own: [own, True])
    RunLog(recipe, run_log.resumes_of(recipe))
    assert named.exists()
    RunLog(recipe, False)
    assert not named.exists()


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_config_is_told_by_its_own_name_what_is_recomputed(
    recomputes: bool, tmp_path: Path
) -> None:
    """The old name warns since transformers 5.23, and what TRL's configs begin with is another value."""
    config_class = pytest.importorskip("trl").GRPOConfig
    given = {recompute_field(config_class): recomputes}
    made = config_class(str(tmp_path), report_to=[], use_cpu=True, bf16=False, **given)
    assert made.gradient_checkpointing is recomputes
