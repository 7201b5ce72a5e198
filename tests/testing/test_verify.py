"""`hfscale verify`, and what it is made of."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, LlamaConfig

import hfscale
from hfscale import ParallelConfig
from hfscale.cli import main
from hfscale.config.schedules import schedule_names
from hfscale.extras.pictures.picture_parity import PictureCase
from hfscale.models.clone import tiny_clone
from hfscale.parallel.pipeline.csv_table import write_csv
from hfscale.parallel.pipeline.orders import check, order
from hfscale.testing import Case, Parity, RankPool, measure_parity, verify
from hfscale.testing.verify import _heads_that_fit

BIG = LlamaConfig(
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=128256,
    attention_dropout=0.1,
    bos_token_id=128000,
    eos_token_id=[128001, 128009],
)


def test_a_clone_keeps_the_switches_and_loses_the_size() -> None:
    clone = tiny_clone(BIG, attention_bias=True)
    assert type(clone) is LlamaConfig
    assert (clone.num_attention_heads, clone.num_key_value_heads, clone.num_hidden_layers) == (
        4,
        2,
        2,
    )
    assert (clone.attention_dropout, clone.attention_bias, clone.eos_token_id) == (
        0.0,
        True,
        [66, 66],
    )
    assert sum(p.numel() for p in AutoModelForCausalLM.from_config(clone).parameters()) < 50_000


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "qwen3", "gemma2", "opt", "gptj", "bloom", "mixtral"]
)
def test_clones_of_default_configs_build(family: str) -> None:
    model = AutoModelForCausalLM.from_config(tiny_clone(AutoConfig.for_model(family)))
    assert sum(p.numel() for p in model.parameters()) < 200_000


@pytest.mark.parametrize("family", ["deepseek_v3", "youtu"])
def test_a_clone_computes_again_what_its_class_computes(family: str) -> None:
    clone = tiny_clone(AutoConfig.for_model(family))
    for config in (clone, tiny_clone(clone)):
        assert (config.head_dim, config.qk_head_dim) == (
            config.qk_rope_head_dim,
            config.qk_rope_head_dim * 2,
        )


def test_large_layouts_are_scaled_down() -> None:
    assert verify.scale_down(ParallelConfig(tp_size=2, dp_shard_size=4)) == ParallelConfig(
        tp_size=2, dp_shard_size=4
    )
    assert verify.scale_down(ParallelConfig(tp_size=8, dp_shard_size=4)) == ParallelConfig(
        tp_size=2, dp_shard_size=2
    )


def test_pipelines_are_scaled_down() -> None:
    def small(**fields: Any) -> tuple[int, Any, Any]:
        found = verify.scale_down(ParallelConfig(**fields))
        return found.size("pp"), found.num_microbatches, found.stage_layers

    assert small(pp_size=3) == (3, 6, None)
    assert small(pp_size=2, num_microbatches=7) == (2, 7, None)
    assert small(pp_size=2, num_microbatches=512) == (2, 4, None)
    assert small(pp_size=2, stage_layers=[1, 4]) == (2, 4, (1, 4))
    assert small(pp_size=4, stage_layers=[18, 22, 22, 18]) == (4, 8, (1, 2, 2, 1))
    assert small(pp_size=4, tp_size=8, num_microbatches=16, stage_layers=[20] * 4) == (2, 4, None)
    assert small() == (1, None, None)
    # Whatever the schedule, it can run the number that is chosen.
    for schedule in schedule_names():
        for pp_size in (2, 3, 4, 8):
            found = verify.scale_down(ParallelConfig(pp_size=pp_size, pipeline_schedule=schedule))
            check(schedule, pp_size, found.num_microbatches or 0, found.virtual_stages or 0)


def test_a_file_keeps_its_ranks_and_microbatches(tmp_path: Path) -> None:
    write_csv(order("1f1b", 3, 5), tmp_path / "mine.csv")
    layout = ParallelConfig(pp_size=3, tp_size=4, pipeline_schedule=str(tmp_path / "mine.csv"))
    small = verify.scale_down(layout)
    assert (small.size("pp"), small.size("tp"), small.num_microbatches) == (3, 2, 5)


PIPELINES = {
    "zbv": (["--schedule", "zbv", "--microbatches", "5"], "zbv, 4 stages of 1, 1, 1, 1 layers", 5),
    "uneven": (["--stage-layers", "30,50"], "1f1b, 2 stages of 1, 2 layers", 4),
    "dualpipev": (
        ["--schedule", "dualpipev", "--microbatches", "64"],
        "dualpipev, 4 stages of 1, 1, 1, 1 layers",
        4,
    ),
    "file": (
        ["--schedule", "mine.csv", "--virtual-stages", "2"],
        "mine.csv, 4 stages of 1, 1, 1, 1 layers",
        4,
    ),
}


@pytest.mark.daily("file")
@pytest.mark.parametrize("name", PIPELINES)
def test_the_command_on_stages(
    pools: Callable[[int], RankPool],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    flags, described, microbatches = PIPELINES[name]
    write_csv(order("interleaved1f1b", 2, 4, 2), tmp_path / "mine.csv")
    flags = [str(tmp_path / flag) if flag.endswith(".csv") else flag for flag in flags]
    monkeypatch.setattr(verify, "RankPool", lambda world: nullcontext(pools(world)))
    measured: list[Case] = []
    monkeypatch.setattr(
        verify,
        "measure_parity",
        lambda case, *rest: (measured.append(case), measure_parity(case, *rest))[1],
    )
    BIG.save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path), "--pp", "2", *flags]) == 0
    printed = capsys.readouterr().out
    assert "in pp2 against stock transformers in one process" in printed
    assert f"{described} on 2 pipeline ranks, {microbatches} microbatches" in printed
    assert ("(not the 64 asked for)" in printed) == (name == "dualpipev")
    assert printed.count(" ok") == 5
    assert [case.accumulation for case in measured] == [microbatches]


def test_schedules_that_are_not_one_process_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    BIG.save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path), "--pp", "2", "--schedule", "pipedream_2bw"]) == 2
    message = capsys.readouterr().err
    assert "its steps are not those of one process: verify gpipe, 1f1b" in message
    assert "verify gpipe" in message
    assert message.count("pipedream") == 1


@pytest.mark.daily("layout1")
@pytest.mark.parametrize("layout", [["--tp", "2"], ["--cp", "2"], []])
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: list[str]) -> None:
    BIG.save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path), *layout]) == 0
    printed = capsys.readouterr().out
    assert "equal to rounding" in printed
    assert printed.count(" ok") == 5


def test_a_vision_language_model_is_verified_with_pictures() -> None:
    kind = AutoModelForImageTextToText
    clone = verify.clone_for(AutoConfig.for_model("llava"), kind, 2)
    case = verify.case_for(clone, kind, hfscale.plan(clone, auto_class=kind))
    assert type(case) is PictureCase
    verify.check_stock(case)
    assert "pixel_values" in case.batches(1)[0][0][0]


def test_adapters_are_verified_too(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    pools: Callable[[int], RankPool],
) -> None:
    monkeypatch.setattr(verify, "RankPool", lambda world: nullcontext(pools(world)))
    BIG.save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path), "--tp", "2", "--lora", "q_proj,down_proj"]) == 0
    printed = capsys.readouterr().out
    assert "against stock PEFT, LoRA on q_proj,down_proj, in one process" in printed
    assert printed.count(" ok") == 5


def test_a_difference_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = Parity(1e-16, 1e-15, "a.weight", 0.0, 1e-16, "b.weight", 0.0)
    bad = replace(good, gradient=1e-3, worst_gradient="model.layers.0.mlp.up_proj.weight")
    monkeypatch.setattr(verify, "verify", lambda config, layout, lora: (layout, bad))
    BIG.save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path), "--tp", "2"]) == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if "gradient" in line)
    assert "DIFFERS" in line
    assert "up_proj" in line


def test_a_layout_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    BIG.save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path), "--cp", "3", "--cp-method", "heads"]) == 2
    assert "cp_size=3" in capsys.readouterr().err
    # The clone would have a layer for each stage; the model has not.
    assert main(["verify", str(tmp_path), "--pp", "81"]) == 2
    assert "pp_size=81 asks for more stages than the 80 layers" in capsys.readouterr().err
    # Nor has it heads for six ranks, which the clone would have.
    assert main(["verify", str(tmp_path), "--tp", "6"]) == 2
    assert "tp_size=6 does not divide the 64 attention heads" in capsys.readouterr().err


def test_a_clone_of_a_model_with_fewer_key_value_heads_than_ranks_has_fewer_too() -> None:
    config = LlamaConfig(num_attention_heads=32, num_key_value_heads=4)
    assert _heads_that_fit(config, 8, 8) == {"num_key_value_heads": 4, "num_attention_heads": 16}
    assert _heads_that_fit(config, 16, 2) == {"num_key_value_heads": 1, "num_attention_heads": 4}
    assert _heads_that_fit(config, 4, 4) == {"num_key_value_heads": 4, "num_attention_heads": 8}
    assert _heads_that_fit(config, 2, 2) == {}
