"""Bad input: every message says what was asked, what was found and what to do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, BertForPreTraining, MambaConfig

import hfscale
from hfscale import (
    CheckpointError,
    ConfigError,
    Float8Config,
    HFScaleError,
    MemoryConfig,
    MeshError,
    ParallelConfig,
    PlanError,
)
from tests.tiny_models import tiny


def _says(expected: type[HFScaleError], call: Callable[[], Any], *words: str) -> None:
    with pytest.raises(expected) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.fixture
def model() -> Any:
    return AutoModelForCausalLM.from_config(tiny("llama"))


@pytest.fixture
def saved(model: Any, tmp_path: Path) -> str:
    model.save_pretrained(tmp_path / "saved")
    return str(tmp_path / "saved")


def _batch(**changes: Any) -> dict[str, Any]:
    ids = torch.arange(8).view(2, 4)
    return {"input_ids": ids, "labels": ids, **changes}


# Arguments


@pytest.mark.parametrize(
    ("name", "hint"), [("paralel", "parallel"), ("attn_implementatio", "attn_implementation")]
)
def test_an_argument_that_nobody_takes(name: str, hint: str, saved: str, model: Any) -> None:
    _says(
        ConfigError,
        lambda: hfscale.from_pretrained(saved, **{name: None}),
        name,
        f"did you mean {hint}?",
    )
    _says(
        ConfigError,
        lambda: hfscale.from_config(model.config, **{name: None}),
        name,
        f"did you mean {hint}?",
    )


def test_an_argument_that_is_like_no_other(saved: str) -> None:
    _says(
        ConfigError,
        lambda: hfscale.from_pretrained(saved, zzz=1),
        "zzz",
        "LlamaForCausalLM",
        "mixed_precision",
    )


def test_arguments_that_others_take(saved: str) -> None:
    kwargs = {
        "attn_implementation": "eager",
        "use_cache": False,
        "low_cpu_mem_usage": True,
        "local_files_only": True,
    }
    assert hfscale.from_pretrained(saved, **kwargs).config.use_cache is False


def test_float16_is_for_inference(saved: str) -> None:
    model = hfscale.from_pretrained(saved, dtype=torch.float16)
    assert torch.isfinite(hfscale.eval_step(model, _batch()))
    _says(
        ConfigError,
        lambda: hfscale.train_step(model.train(), _batch()),
        "float16",
        'mixed_precision="fp16"',
        "bf16",
    )


# Layouts


def test_errors_have_one_root_and_pythons_own_kinds() -> None:
    for error, kind in [
        (ConfigError, ValueError),
        (PlanError, ValueError),
        (MeshError, RuntimeError),
    ]:
        assert issubclass(error, HFScaleError)
        assert issubclass(error, kind)


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("tp", "tp_size"),
        ("dp_shards_size", "dp_shard_size"),
        ("sequence_paralel", "sequence_parallel"),
    ],
)
def test_a_misspelt_field(misspelt: str, meant: str) -> None:
    _says(
        ConfigError,
        lambda: ParallelConfig(**{misspelt: 2}),
        f"ParallelConfig has no field '{misspelt}'",
        f"did you mean '{meant}'?",
        "Its fields are dp_replicate_size",
        "pipeline_schedule",
    )


@pytest.mark.parametrize(
    ("nonsense", "says"),
    [
        (
            lambda: MemoryConfig(recompute="8GiB", tokens="4K"),
            "tokens='4K' is invalid: use a whole number",
        ),
        (lambda: Float8Config(leave_out=None), "leave_out=None is invalid: pass a list of names"),
        (
            lambda: hfscale.plan(tiny("llama"), recompute="full"),
            "recompute= is not an argument of hfscale",
        ),
        (
            lambda: hfscale.plan(tiny("llama"), "tp2"),
            "parallel must be a hfscale.ParallelConfig, got 'tp2'",
        ),
    ],
)
def test_nonsense_is_refused_with_the_plan(nonsense: Callable[[], Any], says: str) -> None:
    _says(ConfigError, nonsense, says)


def test_a_field_that_is_like_no_other() -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelConfig(wings=2)  # type: ignore[call-arg]
    assert "no field 'wings'" in str(caught.value)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    "size", [0, -1, 1.5, "two", "1.5", "", True, False, float("inf"), float("nan"), [2], 2 + 0j]
)
@pytest.mark.parametrize(
    "field", ["tp_size", "pp_size", "dp_shard_size", "num_microbatches", "virtual_stages"]
)
def test_impossible_sizes(field: str, size: Any) -> None:
    _says(
        ConfigError,
        lambda: ParallelConfig(**{field: size}),
        f"{field}={size!r} is invalid",
        "use a whole number of at least 1",
    )


@pytest.mark.parametrize("value", [2, "yes please", 0.5])
def test_an_impossible_switch(value: Any) -> None:
    words = (f"sequence_parallel={value!r} is invalid", "use True or False")
    _says(ConfigError, lambda: ParallelConfig(sequence_parallel=value), *words)


@pytest.mark.parametrize("schedule", ["1F1B ", "zigzag", "schedule.txt", 7])
def test_an_unknown_schedule(schedule: Any) -> None:
    words = (f"pipeline_schedule={schedule!r} is unknown", "gpipe, 1f1b, interleaved1f1b", ".csv")
    _says(ConfigError, lambda: ParallelConfig(pipeline_schedule=schedule), *words)


def test_a_schedule_that_is_nearly_right() -> None:
    _says(ConfigError, lambda: ParallelConfig(pipeline_schedule="1F1b1"), "did you mean '1f1b'?")
    assert ParallelConfig(pipeline_schedule="1F1B").pipeline_schedule == "1f1b"


def test_another_librarys_axes() -> None:
    _says(
        ConfigError,
        lambda: ParallelConfig(sp_size=2),
        "sp_size=2",
        "DeepSpeed",
        "use sp_size=1",
        "cp_size",
    )
    _says(ConfigError, lambda: ParallelConfig(cp_backend="jax"), "cp_backend='jax'", "use 'torch'")  # type: ignore[arg-type]


def test_a_layout_that_is_none(saved: str) -> None:
    words = (
        "parallel must be a hfscale.ParallelConfig, got {'tp_size': 2}",
        "hfscale.ParallelConfig(tp_size=...)",
    )
    _says(ConfigError, lambda: hfscale.from_pretrained(saved, parallel={"tp_size": 2}), *words)  # type: ignore[arg-type]


# Processes


@pytest.mark.parametrize("build", ["from_pretrained", "from_config", "parallelize"])
def test_too_few_processes(build: str, saved: str, model: Any) -> None:
    source = {"from_pretrained": saved, "from_config": model.config, "parallelize": model}[build]
    layout = ParallelConfig(tp_size=2, dp_shard_size=4)
    _says(
        MeshError,
        lambda: getattr(hfscale, build)(source, parallel=layout),
        "tp2 x dp_shard4 needs 8 process(es) and 1 were started",
        "accelerate launch --multi_gpu --num_processes 8",
        "sizes whose product is 1",
    )


def test_too_few_processes_for_stages(saved: str) -> None:
    layout = ParallelConfig(pp_size=2, tp_size=2)
    words = ("tp2 x pp2 needs 4 process(es) and 1 were started", "--num_processes 4")
    _says(MeshError, lambda: hfscale.from_pretrained(saved, parallel=layout), *words)


def test_more_stages_than_layers(saved: str) -> None:
    words = ("pp_size=3 asks for more stages than the 2 layers of 'llama'", "use pp_size 1 to 2")
    _says(
        PlanError,
        lambda: hfscale.from_pretrained(saved, parallel=ParallelConfig(pp_size=3)),
        *words,
    )
    layout = ParallelConfig(pp_size=2, stage_layers=(1, 2))
    words = ("stage_layers=[1, 2] adds up to 3 layers", "has 2", "sum up to 2")
    _says(PlanError, lambda: hfscale.from_pretrained(saved, parallel=layout), *words)


def test_too_many_processes(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    words = (
        "one process needs 1 process(es) and 3 were started",
        "--num_processes 1",
        "whose product is 3",
    )
    _says(MeshError, lambda: hfscale.parallelize(model), *words)


# Two ways to distribute


@pytest.mark.parametrize(
    ("name", "value"),
    [("device_map", "auto"), ("distributed_config", {"tp_size": 2}), ("tp_plan", "auto")],
)
def test_distributed_by_the_host_at_once(name: str, value: Any, saved: str) -> None:
    words = (
        name,
        "in another way than hfscale does",
        "leave these arguments out",
        "parallel=hfscale.ParallelConfig(...)",
    )
    _says(ConfigError, lambda: hfscale.from_pretrained(saved, **{name: value}), *words)
    _says(ConfigError, lambda: hfscale.from_config(tiny("llama"), **{name: value}), *words)


def test_a_report_beside_the_model(saved: str) -> None:
    words = (
        "output_loading_info=True would return a pair",
        "leave output_loading_info out",
        "are printed",
    )
    _says(ConfigError, lambda: hfscale.from_pretrained(saved, output_loading_info=True), *words)


def test_distributed_by_the_host_before(model: Any) -> None:
    words = ("LlamaForCausalLM", "device_map", "hfscale.from_pretrained")
    model.hf_device_map = {"model": 0, "lm_head": 1}
    _says(ConfigError, lambda: hfscale.parallelize(model), *words)
    model.hf_device_map = {"": "cpu"}
    tp2 = hfscale.ParallelConfig(tp_size=2)
    _says(ConfigError, lambda: hfscale.parallelize(model, tp2), *words)


def test_adapters_of_pefts_own(model: Any) -> None:
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    for given in (wrapped, wrapped.get_base_model()):
        words = ("already has PEFT adapters", "hfscale.get_peft_model(model, peft_config)")
        _says(
            ConfigError,
            lambda given=given: hfscale.parallelize(given, hfscale.ParallelConfig(tp_size=2)),
            *words,
        )
    assert {
        name: p
        for name, p in wrapped.unload().named_parameters()
        if not torch.equal(p, before[name])
    } == {}


def test_parallelized_twice(model: Any) -> None:
    parallelized = hfscale.parallelize(model)
    words = ("LlamaForCausalLM cannot be parallelized", "hfscale already parallelized it")
    _says(ConfigError, lambda: hfscale.parallelize(parallelized), *words)


# Arguments


def test_an_unknown_precision(saved: str, model: Any) -> None:
    words = ("mixed_precision='fp4' is unknown", "use one of no, bf16")
    _says(ConfigError, lambda: hfscale.from_pretrained(saved, mixed_precision="fp4"), *words)
    _says(ConfigError, lambda: hfscale.parallelize(model, mixed_precision="fp4"), *words)


def test_quantization(saved: str) -> None:
    call = lambda: hfscale.from_pretrained(saved, quantization_config={"load_in_4bit": True})  # noqa: E731
    _says(ConfigError, call, "quantization_config", "16 or 32 bits")


# Steps


@pytest.mark.parametrize(
    "call",
    [
        lambda model: hfscale.train_step(model, _batch()),
        lambda model: hfscale.eval_step(model, _batch()),
        lambda model: hfscale.clip_grad_norm_(model, 1.0),
        lambda model: hfscale.save_pretrained(model, "nowhere"),
        hfscale.batch_rank,
        hfscale.batch_world,
    ],
)
def test_a_model_hfscale_does_not_know(call: Callable[[Any], Any], model: Any) -> None:
    words = (
        "LlamaForCausalLM was not parallelized by hfscale",
        "hfscale.from_pretrained",
        "hfscale.parallelize",
    )
    _says(ConfigError, lambda: call(model), *words)


def test_batches_that_cannot_be_trained_on(model: Any) -> None:
    hfscale.parallelize(model)
    no_labels = {"input_ids": torch.ones(1, 4, dtype=torch.long)}
    words = ("needs 'labels'", "found only input_ids")
    _says(ConfigError, lambda: hfscale.train_step(model, no_labels), *words)
    _says(ConfigError, lambda: hfscale.train_step(model, _batch(labels=None)), "needs 'labels'")
    _says(ConfigError, lambda: hfscale.train_step(model, [_batch(), no_labels]), *words)
    _says(
        ConfigError,
        lambda: hfscale.train_step(model, []),
        "empty list of microbatches",
        "pass at least one",
    )
    _says(
        ConfigError,
        lambda: hfscale.train_step(model, "text"),
        "found a str",
        "a mapping of tensors",
    )
    for given, words in (
        ({0: no_labels["input_ids"]}, ("names of the model's arguments, got 0", "a collator")),
        ({"attention_masks": no_labels["input_ids"]}, ("did you mean 'attention_mask'",)),
    ):
        _says(
            ConfigError,
            lambda given=given: hfscale.train_step(model, given),  # type: ignore[misc]
            *words,
        )
    ids = torch.ones(2, 4, dtype=torch.long)
    for labels, words in (
        (
            ids[:, :3],
            (
                "labels must have the shape [rows, tokens], got [2, 3] for 2 rows of 4 tokens",
                "-100 where",
            ),
        ),
        (ids.numpy(), ("labels is a ndarray: give tensors, [rows, tokens]",)),
    ):
        _says(
            ConfigError,
            lambda labels=labels: hfscale.train_step(model, _batch(input_ids=ids, labels=labels)),
            *words,
        )
    row = {"input_ids": ids[0], "labels": ids[0]}
    _says(
        ConfigError,
        lambda: hfscale.train_step(model, row),
        "input_ids must have the shape [rows, tokens], got [4]",
        "unsqueeze(0)",
    )
    with torch.no_grad():
        _says(
            ConfigError,
            lambda: hfscale.train_step(model, _batch()),
            "within torch.no_grad()",
            "hfscale.eval_step",
        )


def test_a_loss_that_is_not_over_next_tokens() -> None:
    config = BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    model = hfscale.parallelize(BertForPreTraining(config))  # of labels alone it makes no loss
    words = (
        "causal language model's loss",
        "BertForPreTraining",
        "loss_type",
        "loss = model(**batch).loss",
    )
    _says(ConfigError, lambda: hfscale.train_step(model, _batch()), *words)


# Checkpoints


def test_a_bin_checkpoint_of_another_format(model: Any, tmp_path: Path) -> None:
    model.config.save_pretrained(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=False)
    words = (str(path), "since 1.6", "convert it once", "save_pretrained")
    _says(CheckpointError, lambda: hfscale.from_pretrained(str(tmp_path)), *words)


@pytest.mark.parametrize("kept", [4, 100, -3])
def test_a_truncated_checkpoint(kept: int, saved: str) -> None:
    path = Path(saved) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    words = (str(path), "is truncated or not a safetensors file", "download or save it again")
    _says(CheckpointError, lambda: hfscale.from_pretrained(saved), *words)


def test_a_config_of_another_shape(saved: str) -> None:
    path = Path(saved) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 48}))
    _says(
        CheckpointError,
        lambda: hfscale.from_pretrained(saved),
        "model.layers.0.mlp.down_proj.weight",
        "(32, 50)",
        "(32, 48)",
        "the config it was saved with",
    )


def test_a_tied_tensor_of_two_values(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(tiny("llama", tie_word_embeddings=True)).save_pretrained(
        tmp_path
    )
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    words = (
        "model.embed_tokens.weight",
        "lm_head.weight",
        "differ in the checkpoint",
        "tie_word_embeddings=false",
    )
    _says(CheckpointError, lambda: hfscale.from_pretrained(str(tmp_path)), *words)


def test_a_missing_directory(tmp_path: Path) -> None:
    missing = str(tmp_path / "absent")
    _says(CheckpointError, lambda: hfscale.from_pretrained(missing), missing, "does not exist")


def test_a_file_where_a_directory_should_be_written(model: Any, tmp_path: Path) -> None:
    hfscale.parallelize(model)
    (tmp_path / "taken").write_text("a file")
    words = (str(tmp_path / "taken"), "is a file, and a directory is to be written to this path")
    _says(CheckpointError, lambda: hfscale.save_pretrained(model, tmp_path / "taken"), *words)
    _says(
        CheckpointError,
        lambda: hfscale.save_pretrained(model, tmp_path, max_shard_size="big"),
        "max_shard_size='big'",
    )


# Families


def test_a_layout_that_does_not_fit_is_refused_before_processes_are_counted(saved: str) -> None:
    words = (
        "tp_size=3 does not divide the 4 attention heads and 2 key/value heads",
        "use tp_size 1, 2",
    )
    _says(
        PlanError,
        lambda: hfscale.from_pretrained(saved, parallel=ParallelConfig(tp_size=3)),
        *words,
    )


def test_tensor_parallel_without_a_blueprint() -> None:
    model = AutoModelForCausalLM.from_config(
        MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=32)
    )
    words = ("blueprint of 'mamba'", "use tp_size=1", "hfscale.models.FAMILIES")
    _says(PlanError, lambda: hfscale.parallelize(model, ParallelConfig(tp_size=2)), *words)
