"""An adapter merged into its base on disk is what stock PEFT merges in memory, bit by bit."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    ViTConfig,
)

import hfscale
from hfscale.api import adapter_files
from hfscale.cli import main

from ...families import config_of
from ...mixtures import qwen3_moe
from ...tiny_models import tiny

# What PEFT says of its own saving and of ties.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
]

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lora": (lambda: tiny("llama"), {"target_modules": "all-linear"}),
    "dora": (lambda: tiny("llama"), {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "transposed": (
        lambda: tiny("gpt2"),
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
    ),
    "copy": (
        lambda: tiny("llama", tie_word_embeddings=False),
        {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    ),
    "decomposed": (
        lambda: tiny("gpt2"),
        {"target_modules": ["c_attn"], "fan_in_fan_out": True, "init_lora_weights": "pissa"},
    ),
    "orthogonal factors": (
        lambda: tiny("llama"),
        {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": "olora"},
    ),
    "mixture": (qwen3_moe, {"target_modules": ["q_proj", "o_proj"]}),
    "experts": (
        qwen3_moe,
        {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_merged(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, options = KINDS[kind]
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(make(), dtype=torch.float32)
    base.save_pretrained(tmp_path / "base", max_shard_size="30KB")
    options = {"init_lora_weights": False, **options}
    adapted = get_peft_model(base, LoraConfig(r=4, task_type="CAUSAL_LM", **options))
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "expected")
    assert main(["merge", *(str(tmp_path / name) for name in ("base", "adapter", "out"))]) == 0
    out = capsys.readouterr().out
    assert "tensors have the adapter in them" in out
    assert float(out.partition("differ by ")[2].split()[0]) < 1e-5
    expected = {}
    found = {}
    for name, into in (("expected", expected), ("out", found)):
        for file in (tmp_path / name).glob("*.safetensors"):
            into.update(load_file(file))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_what_is_there_stays_unless_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float32)
    base.save_pretrained(tmp_path / "base")
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    places = [str(tmp_path / name) for name in ("base", "adapter", "out")]
    (tmp_path / "out").mkdir()
    # Which stock transformers would load on top.
    (tmp_path / "out" / "adapter_config.json").write_text("{}")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert main(["merge", *places, "--no-check"]) == 2
    said = capsys.readouterr().err
    assert (
        "out has files already (adapter_config.json, notes.txt): name another directory, or replace them"
        in said
    )
    assert main(["merge", *places, "--no-check", "--overwrite"]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "notes.txt"} <= names
    assert "adapter_config.json" not in names
    for read in places[:2]:
        assert main(["merge", *places[:2], read, "--overwrite"]) == 2
        assert "must not be the directory that is read as" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["merge", *places[:2], str(tmp_path / "file"), "--overwrite"]) == 2
    assert "is a file: name a directory" in capsys.readouterr().err


IDS = torch.randint(3, 70, (2, 12), generator=torch.Generator().manual_seed(1))


def loss_of(model: Any, ids: torch.Tensor) -> float:
    with torch.no_grad():
        return float(model.eval()(input_ids=ids, labels=ids).loss)


def places(directory: Path) -> list[str]:
    return [str(directory / name) for name in ("base", "adapter", "out")]


def save_trained(
    directory: Path, config: Any, tokens: int, embedding: bool = False, **options: Any
) -> float:
    """A base and a trained stock adapter; the live loss on ``tokens`` tokens."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory / "base")
    base = AutoModelForCausalLM.from_pretrained(directory / "base")
    if tokens != config.vocab_size:
        base.resize_token_embeddings(tokens)
    options = {"target_modules": ["q_proj"], **options}
    model = get_peft_model(
        base, LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **options)
    )
    if embedding:
        model.get_input_embeddings().weight.requires_grad_(True)
    ids = IDS % tokens
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= parameter.grad
                    parameter.grad = None
    model.save_pretrained(
        directory / "adapter", save_embedding_layers=True if embedding else "auto"
    )
    return loss_of(model, ids)


BESIDE: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "biases": ({}, 67, {"bias": "all"}),
    "biases of the adapted": ({}, 67, {"bias": "lora_only"}),
    "embedding": ({}, 67, {"embedding": True}),
    "embedding, tied": ({"tie_word_embeddings": True}, 67, {"embedding": True}),
    "new tokens": ({}, 70, {}),
    "new tokens, tied": ({"tie_word_embeddings": True}, 70, {}),
    "new tokens, fewer": ({}, 61, {}),
    "new tokens, trained": ({}, 70, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "new tokens, adapted": ({}, 70, {"target_modules": ["q_proj", "lm_head", "embed_tokens"]}),
}


@pytest.mark.parametrize("kind", BESIDE)
def test_what_is_no_factor_is_merged_too(tmp_path: Path, kind: str) -> None:
    changes, tokens, options = BESIDE[kind]
    live = save_trained(tmp_path, tiny("qwen2", **changes), tokens, **options)
    assert main(["merge", *places(tmp_path)]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loss_of(merged, IDS % tokens) == pytest.approx(live, rel=1e-5)
    assert merged.config.vocab_size == len(merged.get_input_embeddings().weight) == tokens


def test_files_of_older_versions_are_merged(tmp_path: Path) -> None:
    """``pytorch_model.bin`` and ``adapter_model.bin``."""
    live = save_trained(tmp_path, tiny("qwen2"), 67, bias="all")
    for name, old in (("base", "pytorch_model.bin"), ("adapter", "adapter_model.bin")):
        (file,) = (tmp_path / name).glob("*.safetensors")
        torch.save(load_file(file), tmp_path / name / old)
        file.unlink()
    assert main(["merge", *places(tmp_path)]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loss_of(merged, IDS % 67) == pytest.approx(live, rel=1e-5)
    assert not list((tmp_path / "out").glob("*.bin"))


def test_an_adapter_of_new_tokens_that_hfscale_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(tmp_path / "base")
    config = LoraConfig(
        r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    options: dict[str, Any] = {
        "dtype": torch.float32,
        "peft_config": config,
        "resize_token_embeddings": 70,
    }
    model = hfscale.from_pretrained(tmp_path / "base", **options)
    hfscale.save_pretrained(model, tmp_path / "adapter")
    (tmp_path / "adapter" / "tokenizer.json").write_text("{}")
    assert main(["merge", *places(tmp_path)]) == 0
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert AutoConfig.from_pretrained(tmp_path / "out").vocab_size == 70
    assert loss_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), IDS) == pytest.approx(
        loss_of(model, IDS)
    )


def of_a_class(
    directory: Path, family: str, kind: Any, task: str, tokens: int, **options: Any
) -> tuple[Any, dict[str, torch.Tensor]]:
    """A base and a stock adapter of another class; PEFT's model, and a batch for it."""
    torch.manual_seed(0)
    kind.from_config(config_of(family)).save_pretrained(directory / "base")
    base = kind.from_pretrained(directory / "base")
    if tokens != base.config.vocab_size:
        base.resize_token_embeddings(tokens, mean_resizing=False)
    model = get_peft_model(
        base, LoraConfig(r=4, init_lora_weights=False, task_type=task, **options)
    )
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory / "adapter")
    ids = IDS % tokens
    batch = {"input_ids": ids}
    if base.config.is_encoder_decoder:
        batch["decoder_input_ids"] = ids
    return model.eval(), batch


CLASSES: dict[str, tuple[Any, ...]] = {
    "translation": ("t5", AutoModelForSeq2SeqLM, "SEQ_2_SEQ_LM", 70, {"target_modules": ["q"]}),
    "a buffer that grows": (
        "bart", AutoModelForSeq2SeqLM, "SEQ_2_SEQ_LM", 70, {"target_modules": ["q_proj"]}
    ),
    "biases of a copy": (
        "bert", AutoModelForSequenceClassification, "SEQ_CLS", 67,
        {"target_modules": ["query"], "bias": "all"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_other_classes(tmp_path: Path, name: str) -> None:
    family, kind, task, tokens, options = CLASSES[name]
    model, batch = of_a_class(tmp_path, family, kind, task, tokens, **options)
    assert main(["merge", *places(tmp_path)]) == 0
    merged = kind.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(merged(**batch).logits, model(**batch).logits)


def test_stock_loads_biases_of_a_copy_that_hfscale_saved(tmp_path: Path) -> None:
    kind = AutoModelForSequenceClassification
    options: dict[str, Any] = {"target_modules": ["query"], "bias": "all"}
    stock, batch = of_a_class(tmp_path, "bert", kind, "SEQ_CLS", 67, **options)
    path = tmp_path / "base"
    model = hfscale.from_pretrained(path, auto_class=kind, peft_config=tmp_path / "adapter")
    hfscale.save_pretrained(model, tmp_path / "again")
    loaded = PeftModel.from_pretrained(kind.from_pretrained(path), tmp_path / "again").eval()
    torch.testing.assert_close(loaded(**batch).logits, stock(**batch).logits)


def test_what_no_file_tells_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(tmp_path / "base")
    prompt = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    drawn = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa_niter_2")
    replicas = LoraConfig(r=2, target_modules=["q_proj"], layer_replication=[(0, 2), (1, 2)])
    for config, words in (
        (prompt, "must be an adapter of weights"),
        (drawn, "pissa_niter_2"),
        (replicas, "layer_replication=[[0, 2], [1, 2]]"),
    ):
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
        assert main(["merge", *places(tmp_path)]) == 2
        assert words in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


REFUSED = {
    "strange": (
        lambda key: "q_proj.lora_A" in key,
        lambda key: key.replace("q_proj", "z_proj"),
        "lacks 2 tensors",
    ),
    "beside": (
        None,
        lambda key: key.replace("q_proj", "z_proj"),
        "z_proj.lora_A.weight, which belongs to no weight",
    ),
    "head": (
        lambda key: "lm_head" in key,
        None,
        "trained with a vocabulary of 70 tokens, but has no lm_head.weight",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_keys_without_a_place_are_refused_before_anything_is_written(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dropped, added, words = REFUSED[kind]
    save_trained(tmp_path, tiny("llama"), 70)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    more = (
        {added(key): value.clone() for key, value in tensors.items() if "q_proj" in key}
        if added
        else {}
    )
    kept = {key: value for key, value in tensors.items() if dropped is None or not dropped(key)}
    save_file({**more, **kept}, file, metadata={"format": "pt"})
    assert main(["merge", *places(tmp_path)]) != 0
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_failed_check_is_an_exit_code_and_leaves_what_was_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_trained(tmp_path, tiny("llama"), 67)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("mine")
    with patch.object(
        adapter_files.WholeMerge, "merged", lambda self, name, parts: {name: 2 * parts[name]}
    ):
        assert main(["merge", *places(tmp_path), "--overwrite"]) != 0
    assert "and rounding explains only" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]
    assert (tmp_path / "out" / "config.json").read_text() == "mine"


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize("kind", ["translation", "pictures"])
def test_merging_in_memory_measures_what_reads_tokens(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: Any = (config_of("t5"), AutoModelForSeq2SeqLM, ["q"])
    if kind == "pictures":
        config = ViTConfig(image_size=8, patch_size=4, num_labels=3, **SMALL)
        asked = (config, AutoModelForImageClassification, ["q_proj"])
    config, auto_class, targets = asked
    lora = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    model = hfscale.from_config(config, auto_class=auto_class, peft_config=lora)
    hfscale.merge_and_unload(model)
    assert ("largest difference" in capsys.readouterr().err) == (kind == "translation")
