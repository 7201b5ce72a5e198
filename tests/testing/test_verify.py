"""`hfscale verify`, and what it is made of."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from hfscale import ParallelConfig
from hfscale.cli import main
from hfscale.testing import Parity, verify
from hfscale.testing.clone import tiny_clone
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
    assert (clone.num_attention_heads, clone.num_key_value_heads, clone.num_hidden_layers) == (4, 2, 2)
    assert (clone.attention_dropout, clone.attention_bias, clone.eos_token_id) == (0.0, True, [66, 66])
    assert sum(p.numel() for p in AutoModelForCausalLM.from_config(clone).parameters()) < 50_000


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma2", "opt", "gptj", "bloom", "mixtral"])
def test_clones_of_default_configs_build(family: str) -> None:
    model = AutoModelForCausalLM.from_config(tiny_clone(AutoConfig.for_model(family)))
    assert sum(p.numel() for p in model.parameters()) < 200_000


def test_large_layouts_are_scaled_down() -> None:
    assert verify.scale_down(ParallelConfig(tp_size=2, dp_shard_size=4)) == ParallelConfig(tp_size=2, dp_shard_size=4)
    assert verify.scale_down(ParallelConfig(tp_size=8, dp_shard_size=4)) == ParallelConfig(tp_size=2, dp_shard_size=2)


@pytest.mark.parametrize("layout", [["--tp", "2"], []])
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: list[str]) -> None:
    BIG.save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path), *layout]) == 0
    printed = capsys.readouterr().out
    assert "equal to rounding" in printed
    assert printed.count(" ok") == 5


def test_a_difference_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = Parity(1e-16, 1e-15, "a.weight", 0.0, 1e-16, "b.weight", 0.0)
    bad = replace(good, gradient=1e-3, worst_gradient="model.layers.0.mlp.up_proj.weight")
    monkeypatch.setattr(verify, "verify", lambda config, layout: (layout, bad))
    BIG.save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path), "--tp", "2"]) == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if "gradient" in line)
    assert "DIFFERS" in line
    assert "up_proj" in line


def test_a_layout_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    BIG.save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path), "--pp", "2"]) == 2
    assert "pp_size=2" in capsys.readouterr().err


def test_a_clone_of_a_model_with_fewer_key_value_heads_than_ranks_has_fewer_too() -> None:
    config = LlamaConfig(num_attention_heads=32, num_key_value_heads=4)
    assert _heads_that_fit(config, 8, 8) == {"num_key_value_heads": 4, "num_attention_heads": 16}
    assert _heads_that_fit(config, 16, 2) == {"num_key_value_heads": 1, "num_attention_heads": 4}
    assert _heads_that_fit(config, 4, 4) == {"num_key_value_heads": 4, "num_attention_heads": 8}
    assert _heads_that_fit(config, 2, 2) == {}
