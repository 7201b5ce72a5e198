"""Steps of ranks that nobody started: what they send and keep, against the estimate's bytes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import GPT2Config, LlamaConfig, MixtralConfig

from hfscale import ConfigError, MemoryConfig, ParallelConfig
from hfscale.cli import main
from hfscale.cost.tools.dry_run import DryRun, dry_run

from ..tiny_models import tiny

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "vocab_size": 512,
}
# Of fewer layers, what is around them would count as much as the estimate may be off.
LLAMA = tiny("llama", **SIZES, num_key_value_heads=2, num_hidden_layers=8)


LORA = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
MIXTURE = MixtralConfig(**SIZES, num_key_value_heads=2, num_hidden_layers=4, num_local_experts=8)


def of(sizes: dict[str, Any], **changes: Any) -> DryRun:
    return dry_run(
        LLAMA,
        ParallelConfig(**sizes),
        **{"sequence_length": 32, "dtype": torch.bfloat16, **changes},
    )


def held_to(found: DryRun, traffic: float = 0.02, activations: float = 0.06) -> None:
    for stage in found.stages:
        assert stage.traffic
        for each in stage.traffic:
            assert each.ratio == pytest.approx(1, abs=traffic), (stage.rank, each)
        if stage.activations is not None:
            assert stage.activations.ratio == pytest.approx(1, abs=activations), stage


@pytest.mark.daily(
    "cp_size dp_shard_size cp_method-", "tp_size dp_shard_size-dtype mixed_precision"
)
@pytest.mark.parametrize(
    ("sizes", "more"),
    [
        ({"tp_size": 2}, {"memory": MemoryConfig(recompute="full"), "num_microbatches": 2}),
        ({"tp_size": 2, "sequence_parallel": True}, {"memory": MemoryConfig(recompute="full")}),
        ({"tp_size": 2, "dp_shard_size": 2}, {"dtype": torch.float32, "mixed_precision": "bf16"}),
        ({"dp_shard_size": 4, "dp_replicate_size": 2}, {"num_microbatches": 3}),
        ({"cp_size": 2, "dp_shard_size": 2, "cp_method": "gather"}, {}),
        (
            {"pp_size": 2, "pipeline_schedule": "interleaved1f1b", "virtual_stages": 2},
            {"num_microbatches": 4},
        ),
        ({"tp_size": 2, "pp_size": 2}, {"dtype": torch.float32, "mixed_precision": "bf16_params"}),
        (
            {"tp_size": 2, "dp_shard_size": 2, "sequence_parallel": True},
            {"peft_config": LORA, "dtype": torch.float32, "mixed_precision": "bf16"},
        ),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, dict) else None,
)
def test_what_a_step_sends_is_what_the_estimate_is_made_of(
    sizes: dict[str, Any], more: dict[str, Any]
) -> None:
    held_to(of(sizes, **more))


@pytest.mark.daily("tp_size ep_size dp_shard_size sequence_parallel")
@pytest.mark.parametrize(
    "sizes",
    [
        {"tp_size": 2, "sequence_parallel": True},
        {"tp_size": 2, "ep_size": 2},  # sums are fewer bytes than routes
        {"tp_size": 2, "ep_size": 4, "dp_shard_size": 2},
        {"tp_size": 2, "ep_size": 4, "dp_shard_size": 2, "sequence_parallel": True},
        {"ep_size": 2, "dp_replicate_size": 2, "dp_shard_size": 4},
    ],
    ids=" ".join,
)
def test_mixtures_send_the_same_to_every_expert(sizes: dict[str, Any]) -> None:
    found = dry_run(MIXTURE, ParallelConfig(**sizes), sequence_length=64, dtype=torch.bfloat16)
    held_to(found, activations=0.03)
    summed = sizes == {"tp_size": 2, "ep_size": 2}
    assert ("ep" in {each.axis for each in found.stages[0].traffic}) == (
        "ep_size" in sizes and not summed
    )


def test_stages_of_a_kind_are_run_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LLAMA.save_pretrained(tmp_path)
    argv = [
        "plan",
        str(tmp_path),
        "--dry-run",
        "--tokens",
        "32",
        "--dtype",
        "bfloat16",
        "--tp",
        "2",
        "--dp-shard",
        "4",
    ]
    argv += ["--sequence-parallel", "--pp", "4", "--microbatches", "4", "--json"]
    assert main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == 32
    assert [stage["like"] for stage in found["stages"]] == [[0], [1, 2], [3]]
    assert [each["axis"] for each in found["stages"][1]["traffic"]] == ["tp", "pp", "dp_shard"]
    stream = 2 * 32 * 64 // 2  # bytes of a microbatch's on one tensor rank
    sent = [
        next(each["counted"] for each in stage["traffic"] if each["axis"] == "pp")
        for stage in found["stages"]
    ]
    assert sent == [4 * stream, 2 * 4 * stream, 4 * stream]
    for stage in found["stages"]:
        assert all(each["ratio"] == pytest.approx(1, abs=0.02) for each in stage["traffic"])
    assert not torch.distributed.is_initialized()
    assert main([*argv, "--quantize", "nf4"]) == 2
    assert "leave --quantize out" in capsys.readouterr().err


def test_what_a_dry_run_refuses() -> None:
    with pytest.raises(ConfigError, match="sequence_length=0 is invalid"):
        of({"tp_size": 2}, sequence_length=0)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # 40 s of a core each
def test_gpt3_on_3072_ranks() -> None:
    gpt3 = GPT2Config(n_embd=12288, n_layer=96, n_head=96, vocab_size=51200, n_positions=2048)
    layout = ParallelConfig(tp_size=8, pp_size=64, dp_shard_size=6, sequence_parallel=True)
    found = dry_run(gpt3, layout, sequence_length=2048, num_microbatches=64, dtype=torch.bfloat16)
    print(found)
    # Positions are added before the stream is cut, which stage 0 sums besides.
    held_to(found, traffic=0.1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_llama_405b_on_16384_ranks() -> None:
    llama = LlamaConfig(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    layout = ParallelConfig(tp_size=8, pp_size=16, dp_shard_size=128, sequence_parallel=True)
    given: dict[str, Any] = {
        "dtype": torch.float32,
        "mixed_precision": "bf16",
        "num_microbatches": 16,
    }
    found = dry_run(llama, layout, sequence_length=8192, **given)
    print(found)
    held_to(found)
