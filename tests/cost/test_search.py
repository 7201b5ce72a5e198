"""The search over layouts: its arithmetic against plans, what it finds, and what it says where nothing fits."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, MixtralConfig

import hfscale
from hfscale import ConfigError, MemoryConfig, ParallelConfig
from hfscale.cli import main
from hfscale.cli.model_flags import bytes_of, tokens_of
from hfscale.cost.model.machines_known import find_machine, fitted
from hfscale.cost.tools.fast_cost import Candidate, FastCost, candidates, step_of
from hfscale.cost.tools.model_summary import Kept, ModelSummary, summarize
from hfscale.cost.tools.search import learning_rates, search
from hfscale.parallel.pipeline.microbatches import in_flight_of_ranks
from hfscale.parallel.pipeline.orders import order
from hfscale.parallel.pipeline.timeline import fullest_live, peak_live, stage_ranks
from hfscale.recipes.read import read_recipe

from ..sweeps import pairs

H100 = find_machine("h100")
SMALL = LlamaConfig(
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=8,
    vocab_size=32000,
)


MIXTURE = MixtralConfig(
    hidden_size=1024,
    intermediate_size=2048,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=8,
    vocab_size=32000,
)


@cache
def facts(mixed_precision: str = "bf16") -> ModelSummary:
    dtype = torch.float32 if mixed_precision == "bf16" else torch.bfloat16
    return summarize(SMALL, mixed_precision=mixed_precision, dtype=dtype)


@cache
def large() -> ModelSummary:
    """A model of 70 billion parameters, with the bytes per weight and value of the small one."""
    shape = replace(
        facts().shape, layers=80, hidden=8192, queries=8192, keys=1024, ffn=28672, vocabulary=128256
    )
    kept = {where: Kept(of.cut * 4, of.whole * 4) for where, of in facts().kept.items()}
    return replace(facts(), shape=shape, heads=64, kept=kept, stream=facts().stream * 4)


def made(
    of: ModelSummary, shard: int, microbatches: int, schedule: str = "1f1b", **sizes: Any
) -> Candidate:
    """A candidate with this many shards; ``sizes`` are of other axes, of stages, and of the step."""
    batch = sizes.pop("batch", 1)
    recompute = sizes.pop("recompute", "none")
    layout = ParallelConfig(dp_shard_size=shard, pipeline_schedule=schedule, **sizes)
    return Candidate(step_of(of, layout, batch, microbatches, recompute))


CASES: list[tuple[int, int, str, dict[str, Any]]] = [
    (8, 4, "1f1b", {"dp_replicate_size": 2}),
    (2, 8, "1f1b", {"tp_size": 4, "dp_replicate_size": 2, "batch": 2, "recompute": "full"}),
    (2, 16, "1f1b", {"tp_size": 2, "pp_size": 4, "batch": 2}),
    (
        1,
        16,
        "interleaved1f1b",
        {"tp_size": 2, "pp_size": 2, "dp_replicate_size": 4, "recompute": "full"},
    ),
    (4, 4, "1f1b", {"tp_size": 2, "batch": 2, "recompute": "elementwise"}),
    (4, 4, "zbv", {"tp_size": 2, "pp_size": 2, "batch": 4}),
]


@pytest.mark.parametrize("sizes", CASES, ids=str)
@pytest.mark.parametrize("mixed", ["bf16", "no"])
def test_arithmetic_agrees_with_the_plan(
    sizes: tuple[int, int, str, dict[str, Any]], mixed: str
) -> None:
    case = made(facts(mixed), *sizes[:3], **sizes[3])
    found = FastCost(facts(mixed), H100, fitted()).estimate(case)
    planned = hfscale.estimate(
        SMALL,
        ParallelConfig(**case.parallel_arguments()),
        batch_size=case.job.batch,
        num_microbatches=case.job.microbatches,
        dtype=torch.float32 if mixed == "bf16" else torch.bfloat16,
        mixed_precision=mixed,
        memory=MemoryConfig(recompute=case.recompute),
    )
    assert found.seconds == pytest.approx(planned.seconds, rel=0.05)
    assert found.needed == pytest.approx(planned.needed, rel=0.12)


OTHERS: list[tuple[int, dict[str, int]]] = [
    (4, {}),
    (2, {"tp_size": 4}),
    (2, {"tp_size": 2, "pp_size": 2}),
]
SPREAD: tuple[int, dict[str, int]] = (4, {"tp_size": 2, "ep_size": 4})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "mixed"),
    pairs(["mixtral", "gpt2"], ["bf16", "no"], daily=[("mixtral", "no"), ("gpt2", "bf16")]),
)
def test_activations_of_other_layers_agree_with_the_plan(of: str, mixed: str) -> None:
    """Counted on one and on two tensor ranks, and of four as of those; experts whole, cut and spread."""
    config = (
        MIXTURE if of == "mixtral" else GPT2Config(n_embd=512, n_layer=8, n_head=8, vocab_size=1024)
    )
    given: dict[str, Any] = {"dtype": torch.float32 if mixed == "bf16" else torch.bfloat16}
    summary = summarize(config, mixed_precision=mixed, sequence=1024, **given)
    for shard, sizes in (*OTHERS, *([SPREAD] if of == "mixtral" else [])):
        case = made(summary, shard, 4, **sizes)
        planned = hfscale.estimate(
            config,
            ParallelConfig(**case.parallel_arguments()),
            sequence_length=1024,
            num_microbatches=4,
            mixed_precision=mixed,
            **given,
        )
        wanted = max(stage.memory.activations for stage in planned.stages)
        assert FastCost(summary, H100, fitted()).estimate(case).activations == pytest.approx(
            wanted, rel=0.05
        ), case.describe()


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("interleaved1f1b", 2), ("zbv", 2)])
def test_microbatches_alive_are_those_of_the_schedules(schedule: str, virtual: int) -> None:
    for microbatches in (8, 16):
        played = order(schedule, 4, microbatches, virtual)
        live = fullest_live(played, [1] * (4 * virtual))
        home = stage_ranks(played)
        assert all(now <= most for now, most in zip(live, peak_live(played), strict=True))
        together = [
            sum(count for stage, count in enumerate(live) if home[stage] == rank)
            for rank in range(4)
        ]
        assert list(in_flight_of_ranks(schedule, 4, microbatches, virtual)) == together


def test_candidates_use_every_gpu_and_every_sequence() -> None:
    found = list(candidates(facts(), H100, 16, 64))
    assert len(found) == len(set(found)) > 300
    for each in found:
        assert each.job.layout.total_size == 16
        assert each.job.batch * each.job.microbatches * each.job.layout.batch_world == 64
        ParallelConfig(**each.parallel_arguments())
    long = replace(facts(), job=replace(facts().job, sequence=131072))
    assert {each.job.layout.cp for each in candidates(long, H100, 16, 64)} >= {1, 2, 4, 8, 16}


def test_what_it_finds() -> None:
    found = search(large(), 32, tokens_per_step=2**20)
    assert found.winner.seconds == min(each.seconds for each in found.frontier)
    assert all(each.likely <= found.budget for each in (*found.best, *found.frontier))
    kinds = [each.candidate.kind for each in found.best]
    assert len(kinds) == len(set(kinds)) > 2
    for faster, lighter in zip(found.frontier, found.frontier[1:], strict=False):
        assert faster.seconds <= lighter.seconds
        assert faster.likely > lighter.likely
    assert "mostly weights, gradients and optimizer: does not fit" in found.rejected["replicas"]
    assert not set(found.rejected) & set(kinds)
    less = search(large(), 32, tokens_per_step=2**20, max_memory=40 * 2**30)
    assert less.winner.seconds >= found.winner.seconds
    assert less.winner.likely <= 40 * 2**30
    assert found.winner.candidate.describe() in str(found)
    assert found.to_dict()["best"][0]["seconds"] == found.winner.seconds


def test_answers_where_nothing_fits() -> None:
    with pytest.raises(
        ConfigError, match=r"nothing fits.*Nearest that works: (\d+) GPUs \(.*try LoRA"
    ) as error:
        search(large(), 1, tokens_per_step=2**20)
    count = int(str(error.value).partition("Nearest that works: ")[2].split()[0])
    assert not search(large(), count, tokens_per_step=2**20).uses_host
    half = search(large(), count // 2, tokens_per_step=2**20)
    assert half.uses_host
    assert "nothing fits without the host's memory" in str(half)
    assert all(each.candidate.offload and each.likely <= half.budget for each in half.best)
    with pytest.raises(
        ConfigError,
        match=r"a memory budget of 100.0 GiB is invalid on NVIDIA H100 SXM 80 GB.*79.6 GiB",
    ):
        search(facts(), 4, tokens_per_step=2**20, max_memory=100 * 2**30)
    with pytest.raises(ConfigError, match="less than one sequence of 4,096"):
        search(facts(), 4, tokens_per_step=1000)
    with pytest.raises(ConfigError, match="no layout of 11 GPUs can divide"):
        search(facts(), 11, tokens_per_step=8 * 4096)
    with pytest.raises(ConfigError, match="hardware='v100' is unknown"):
        search(facts(), 4, "v100", tokens_per_step=2**20)


@pytest.mark.parametrize("what", [("optimizer", "activations"), ("parameters",)], ids=" ".join)
def test_offload_agrees_with_the_plan(what: tuple[str, ...]) -> None:
    case = replace(made(facts("no"), 4, 4, tp_size=2), offload=what)
    found = FastCost(facts("no"), H100, fitted()).estimate(case)
    planned = hfscale.estimate(
        SMALL,
        ParallelConfig(**case.parallel_arguments()),
        num_microbatches=4,
        dtype=torch.bfloat16,
        memory=MemoryConfig(**{f"offload_{each}": True for each in what}),
    )
    assert planned.time.update > 0.01  # at the host's pace
    assert found.seconds == pytest.approx(planned.seconds, rel=0.05)
    assert found.needed == pytest.approx(planned.needed, rel=0.12)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["full", "elementwise"])
def test_tiles_agree_with_the_plan(recompute: str) -> None:
    """Of a long sequence over context ranks that exchange heads; without several tiles none are tried."""
    summary = summarize(SMALL, dtype=torch.bfloat16, sequence=131072)
    layout = ParallelConfig(cp_size=8, cp_method="heads")
    case = Candidate(step_of(summary, layout, 1, 1, recompute, summary.job.tile))
    found = FastCost(summary, H100, fitted()).estimate(case)
    planned = hfscale.estimate(
        SMALL,
        layout,
        sequence_length=131072,
        dtype=torch.bfloat16,
        memory=MemoryConfig(**case.memory_arguments()),
    )
    assert case.levers == {"recompute": recompute, "tile_tokens": 8192, "offload": ()}
    assert found.seconds == pytest.approx(planned.seconds, rel=0.05)
    assert found.needed == pytest.approx(planned.needed, rel=0.12)
    tiled = [each.job for each in candidates(summary, H100, 16, 16) if each.job.tile]
    assert tiled
    assert all(job.tokens > 2 * job.tile == 16384 for job in tiled)
    assert summarize(MIXTURE, dtype=torch.bfloat16, sequence=131072).job.tile == 0


def test_the_command_writes_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SMALL.save_pretrained(tmp_path / "model")
    recipe = tmp_path / "recipe.yaml"
    argv = ["search", str(tmp_path / "model"), "--gpus", "8", "--tokens-per-step", "256K"]
    assert main([*argv, "--lora", "--rank", "4", "--out", str(recipe), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    best = found["best"][0]
    read = read_recipe(recipe)
    assert ParallelConfig(**read.parallel).total_size == 8
    assert (read.training.batch_size, read.data.sequence_length) == (64, 4096)
    assert (read.adapter["r"], read.training.dtype, read.training.mixed_precision) == (
        4,
        "bfloat16",
        "no",
    )
    assert (found["dtype"], found["mixed_precision"]) == ("bfloat16", "no")
    assert best["microbatches"] * best["batch"] * best["shard"] * best["replicate"] == 64
    assert main([*argv, "--learning-rate", "1e-4", "--its-tokens-per-step", "64K"]) == 0
    said = capsys.readouterr().out
    assert "0.0002  square root" in said
    assert "0.0004  linear" in said
    assert main([*argv, "--quantize", "nf4"]) == 2
    assert "give --lora as well" in capsys.readouterr().err
    assert main([*argv, "--max-memory", "much"]) == 2
    assert "--max-memory much is no size" in capsys.readouterr().err


@pytest.mark.daily("a100", "offload", "qlora", "long")
@pytest.mark.parametrize(
    ("config", "argv", "wanted"),
    [
        (SMALL, "--gpus 8 --hardware a100-40 --tokens-per-step 256K", set()),
        (SMALL, "--gpus 1 --tokens-per-step 64K --max-memory 8GiB", {"memory"}),
        (
            SMALL,
            "--gpus 4 --hardware h200 --tokens-per-step 256K --lora q_proj,v_proj --quantize nf4",
            {"adapter"},
        ),
        (
            SMALL,
            "--gpus 8 --tokens-per-step 128K --sequence-length 131072 --max-memory 30GiB",
            {"cp_size"},
        ),
        (MIXTURE, "--gpus 8 --hardware b200 --tokens-per-step 256K", set()),
    ],
    ids=["a100", "offload", "qlora", "long", "mixture"],
)
def test_its_recipes_are_recipes(config: Any, argv: str, wanted: set[str], tmp_path: Path) -> None:
    """What is written is read again, and a plan takes its layout and its levers."""
    config.save_pretrained(tmp_path / "model")
    recipe = tmp_path / "recipe.yaml"
    assert (
        main(["search", str(tmp_path / "model"), *argv.split(), "--out", str(recipe), "--json"])
        == 0
    )
    read = read_recipe(recipe)
    layout = ParallelConfig(**read.parallel)
    memory = MemoryConfig(**read.memory)
    assert layout.total_size == int(argv.split()[1])
    assert wanted <= {name for name in ("memory", "adapter") if getattr(read, name, None)} | set(
        read.parallel
    )
    assert hfscale.plan(config, layout, memory=memory, dtype=read.training.dtype).layout == layout


def test_it_tries_parameters_in_16_bits_beside_autocast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They keep less, and so the winner recomputes nothing; where memory is not short autocast is as fast."""
    SMALL.save_pretrained(tmp_path)
    for budget, more, wanted in (
        ("16GiB", "", "mixed precision bf16_params,"),
        ("16GiB", "--json", '"mixed_precision": "bf16_params"'),
        ("18GiB", "", "mixed precision bf16,"),
    ):
        argv = f"--gpus 1 --tokens-per-step 64K --max-memory {budget} {more}"
        assert main(["search", str(tmp_path), *argv.split()]) == 0
        assert wanted in capsys.readouterr().out


def test_amounts_and_rules() -> None:
    assert [tokens_of(text, "--x") for text in ("7", "4M", "1.5k")] == [7, 2**22, 1536]
    assert [bytes_of(text, "--x") for text in ("7", "60GiB", "60G", "1.5 GB")] == [
        7,
        60 * 2**30,
        60 * 10**9,
        15 * 10**8,
    ]
    for wrong, of in (
        ("4MB", tokens_of),
        ("0", tokens_of),
        ("1.5", tokens_of),
        ("much", bytes_of),
        ("0GiB", bytes_of),
    ):
        with pytest.raises(ConfigError, match=f"--x {wrong} is no "):
            of(wrong, "--x")
    root, linear = learning_rates(1e-3, 100, 400)
    assert (root.learning_rate, linear.learning_rate) == (pytest.approx(2e-3), pytest.approx(4e-3))
    with pytest.raises(ConfigError, match="must be positive, got"):
        learning_rates(1e-3, 0, 400)
