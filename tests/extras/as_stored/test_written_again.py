"""Weights that a checkpoint stores quantized are written quantized again, in the same format."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale.api.adapter_files import merge_adapter
from hfscale.checkpoint.load import load_weights
from hfscale.cli import main
from hfscale.distributed.files.writer import bytes_of
from hfscale.testing import RankPool
from hfscale.train.runtime.shards import local_tensor

from ...checkpoint.test_stored_quantized import (
    ASKED,
    LAYOUTS,
    MERGED,
    PAIRS,
    Layout,
    equal,
    merged_file_to_file,
    same_bytes,
)
from ...stored_weights import WRITTEN, write_pairs
from ...sweeps import cases

Pools = Callable[[int], RankPool]
Pair = tuple[str, str]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[Pair, Path]:
    return write_pairs(PAIRS, tmp_path_factory.mktemp)


def identical(first: Path, second: Path) -> None:
    same_bytes(*(load_file(path / "model.safetensors") for path in (first, second)))
    described = [
        json.loads((path / "config.json").read_text())["quantization_config"]
        for path in (first, second)
    ]
    assert described[0] == described[1]


@pytest.mark.daily("torch.float32")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_an_untouched_checkpoint_is_saved_as_it_was(
    written: dict[Pair, Path], tmp_path: Path, dtype: torch.dtype
) -> None:
    for directory in written.values():
        model = hfscale.from_pretrained(directory / "stored", dtype=dtype)
        hfscale.save_pretrained(model, tmp_path / directory.name, quantization="as_stored")
        identical(tmp_path / directory.name, directory / "stored")


def save_as_stored(paths: dict[Pair, Path], layout: Layout) -> None:
    for path in paths.values():
        model = hfscale.from_pretrained(path / "stored", parallel=ParallelConfig(**layout))
        hfscale.save_pretrained(model, path / "again", quantization="as_stored")


@pytest.mark.parametrize("layout", cases(["tp2-pp2", "ep2-dp_shard4"], daily=["tp2-pp2"]))
def test_ranks_save_it_as_it_was(pools: Pools, written: dict[Pair, Path], layout: str) -> None:
    paths = {pair: written[pair] for pair in (("qwen3_moe", "int4"), ("gpt_oss", "mxfp4"))}
    pools(4).run(save_as_stored, paths, LAYOUTS[layout])
    for path in paths.values():
        identical(path / "again", path / "stored")


@pytest.mark.parametrize("pair", [("qwen3_moe", "fp8"), ("gpt_oss", "mxfp4")])
def test_trained_weights_are_quantized_again(
    written: dict[Pair, Path], tmp_path: Path, pair: Pair
) -> None:
    """What stock code and hfscale read of it is the same, and near to what was trained."""
    model = hfscale.from_pretrained(written[pair] / "stored", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator)
            )
    hfscale.save_pretrained(model, tmp_path / "out", quantization="as_stored")
    asked = ASKED[WRITTEN[pair[1]].description["quant_method"]]
    stock = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, quantization_config=asked()
    )
    ours = hfscale.from_pretrained(tmp_path / "out", dtype=torch.float32)
    equal(ours.state_dict(), {name: each.float() for name, each in stock.state_dict().items()})
    for name, parameter in model.named_parameters():
        apart = (ours.get_parameter(name) - parameter).norm()
        assert apart <= (0.15 if pair[1] == "mxfp4" else 0.04) * parameter.norm(), name


def test_what_was_not_stored_quantized(written: dict[Pair, Path], tmp_path: Path) -> None:
    model = hfscale.from_pretrained(written["llama", "fp8"] / "plain")
    with pytest.raises(
        ConfigError, match="needs the quantized checkpoint that the model was loaded from"
    ):
        hfscale.save_pretrained(model, tmp_path / "out", quantization="as_stored")
    with pytest.raises(ConfigError, match="quantization must be 'as_stored' or None, got 'fp8'"):
        hfscale.save_pretrained(model, tmp_path / "out", quantization="fp8")


@pytest.mark.daily("pair3")
@pytest.mark.parametrize("pair", MERGED)
def test_merged_file_to_file(written: dict[Pair, Path], tmp_path: Path, pair: Pair) -> None:
    """Bit by bit what a loaded model writes and streams; untouched tensors byte for byte."""
    found, streamed = merged_file_to_file(written[pair] / "stored", tmp_path, pair, "as_stored")
    same_bytes(streamed, found)
    before = load_file(written[pair] / "stored" / "model.safetensors")
    changed = {name for name, tensor in before.items() if bytes_of(found[name]) != bytes_of(tensor)}
    targets = (
        "q_proj",
        "v_proj",
        "o_proj",
        ".down_proj",
        "gate_proj",
        "up_proj",
        "experts.down_proj",
    )
    assert changed
    assert all(any(target in name for target in targets) for name in changed)


def test_a_model_with_adapters_is_not_saved_as_stored(
    written: dict[Pair, Path], tmp_path: Path
) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    adapted = hfscale.from_pretrained(written["llama", "int4"] / "stored", peft_config=lora)
    with pytest.raises(
        ConfigError,
        match="quantization='as_stored' writes full weights, but the model has adapters",
    ):
        hfscale.save_pretrained(adapted, tmp_path / "loaded", quantization="as_stored")


def test_a_plain_base_has_no_stored_form(written: dict[Pair, Path], tmp_path: Path) -> None:
    plain = written["llama", "fp8"] / "plain"
    adapted = hfscale.from_pretrained(plain, peft_config=LoraConfig(r=2, target_modules=["q_proj"]))
    hfscale.save_pretrained(adapted, tmp_path / "adapter")
    with pytest.raises(ConfigError, match="does not store quantized weights"):
        merge_adapter(plain, tmp_path / "adapter", tmp_path / "out", quantization="as_stored")
    with pytest.raises(ConfigError, match="needs the quantized checkpoint"):
        hfscale.stream_weights(adapted, quantization_config="as_stored")


def reload_and_save_state(paths: dict[Pair, Path], layout: Layout, out: Path) -> None:
    """Replace weights by those of a quantized checkpoint, stream them as stored, and save a state of them."""
    for pair, path in paths.items():
        model = hfscale.from_pretrained(path / "stored", parallel=ParallelConfig(**layout))
        with torch.no_grad():
            for parameter in model.parameters():
                local_tensor(parameter).zero_()
        load_weights(model, path / "stored")
        streamed = {
            n: t.clone() for n, t in hfscale.stream_weights(model, quantization_config="as_stored")
        }
        if streamed:
            same_bytes(streamed, load_file(path / "stored" / "model.safetensors"))
        hfscale.save_state(model, out / pair[0], step=1)


def test_states_are_converted_as_stored(
    pools: Pools,
    written: dict[Pair, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = {
        pair: written[pair]
        for pair in (("qwen3_moe", "fp8"), ("gpt_oss", "mxfp4"), ("llama", "int4"))
    }
    pools(4).run(reload_and_save_state, paths, LAYOUTS["tp2-pp2"], tmp_path)
    for pair, path in paths.items():
        assert (
            main(
                [
                    "convert",
                    str(tmp_path / pair[0]),
                    str(tmp_path / "out"),
                    "--as-stored",
                    "--overwrite",
                ]
            )
            == 0
        )
        identical(tmp_path / "out", path / "stored")
