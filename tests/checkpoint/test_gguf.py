"""GGUF files: the bits of stock's load, in any layout, by slices."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    GgufConfig,
    GPT2Config,
    Phi3Config,
    PreTrainedConfig,
    StableLmConfig,
    Starcoder2Config,
)

import hfscale
from hfscale import CheckpointError, ParallelConfig
from hfscale.cli import main
from hfscale.testing import RankPool

from ..gguf_files import write_gguf
from ..mixtures import qwen2_moe, qwen3_moe
from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 67}
OTHERS: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": tiny("llama", tie_word_embeddings=False, **SIZES),
    "tied": tiny("llama", tie_word_embeddings=True, **SIZES),
    "blocks of 256": tiny("llama", **{**SIZES, "hidden_size": 256, "intermediate_size": 512}),
    "mistral": tiny("mistral", head_dim=16, **SIZES),
    "qwen2": tiny("qwen2", **SIZES),
    "qwen3": tiny("qwen3", tie_word_embeddings=True, **SIZES),
    "qwen2_moe": qwen2_moe(hidden_size=64, moe_intermediate_size=32),
    "qwen3_moe": qwen3_moe(hidden_size=64, moe_intermediate_size=32),
    "gemma3": Gemma3TextConfig(**OTHERS, head_dim=16, query_pre_attn_scalar=16),
    "phi3": Phi3Config(**OTHERS),
    "starcoder2": Starcoder2Config(**OTHERS),
    "stablelm": StableLmConfig(**OTHERS),
}
KINDS = {
    "llama": Kind.Q4_0,
    "tied": Kind.BF16,
    "qwen2": Kind.F16,
    "blocks of 256": Kind.Q4_K,
    "qwen3_moe": Kind.Q4_0,
}
WHOLE = (
    "llama",
    "tied",
    "qwen2",
    "blocks of 256",
)  # of which the file says all that the config does
LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2},
    "shard2": {"dp_shard_size": 2},
}


def loaded(path: str, layout: dict[str, int], **options: Any) -> dict[str, Any]:
    model = hfscale.from_pretrained(path, parallel=ParallelConfig(**layout), **options)
    return dict(hfscale.stream_weights(model))


def apart(function: Callable[..., Any], *given: Any, **options: Any) -> list[Any]:
    return [function(*given, **options)]


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_those_of_stock(name: str, pools: Pools, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", CONFIGS[name], KINDS.get(name, Kind.Q8_0))
    base = {} if name in WHOLE else {"config": CONFIGS[name]}
    stock_base = base if name != "mistral" else {"config": CONFIGS["llama"]}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", **stock_base)
    stock = model.state_dict()
    for layout in LAYOUTS.values():
        run = pools(2).run if layout else apart
        found = run(loaded, f"{tmp_path}/m.gguf", layout, **base)[0]
        assert found.keys() <= stock.keys()
        for key, value in found.items():
            assert torch.equal(value, stock[key]), (layout, key)


def test_architectures_without_rules_are_read_whole(
    pools: Pools, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=67, n_positions=64)
    write_gguf(tmp_path / "m.gguf", config)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", config=config)
    found = loaded(str(tmp_path), {}, config=config)
    assert "every rank reads" not in caplog.text
    both = pools(2).run(loaded, str(tmp_path), {"tp_size": 2}, config=config)[0]
    for name, value in found.items():
        assert torch.equal(value, stock.state_dict()[name]), name
        assert torch.equal(value, both[name]), name


def test_ways_to_name_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = CONFIGS["tied"]
    inside = tmp_path / "sub"
    inside.mkdir()
    write_gguf(inside / "m.gguf", config)
    expected = loaded(str(inside / "m.gguf"), {})
    ways = [
        (str(inside), {"gguf_file": "m.gguf"}),
        (str(inside), {}),
        (str(tmp_path), {"gguf_file": "m.gguf", "subfolder": "sub"}),
        (str(tmp_path), {"gguf_file": str(inside / "m.gguf")}),
        (str(inside), {"quantization_config": GgufConfig(dequantize=True)}),
    ]
    for path, options in ways:
        found = loaded(path, {}, **options)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    planned = hfscale.plan(inside / "m.gguf", ParallelConfig(tp_size=2))
    assert {each.name for each in planned.parameters} == expected.keys() | {"lm_head.weight"}
    resized = loaded(str(inside), {}, resize_token_embeddings=70)["model.embed_tokens.weight"]
    assert torch.equal(resized[:67], expected["model.embed_tokens.weight"])
    with pytest.raises(CheckpointError, match="must be a file in"):
        hfscale.from_pretrained(inside, gguf_file="other.gguf")
    with pytest.raises(CheckpointError, match=r"hfscale\.from_pretrained"):
        hfscale.load_state(hfscale.from_config(config), inside, missing_ok=True)
    shutil.copyfile(inside / "m.gguf", inside / "n.gguf")
    with pytest.raises(CheckpointError, match="must hold exactly one GGUF file"):
        hfscale.from_pretrained(inside)
    assert main(["inspect", str(inside)]) == 1
    assert "give the path of one" in capsys.readouterr().out


def test_converted_and_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "m.gguf", CONFIGS["qwen2"], Kind.Q4_0)
    assert main(["inspect", str(tmp_path / "m.gguf")]) == 0
    told = capsys.readouterr().out
    assert "qwen2" in told
    assert "Q4_0" in told
    assert main(["convert", str(tmp_path / "m.gguf"), str(tmp_path / "out")]) == 0
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf").state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert found.keys() == stock.keys()
    assert all(torch.equal(found[name], value) for name, value in stock.items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.convert_tokens_to_ids("t3") == 14
    model = hfscale.get_peft_model(hfscale.from_pretrained(tmp_path / "m.gguf"), LoraConfig())
    hfscale.save_pretrained(model, tmp_path / "adapter")
    assert main(["merge", str(tmp_path), str(tmp_path / "adapter"), str(tmp_path / "out2")]) != 0
    assert "hfscale convert" in capsys.readouterr().err


def test_what_stock_made_plain_is_not_quantized(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", CONFIGS["llama"])
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf")
    described = copy.deepcopy(stock.config)
    before = {name: value.clone() for name, value in stock.state_dict().items()}
    assert described.quantization_config.quant_method == "gguf"
    model = hfscale.parallelize(stock)
    hfscale.save_pretrained(model, tmp_path / "out")
    described.save_pretrained(tmp_path / "out")  # as a script that saves weights by itself does
    found = loaded(str(tmp_path / "out"), {})
    assert all(torch.equal(found[name], value) for name, value in before.items())
    hfscale.plan(described, ParallelConfig(tp_size=2))


@pytest.mark.parametrize("scaling", ["factors", "linear"])
def test_scaled_rotary_embeddings_are_told(
    scaling: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_gguf(tmp_path / "m.gguf", CONFIGS["llama"], scaling=scaling)
    hfscale.from_pretrained(tmp_path)
    assert "scales rotary embeddings" in caplog.text
    caplog.clear()
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    config = tiny("llama", tie_word_embeddings=False, rope_parameters=rope, **SIZES)
    hfscale.from_pretrained(tmp_path, config=config)
    assert "scales rotary embeddings" not in caplog.text


def _on_the_hub(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a Hub cache that holds a file of ``org/repo``, and take the network away."""
    revision = "0123456789" * 4
    repository = directory / "models--org--repo"
    snapshot = repository / "snapshots" / revision
    (snapshot / "sub").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    write_gguf(snapshot / "x.gguf", CONFIGS["llama"])
    shutil.copyfile(snapshot / "x.gguf", snapshot / "sub" / "y.gguf")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(directory))


@pytest.mark.filterwarnings("ignore:Could not find a config file")
@pytest.mark.parametrize(
    "given",
    [
        {"gguf_file": "x.gguf"},
        {"gguf_file": "x.gguf", "revision": "main"},
        {"gguf_file": "sub/y.gguf"},
        {"gguf_file": "y.gguf", "subfolder": "sub"},
    ],
)
def test_a_file_of_the_hub_is_read_as_by_stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    _on_the_hub(tmp_path / "hub", monkeypatch)
    given = {**given, "cache_dir": str(tmp_path / "hub")}
    expected = AutoModelForCausalLM.from_pretrained("org/repo", **given)
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = hfscale.from_pretrained("org/repo", **given)
    found = model.state_dict()
    for name, value in expected.state_dict().items():
        assert torch.equal(found[name], value), name
    # Not the path of a cache, which adapters' configs would name.
    assert model.name_or_path == expected.name_or_path == "org/repo"
    assert model.config.name_or_path == "org/repo"
    adapted = hfscale.from_pretrained("org/repo", peft_config=lora, **given)
    hfscale.save_pretrained(adapted, tmp_path / "adapter")
    told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == "org/repo"
    planned = hfscale.plan("org/repo", **given)
    assert planned.by_name.keys() >= set(dict(expected.named_parameters()))
    with pytest.raises(OSError, match="offline mode"):
        hfscale.from_pretrained("org/repo", **{**given, "gguf_file": "z.gguf"})
