"""Checkpoints in and out of every layout (traps T24, T29), and their failures."""

import json
import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import CheckpointError, ConfigError, ParallelConfig
from hfscale.distributed.files.reader import SafetensorsFile
from hfscale.distributed.files.writer import INDEX
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.shards import local_tensor

from ..families import config_of
from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
LAYOUTS = [{"tp_size": 2}, {"tp_size": 2, "dp_shard_size": 2}, {"dp_shard_size": 4}, {"tp_size": 4}]
IDS = torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(1))


def load_and_save(source: str, target: str, layout: dict[str, int]) -> None:
    model = hfscale.from_pretrained(source, parallel=ParallelConfig(**layout))
    hfscale.save_pretrained(model, target, max_shard_size="30KB")


@pytest.mark.daily("llama-False-layout3", "gpt2-True-layout2", "qwen3-True-layout0")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("gpt2", True), ("qwen3", True)])
def test_round_trip_is_bit_exact(
    pools: Pools, tmp_path: Path, family: str, tied: bool, layout: dict[str, int]
) -> None:
    torch.manual_seed(0)
    kwargs = {} if family == "gpt2" else {"num_key_value_heads": 4}
    stock = AutoModelForCausalLM.from_config(
        tiny(family, tie_word_embeddings=tied, **kwargs), dtype=torch.bfloat16
    )
    stock.save_pretrained(tmp_path / "in")
    pools(ParallelConfig(**layout).total_size).run(
        load_and_save, str(tmp_path / "in"), str(tmp_path / "out"), layout
    )
    stored = load_file(tmp_path / "in" / "model.safetensors")
    found: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        found.update(load_file(file))
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert found.keys() == stored.keys()
    for name, value in stored.items():
        assert torch.equal(found[name], value), name
    stock.save_pretrained(tmp_path / "sharded", max_shard_size="30KB")
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"] == json.loads((tmp_path / "sharded" / INDEX).read_text())["metadata"]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert plain.dtype == torch.bfloat16
    assert type(plain) is type(stock)
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / file).read_text()) == json.loads(
            (tmp_path / "in" / file).read_text()
        )


def save_new(target: str, layout: dict[str, int]) -> None:
    model = hfscale.from_config(config_of("gpt_neox"), parallel=ParallelConfig(**layout))
    with pytest.raises(ConfigError, match=r"save_pretrained\(push_to_hub=...\) cannot be used"):
        model.save_pretrained(target, push_to_hub=True)
    # As stock loops do.
    model.save_pretrained(target, is_main_process=torch.distributed.get_rank() == 0)


@pytest.mark.parametrize("layout", [{"dp_shard_size": 2}, {"pp_size": 2}], ids=str)
def test_a_model_that_was_never_loaded_is_stored_under_the_host_s_names(
    pools: Pools, tmp_path: Path, layout: dict[str, int]
) -> None:
    """FSDP2 gives the model a class of another name, under which the host knows no stored names."""
    AutoModelForCausalLM.from_config(config_of("gpt_neox")).save_pretrained(tmp_path / "stock")
    pools(2).run(save_new, str(tmp_path / "ours"), layout)
    names = {
        where: set(load_file(tmp_path / where / "model.safetensors")) for where in ("stock", "ours")
    }
    assert names["ours"] == names["stock"]


def save_fresh(family: str, target: str, layout: dict[str, int], seed: int) -> list[str]:
    model = hfscale.from_config(
        tiny(family), parallel=ParallelConfig(**layout), seed=seed, dtype=torch.float32
    )
    hfscale.save_pretrained(model, target)
    logits = model.eval()(input_ids=IDS).logits
    return [
        type(model).__name__,
        str(model.training),
        str(logits.shape),
        f"{logits.double().sum().item():.4f}",
    ]


@pytest.mark.daily("llama")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_random_weights_do_not_depend_on_the_layout(
    pools: Pools, tmp_path: Path, family: str
) -> None:
    expected = save_fresh(family, str(tmp_path / "one"), {}, 3)
    one = load_file(tmp_path / "one" / "model.safetensors")
    for index, layout in enumerate([{"tp_size": 2}, {"tp_size": 2, "dp_shard_size": 2}]):
        target = tmp_path / str(index)
        found = pools(ParallelConfig(**layout).total_size).run(
            save_fresh, family, str(target), layout, 3
        )
        assert all(result[2:] == expected[2:] for result in found)
        other = load_file(target / "model.safetensors")
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    save_fresh(family, str(tmp_path / "seed"), {}, 4)
    seeded = load_file(tmp_path / "seed" / "model.safetensors")
    assert not any(torch.equal(one[name], seeded[name]) for name in one if one[name].std() > 0)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_random_weights_follow_the_hosts_distribution(family: str) -> None:
    config = tiny(family, **({"n_embd": 128} if family == "gpt2" else {"hidden_size": 128}))
    stock = AutoModelForCausalLM.from_config(config)
    ours = hfscale.from_config(config)
    for (name, mine), (_, theirs) in zip(
        ours.named_parameters(), stock.named_parameters(), strict=True
    ):
        assert mine.std().item() == pytest.approx(theirs.std().item(), rel=0.1, abs=1e-9), name
        assert mine.mean().item() == pytest.approx(theirs.mean().item(), abs=0.003), name
    for (name, mine), (_, theirs) in zip(ours.named_buffers(), stock.named_buffers(), strict=True):
        assert torch.equal(mine, theirs), name


def head_shares(path: str, layout: dict[str, int]) -> tuple[dict[str, int], torch.Tensor]:
    model = hfscale.from_pretrained(path, parallel=ParallelConfig(**layout), seed=9)
    return runtime_of(model).mesh.ranks, local_tensor(model.lm_head.weight.detach())


def test_missing_weights_are_initialized_alike(pools: Pools, tmp_path: Path) -> None:
    """A checkpoint of the base model, without its prefix and without a head."""
    AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float32).model.save_pretrained(
        tmp_path
    )
    _, whole = head_shares(str(tmp_path), {})
    assert whole.std() == pytest.approx(0.02, rel=0.2)
    for ranks, share in pools(4).run(
        head_shares, str(tmp_path), {"tp_size": 2, "dp_shard_size": 2}
    ):
        rows = whole.chunk(2)[ranks["tp"]].chunk(2)[ranks["dp_shard"]]
        assert torch.equal(share, rows)


def bytes_read(path: str, layout: dict[str, int]) -> int:
    total = 0
    original = SafetensorsFile.read

    def read(self: SafetensorsFile, offset: int, buffer: torch.Tensor) -> None:
        nonlocal total
        total += buffer.numel() * buffer.element_size()
        original(self, offset, buffer)

    SafetensorsFile.read = read  # type: ignore[method-assign]
    try:
        hfscale.from_pretrained(path, parallel=ParallelConfig(**layout))
    finally:
        SafetensorsFile.read = original  # type: ignore[method-assign]
    return total


def test_a_rank_reads_its_rows_only(pools: Pools, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(
        tiny("llama", vocab_size=68, intermediate_size=64), dtype=torch.float32
    )
    model.save_pretrained(tmp_path)
    whole = sum(p.numel() * 4 for p in model.parameters())
    by_columns = sum(
        p.numel() * 4
        for name, p in model.named_parameters()
        if "o_proj" in name or "down_proj" in name
    )
    norms = sum(p.numel() * 4 for name, p in model.named_parameters() if "norm" in name)
    for read in pools(4).run(bytes_read, str(tmp_path), {"dp_shard_size": 4}):
        assert read == whole // 4
    # Rows of a matrix that is cut along its columns are read whole, a few MiB at a time.
    for read in pools(2).run(bytes_read, str(tmp_path), {"tp_size": 2}):
        assert read == (whole - by_columns - norms) // 2 + by_columns + norms


def save_without_rank_one(path: str, target: str) -> str:
    model = hfscale.from_pretrained(path, parallel=ParallelConfig(tp_size=2))
    if torch.distributed.get_rank() == 1:
        return ""
    with pytest.raises(CheckpointError) as caught:
        hfscale.save_pretrained(model, target, timeout=timedelta(seconds=1))
    return str(caught.value)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(tmp_path / "in")
    with RankPool(2) as pool:  # the failed barrier spoils the group for others
        message = pool.run(save_without_rank_one, str(tmp_path / "in"), str(tmp_path / "out"))[0]
    assert "call it on all 2 ranks" in message
    assert "1" in message.split("Nothing was written.")[1]
    assert not (tmp_path / "out").exists()


def save_on_a_full_disk(path: str, target: str, layout: dict[str, int]) -> list[str]:
    from hfscale.distributed.files.writer import CheckpointWriter

    model = hfscale.from_pretrained(path, parallel=ParallelConfig(**layout))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    calls = 0
    original = CheckpointWriter.add

    def add(self: Any, name: str, tensor: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise OSError(28, "No space left on device")
        original(self, name, tensor)

    CheckpointWriter.add = add  # type: ignore[method-assign]
    try:
        with pytest.raises(CheckpointError) as caught:
            hfscale.save_pretrained(model, target)
    finally:
        CheckpointWriter.add = original  # type: ignore[method-assign]
    return [str(caught.value)]


@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"pp_size": 2}])
def test_a_failed_write_leaves_the_old_checkpoint(
    pools: Pools, tmp_path: Path, layout: dict[str, int]
) -> None:
    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(tmp_path / "in")
    shutil.copytree(tmp_path / "in", tmp_path / "out")
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    for messages in pools(2).run(
        save_on_a_full_disk, str(tmp_path / "in"), str(tmp_path / "out"), layout
    ):
        assert "No space left" in messages[0]
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


def test_a_new_checkpoint_replaces_all_files_of_the_old(tmp_path: Path) -> None:
    big = tiny("llama", num_hidden_layers=4)
    small = tiny("llama")
    hfscale.save_pretrained(hfscale.from_config(big), tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    hfscale.save_pretrained(hfscale.from_config(small), tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.num_hidden_layers == 2


def test_load_in_another_type(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float32).save_pretrained(tmp_path)
    assert hfscale.from_pretrained(str(tmp_path)).dtype == torch.float32
    model = hfscale.from_pretrained(str(tmp_path), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_names_with_a_renamed_prefix(tmp_path: Path) -> None:
    """Old GPT-2 checkpoints have no `transformer.` prefix; what is saved loads again in plain transformers."""
    stock = AutoModelForCausalLM.from_config(tiny("gpt2"), dtype=torch.float32)
    stock.save_pretrained(tmp_path / "in")
    stored = load_file(tmp_path / "in" / "model.safetensors")
    stripped = {name.removeprefix("transformer."): value for name, value in stored.items()}
    save_file(stripped, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    hfscale.save_pretrained(hfscale.from_pretrained(str(tmp_path / "in")), tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, value in stock.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def logits_under_fsdp_switch(path: str) -> torch.Tensor:
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true")
    try:
        model = hfscale.from_pretrained(path, parallel=ParallelConfig(tp_size=2))
        assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    finally:
        del os.environ["ACCELERATE_USE_FSDP"], os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"]
    return model(input_ids=IDS).logits.detach()


def test_every_rank_reads_its_own_under_an_fsdp_launch_line(pools: Pools, tmp_path: Path) -> None:
    """With that switch on, the host fills weights and buffers on rank 0 only."""
    stock = AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float32).eval()
    stock.save_pretrained(tmp_path)
    for found in pools(2).run(logits_under_fsdp_switch, str(tmp_path)):
        torch.testing.assert_close(found, stock(input_ids=IDS).logits)
