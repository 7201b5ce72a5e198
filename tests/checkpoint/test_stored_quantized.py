"""Checkpoints as the Hub ships them, quantized, loaded as plain values in every layout: bit by bit the host's."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    LlamaConfig,
    Mxfp4Config,
)

import hfscale
from hfscale import CheckpointError, ConfigError, ParallelConfig, PlanError
from hfscale.checkpoint.checksums import verify_experts
from hfscale.cli import main
from hfscale.distributed.files import dequantized
from hfscale.distributed.files.writer import bytes_of
from hfscale.testing import RankPool
from hfscale.testing.verify import verify
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.shards import local_tensor

from ..stored_weights import CONFIGS, WRITTEN, table, write, write_pairs
from ..sweeps import cases
from ..tensor_memory import follow_memory
from .test_experts import count_bytes

Pools = Callable[[int], RankPool]
Layout = dict[str, int]
PAIRS = [
    *(("llama", form) for form in ("fp8", "fp8 per tensor", "int4", "nvfp4")),
    *(("qwen3_moe", form) for form in ("fp8", "int4")),
    *(("deepseek_v3", form) for form in ("fp8", "int4 experts")),
    *(("glm4_moe", form) for form in ("fp8", "float8")),
    ("minimax_m2", "fp8"),
    ("gpt_oss", "mxfp4"),
]
ASKED: dict[str, Callable[[], Any]] = {
    "fp8": lambda: FineGrainedFP8Config(dequantize=True),
    "mxfp4": lambda: Mxfp4Config(dequantize=True),
    "compressed-tensors": lambda: CompressedTensorsConfig(dequantize=True),
}
CONTEXT = {"cp_size": 2}
LAYOUTS: dict[str, Layout] = {
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2},
    "ep2": {"ep_size": 2},
    "dp_shard2": {"dp_shard_size": 2},
    "tp2-pp2": {"tp_size": 2, "pp_size": 2},
    "tp4": {"tp_size": 4},
    "ep2-dp_shard4": {"ep_size": 2, "dp_shard_size": 4},
    "ep2-tp2": {"ep_size": 2, "tp_size": 2},
    "ep2-pp2": {"ep_size": 2, "pp_size": 2},
    "tp2-dp_shard2": {"tp_size": 2, "dp_shard_size": 2},
    "cp2-dp_shard2": {**CONTEXT, "dp_shard_size": 2},
    "pp2-dp_shard2": {"pp_size": 2, "dp_shard_size": 2},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    return write_pairs(PAIRS, tmp_path_factory.mktemp)


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.filterwarnings("ignore:You passed .quantization_config.")
@pytest.mark.parametrize(("family", "form"), PAIRS)
def test_one_process_loads_what_the_host_dequantizes(
    written: dict[tuple[str, str], Path], family: str, form: str
) -> None:
    """Asked for as the host is asked, or not at all. (The host leaves unquantized weights in the type they are in;
    routers stay in 32 bits with some releases, as they do where nothing is quantized.)
    """
    directory = written[family, form]
    if WRITTEN[form].description["quant_method"] == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    asked = ASKED[WRITTEN[form].description["quant_method"]]
    for dtype in (torch.bfloat16, torch.float32):
        stock = AutoModelForCausalLM.from_pretrained(
            directory / "stored", dtype=dtype, quantization_config=asked()
        )
        ours = hfscale.from_pretrained(
            directory / "stored", dtype=dtype, quantization_config=asked()
        )
        plain = AutoModelForCausalLM.from_pretrained(directory / "plain", dtype=dtype)
        types = {name: value.dtype for name, value in plain.state_dict().items()}
        equal(
            ours.state_dict(),
            {name: value.to(types[name]) for name, value in stock.state_dict().items()},
        )
        assert not hasattr(ours.config, "quantization_config")


@pytest.mark.parametrize("layout", [{}, {"tp_size": 2}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_table_is_what_the_host_looks_up(
    dtype: torch.dtype, layout: Layout, pools: Pools, tmp_path: Path
) -> None:
    """The host keeps the codes of an embedding, and multiplies the rows that it looks up."""
    write(CONFIGS["llama"], WRITTEN["fp8"], tmp_path / "stored", tmp_path / "plain")
    file = tmp_path / "stored/model.safetensors"
    described = tmp_path / "stored/config.json"
    tensors = load_file(file)
    config = json.loads(described.read_text())
    whole = table(tensors.pop("model.embed_tokens.weight").float())
    save_file(
        {**tensors, **{f"model.embed_tokens{end}": part for end, part in whole.tensors.items()}},
        file,
    )
    config["quantization_config"]["modules_to_convert"] = ["model.embed_tokens"]
    described.write_text(json.dumps(config))
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stored", dtype=dtype)
    looked_up = stock.model.embed_tokens(torch.arange(32))
    world = ParallelConfig(**layout).total_size
    arguments = (tmp_path / "stored", layout, dtype)
    shares_found = [table_of(*arguments)] if world == 1 else pools(world).run(table_of, *arguments)
    assert looked_up.dtype == dtype
    assert torch.equal(torch.cat(shares_found), looked_up)


def table_of(path: Path, layout: Layout, dtype: torch.dtype) -> torch.Tensor:
    """This rank's rows of the embedding."""
    model = hfscale.from_pretrained(path, parallel=ParallelConfig(**layout), dtype=dtype)
    return local_tensor(model.get_parameter("model.embed_tokens.weight")).detach()


@pytest.mark.daily("torch.float64")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_any_dtype(written: dict[tuple[str, str], Path], dtype: torch.dtype) -> None:
    for directory in written.values():
        plain = AutoModelForCausalLM.from_pretrained(directory / "plain", dtype=dtype)
        ours = hfscale.from_pretrained(directory / "stored", dtype=dtype)
        assert type(ours) is type(plain)
        equal(ours.state_dict(), plain.state_dict())


def shares(
    paths: dict[tuple[str, str], Path], layout: Layout, save: bool
) -> dict[tuple[str, str], Any]:
    found = {}
    for pair, path in paths.items():
        model = hfscale.from_pretrained(
            path / "stored", parallel=ParallelConfig(**layout), dtype=torch.float32
        )
        runtime = runtime_of(model)
        held = {
            planned.name: local_tensor(p.detach()).clone() for planned, p in runtime.parameters()
        }
        verify_experts(model, path / "stored")
        found[pair] = runtime.mesh.ranks, held
        if save:
            hfscale.save_pretrained(model, path / "saved")
    return found


@pytest.mark.daily("ep2-dp_shard4")
@pytest.mark.parametrize(
    "layout", cases(LAYOUTS, daily=("tp2", "pp2", "ep2", "dp_shard2", "tp2-pp2", "ep2-dp_shard4"))
)
def test_a_rank_s_shares_are_slices_of_the_host_s_values(
    pools: Pools, written: dict[tuple[str, str], Path], layout: str
) -> None:
    parallel = ParallelConfig(**LAYOUTS[layout])
    # They do not fit.
    left_out = {"llama"} if "ep" in layout else {"minimax_m2"} if layout == "tp4" else set()
    paths = {pair: path for pair, path in written.items() if pair[0] not in left_out}
    if layout == "ep2-dp_shard4":  # of every form one
        paths = {pair: paths[pair] for pair in {pair[1]: pair for pair in paths}.values()}
    ranks = pools(parallel.total_size).run(shares, paths, LAYOUTS[layout], layout == "tp2-pp2")
    for pair, path in paths.items():
        whole = AutoModelForCausalLM.from_pretrained(
            path / "plain", dtype=torch.float32
        ).state_dict()
        plan = hfscale.plan(path / "stored", parallel)
        seen = set()
        for found in ranks:
            where, held = found[pair]
            for name, share in held.items():
                assert torch.equal(share, plan.by_name[name].take(whole[name], where)), (pair, name)
            seen |= held.keys()
        assert seen == {planned.name for planned in plan.owned()}


def test_what_is_saved_is_a_plain_checkpoint(
    written: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    for directory in written.values():
        model = hfscale.from_pretrained(directory / "stored", dtype=torch.float32)
        hfscale.save_pretrained(model, tmp_path / directory.name)
        saved, plain = (
            load_file(path / "model.safetensors")
            for path in (tmp_path / directory.name, directory / "plain")
        )
        equal(saved, {name: value.float() for name, value in plain.items()})
        assert "quantization_config" not in json.loads(
            (tmp_path / directory.name / "config.json").read_text()
        )


def same_bytes(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bytes_of(found[name]) == bytes_of(tensor), name


# What it takes


def read_bytes(path: Path, layout: Layout) -> dict[str, int]:
    with count_bytes() as read:
        hfscale.from_pretrained(path, parallel=ParallelConfig(**layout))
    return dict(read)


def test_a_rank_reads_its_own_experts_only(
    pools: Pools, written: dict[tuple[str, str], Path]
) -> None:
    for pair in (("qwen3_moe", "fp8"), ("deepseek_v3", "int4 experts"), ("gpt_oss", "mxfp4")):
        stored = load_file(written[pair] / "stored" / "model.safetensors")
        sizes = {
            key: tensor.nbytes
            for key, tensor in stored.items()
            if ".experts." in key and "_bias" not in key
        }
        whole = sum(size for key, size in sizes.items() if not key.endswith("weight_shape"))
        for read in pools(2).run(read_bytes, written[pair] / "stored", {"ep_size": 2}):
            assert sum(count for key, count in read.items() if key in sizes) == whole // 2, pair


def peak(path: Path, layout: Layout) -> tuple[int, int, int]:
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # threads would not be followed
    entries = dequantized._ENTRIES
    dequantized._ENTRIES = 1 << 12
    try:
        with follow_memory() as memory:
            model = hfscale.from_pretrained(
                path, parallel=ParallelConfig(**layout), dtype=torch.bfloat16
            )
        sizes = [local_tensor(p.detach()).nbytes for p in model.parameters()]
        return memory.peak, sum(sizes), max(sizes)
    finally:
        del os.environ["HF_DEACTIVATE_ASYNC_LOAD"]
        dequantized._ENTRIES = entries


@pytest.mark.daily("llama-fp8")
@pytest.mark.parametrize(
    ("family", "form"),
    [("llama", "fp8"), ("llama", "int4"), ("llama", "nvfp4"), ("gpt_oss", "mxfp4")],
)
def test_peak_memory_is_that_of_a_plain_load(
    pools: Pools, tmp_path: Path, family: str, form: str
) -> None:
    small = CONFIGS[family]
    config = type(small)(**{**small.to_dict(), "hidden_size": 256, "intermediate_size": 768})
    write(config, WRITTEN[form], tmp_path / "stored", tmp_path / "plain")
    alone = peak(tmp_path / "stored", {})
    for most, shard, largest in (alone, *pools(2).run(peak, tmp_path / "stored", {"tp_size": 2})):
        assert most <= 1.15 * (shard + largest)


# Combinations


def test_a_plan_needs_the_config_only(written: dict[tuple[str, str], Path]) -> None:
    for directory in written.values():
        plans = [
            hfscale.plan(directory / name, ParallelConfig(tp_size=2))
            for name in ("stored", "plain")
        ]
        assert plans[0] == plans[1]


def test_a_clone_of_a_quantized_checkpoint_is_plain(written: dict[tuple[str, str], Path]) -> None:
    config = AutoConfig.from_pretrained(written["llama", "fp8"] / "stored")
    _, parity = verify(config, ParallelConfig())
    assert parity.worst() < 1e-10
    # The caller's config stays as it was.
    assert config.quantization_config == WRITTEN["fp8"].description


def test_quantized_again_as_it_loads(written: dict[tuple[str, str], Path]) -> None:
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    ids = torch.arange(12).view(2, 6)
    for pair in (("llama", "fp8"), ("gpt_oss", "mxfp4")):
        found = [
            hfscale.from_pretrained(
                written[pair] / name, dtype=torch.float32, quantization_config=four
            )(input_ids=ids)
            for name in ("stored", "plain")
        ]
        assert torch.equal(found[0].logits, found[1].logits)


MERGED = {
    ("llama", "int4"): {"target_modules": ["q_proj", "down_proj"]},
    ("qwen3_moe", "fp8"): {
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj"],
    },
    ("deepseek_v3", "int4 experts"): {
        "target_modules": ["o_proj"],
        "target_parameters": ["mlp.experts.down_proj"],
    },
    ("gpt_oss", "mxfp4"): {
        "target_modules": ["v_proj"],
        "target_parameters": ["mlp.experts.down_proj"],
    },
}


def merged_file_to_file(
    stored: Path, out: Path, pair: tuple[str, str], quantization: str | None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Merge an adapter into ``stored``; return what is written, which is bit by bit what a loaded model writes, and
    what it streams.
    """
    lora = LoraConfig(r=2, init_lora_weights=False, **MERGED[pair])
    adapted = hfscale.from_pretrained(stored, peft_config=lora)
    hfscale.save_pretrained(adapted, out / "adapter")
    streamed = dict(
        hfscale.stream_weights(adapted, merge_adapters=True, quantization_config=quantization)
    )
    merged = hfscale.merge_and_unload(adapted)
    hfscale.save_pretrained(merged, out / "loaded", quantization=quantization)
    files = [] if quantization is None else [f"--{quantization.replace('_', '-')}"]
    places = [str(path) for path in (stored, out / "adapter", out / "out")]
    assert main(["merge", *places, *files]) == 0
    found, expected = (load_file(out / name / "model.safetensors") for name in ("out", "loaded"))
    kept = "e_score_correction_bias"  # the host loads it in float32, however it is stored
    same_bytes(
        found, {n: t.to(found[n].dtype) if n.endswith(kept) else t for n, t in expected.items()}
    )
    described = "quantization_config" in json.loads((out / "out" / "config.json").read_text())
    assert described == (quantization is not None)
    return found, streamed


@pytest.mark.daily("pair3")
@pytest.mark.parametrize("pair", MERGED)
def test_merged_file_to_file(
    written: dict[tuple[str, str], Path], tmp_path: Path, pair: tuple[str, str]
) -> None:
    merged_file_to_file(written[pair] / "stored", tmp_path, pair, None)


def test_asked_for_another_form(written: dict[tuple[str, str], Path]) -> None:
    with pytest.raises(
        ConfigError,
        match="is for a checkpoint stored in the format fp8, but this checkpoint is in mxfp4",
    ):
        hfscale.from_pretrained(
            written["gpt_oss", "mxfp4"] / "stored", quantization_config=ASKED["fp8"]()
        )
    with pytest.raises(
        ConfigError,
        match="is for a checkpoint stored in the format mxfp4, but this checkpoint is not quantized",
    ):
        hfscale.plan(written["gpt_oss", "mxfp4"] / "plain", quantization_config=ASKED["mxfp4"]())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            r"it is quantized \(gptq\) already, and hfscale reads fp8, mxfp8, mxfp4, compressed-tensors",
        ),
        ({"quant_method": "awq", "bits": 4}, r"quantized \(awq\)"),
        ({"quant_method": "modelopt"}, r"quantized \(modelopt\)"),
        (
            {**WRITTEN["int4"].description, "format": "marlin-24"},
            r"quantized \(compressed-tensors, marlin-24\)",
        ),
        (
            {**WRITTEN["int4"].description, "sparsity_config": {"format": "sparse-24-bitmask"}},
            r"weights are sparse \(sparsity_config\)",
        ),
        (
            {**WRITTEN["int4"].description, "transform_config": {"config_groups": {"R1": {}}}},
            r"rotated \(transform_config\)",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_the_plan(values: dict[str, Any], words: str) -> None:
    config = LlamaConfig(**CONFIGS["llama"].to_dict())
    config.quantization_config = values
    with pytest.raises(PlanError, match=words):
        hfscale.plan(config)


def test_a_config_that_lacks_what_is_stored(
    written: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    for file in (written["llama", "int4"] / "stored").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    described = json.loads((tmp_path / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 32]}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(CheckpointError, match="weight_packed"):
        hfscale.from_pretrained(tmp_path)
