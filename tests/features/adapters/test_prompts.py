"""Prompts and prefixes over ranks equal stock PEFT in one process, are saved in its format, and read in any layout."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
import trl
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import hfscale
import hfscale.trl
from hfscale import CheckpointError, MemoryConfig, ParallelConfig
from hfscale.cli import main
from hfscale.models.precision import keep_float64
from hfscale.testing import RankPool
from hfscale.train.runtime import local_tensor, runtime_of

from ...integrations.trl.script import tokenizer
from ...layouts import OF_ADAPTERS
from ...refusals import refusal_of
from ...sweeps import cases
from ...tiny_models import tiny

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),
    # PEFT 0.21 knows the cache by its name before transformers 5.24 alone.
    pytest.mark.filterwarnings("ignore:.*`past_key_values`:FutureWarning"),
]
Pools = Callable[[int], RankPool]
Batch = dict[str, Tensor]
_TOKENS: dict[str, Any] = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
KINDS = {
    "prompt": peft.PromptTuningConfig(**_TOKENS),
    "rows": peft.PromptTuningConfig(prompt_tuning_init="SAMPLE_VOCAB", **_TOKENS),
    "encoder": peft.PromptEncoderConfig(encoder_hidden_size=16, **_TOKENS),
    "prefix": peft.PrefixTuningConfig(**_TOKENS),
    "projected": peft.PrefixTuningConfig(prefix_projection=True, encoder_hidden_size=16, **_TOKENS),
}
PREFIXES = ("prefix", "projected")


def _gemma() -> Any:
    small = tiny("qwen3")
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names = (*names, "num_key_value_heads", "vocab_size", "head_dim", "max_position_embeddings")
    own = {name: getattr(small, name) for name in names}
    return transformers.Gemma2Config(**own, sliding_window=8, attn_implementation="eager")


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: tiny("llama"),
    "deep": lambda: tiny("llama", num_hidden_layers=4),
    "gpt2": lambda: tiny("gpt2"),
    "qwen3": lambda: tiny("qwen3"),
    "gemma2": _gemma,  # PEFT compares its prefix with the heads of the config
    "one key head": lambda: tiny("qwen3", num_key_value_heads=1, tie_word_embeddings=True),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    **OF_ADAPTERS,
    "cp2": {"cp_size": 2},
    "cp2-sp2": {"cp_size": 2, "tp_size": 2, "sequence_parallel": True},
    "pp2-shard2": {"pp_size": 2, "dp_shard_size": 2},
    "zbv": {"pp_size": 2, "pipeline_schedule": "zbv"},
}


@contextmanager
def in_float64() -> Iterator[None]:
    """PEFT's encoders are of torch's default type, beside weights of any."""
    torch.set_default_dtype(torch.float64)
    try:
        with keep_float64():  # stock rotary embeddings are in 32 bits
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def batches(world: int) -> list[list[Batch]]:
    """Three steps of two microbatches for each distinct batch: of several lengths, padded, some labels left out."""
    generator = torch.Generator().manual_seed(3)

    def batch(length: int) -> Batch:
        ids = torch.randint(3, 60, (2, length), generator=generator)
        labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
        mask = torch.ones_like(ids)
        mask[1, -2:] = 0
        labels[1, -2:] = -100
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    lengths = (9, 12, 7, 11)
    return [[batch(lengths[place % 4]) for place in range(2 * world)] for _ in range(3)]


def _stock(directory: Path, family: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float64)
    model.save_pretrained(directory / "start")
    return model


def reference(directory: Path, family: str, kind: str, world: int) -> list[dict[str, Any]]:
    """Train by stock PEFT, and save its prompt; return loss, gradients, norm and weights of each step."""
    told = []
    with in_float64():
        model = _stock(directory, family)
        torch.manual_seed(5)
        model = peft.get_peft_model(model, copy.deepcopy(KINDS[kind])).train()
        model.save_pretrained(directory / "first")
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer = torch.optim.SGD(trained.values(), lr=0.5)
        for step in batches(world):
            # Behind tokens of a prompt each row's first label is predicted, too.
            counts = [int((each["labels"][:, kind in PREFIXES :] != -100).sum()) for each in step]
            total = 0.0
            for batch, count in zip(step, counts, strict=True):
                loss = model(**batch).loss * count / sum(counts)
                loss.backward()
                total += float(loss.detach())
            gradients = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
            norm = float(torch.nn.utils.clip_grad_norm_(trained.values(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
            weights = {name: p.detach().clone() for name, p in trained.items()}
            told.append({"loss": total, "norm": norm, "grad": gradients, "weights": weights})
        model.save_pretrained(directory / "stock")
    return told


def _shards(model: Any, gradients: bool) -> dict[str, Tensor]:
    held = {planned.name: parameter for planned, parameter in runtime_of(model).parameters()}
    return {
        name: local_tensor(p.grad if gradients else p.detach()).clone()
        for name, p in held.items()
        if p.requires_grad and (not gradients or p.grad is not None)
    }


def _taken(model: Any, whole: dict[str, Tensor], held: dict[str, Tensor]) -> dict[str, Tensor]:
    runtime = runtime_of(model)
    by_name = runtime.plan.by_name
    return {name: by_name[name].take(whole[name], runtime.mesh.ranks) for name in held}


def _trained(
    directory: Path, kind: str, layout: dict[str, Any], expected: list[dict[str, Any]]
) -> int:
    """Train in a layout, compare each step, save prompt and state; return how many parameters this rank has."""
    with in_float64():
        parallel = ParallelConfig(**layout)
        config = copy.deepcopy(KINDS[kind])
        model = hfscale.from_pretrained(directory / "start", parallel=parallel)
        torch.manual_seed(5)
        adapted = hfscale.get_peft_model(model, config).train()
        optimizer = hfscale.create_optimizer(adapted, "sgd", lr=0.5)
        rank, world = hfscale.batch_rank(model), hfscale.batch_world(model)
        for told, step in zip(expected, batches(world), strict=True):
            loss = float(hfscale.train_step(adapted, step[2 * rank : 2 * rank + 2]))
            assert loss == pytest.approx(told["loss"], rel=1e-10)
            found = _shards(model, gradients=True)
            torch.testing.assert_close(
                found, _taken(model, told["grad"], found), rtol=1e-10, atol=1e-12
            )
            norm = float(hfscale.clip_grad_norm_(adapted, 0.5))
            assert norm == pytest.approx(told["norm"], rel=1e-10)
            optimizer.step()
            optimizer.zero_grad()
            held = _shards(model, gradients=False)
            torch.testing.assert_close(
                held, _taken(model, told["weights"], held), rtol=1e-10, atol=1e-12
            )
        hfscale.save_pretrained(adapted, directory / "saved")
        hfscale.save_state(model, directory / "state", optimizer=optimizer)
    return len(held)


EVERY = [(family, kind, layout) for family in FAMILIES for kind in KINDS for layout in LAYOUTS]
DAILY = [
    ("llama", "rows", "tp2-pp2"),
    ("llama", "encoder", "cp2-sp2"),
    ("llama", "projected", "tp2-shard2"),
    ("deep", "prefix", "zbv"),
    ("deep", "prompt", "zbv"),
    ("gpt2", "prompt", "sp2"),
    ("gpt2", "prefix", "tp2-pp2"),
    ("qwen3", "encoder", "pp2-shard2"),
    ("qwen3", "prefix", "tp4"),
    ("gemma2", "prefix", "tp2"),
    ("gemma2", "rows", "tp2-pp2"),  # scales the rows of its embedding
    ("one key head", "prompt", "tp2-pp2"),
    ("one key head", "projected", "tp2-pp2"),
    ("one key head", "rows", "replicate2"),
]


@pytest.mark.parametrize(
    ("family", "kind", "layout"),
    cases(
        [
            (family, kind, layout)
            for family, kind, layout in EVERY
            if not (kind in PREFIXES and layout.startswith("cp2"))
            and (family == "deep") == (layout == "zbv")
        ],
        daily=DAILY,
    ),
)
def test_layouts(pools: Pools, tmp_path: Path, family: str, kind: str, layout: str) -> None:
    parallel = ParallelConfig(**LAYOUTS[layout])
    expected = reference(tmp_path, family, kind, parallel.batch_world)
    counts = pools(parallel.total_size).run(_trained, tmp_path, kind, LAYOUTS[layout], expected)
    assert any(counts)
    first, found, stock = (
        load_file(tmp_path / name / "adapter_model.safetensors")
        for name in ("first", "saved", "stock")
    )
    torch.testing.assert_close(found, stock, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(first["prompt_embeddings"], stock["prompt_embeddings"])
    ids = batches(1)[0][0]["input_ids"]
    with in_float64(), torch.no_grad():
        logits = [
            peft.PeftModel.from_pretrained(_stock(tmp_path, family), tmp_path / name)
            .eval()(input_ids=ids)
            .logits
            for name in ("saved", "stock")
        ]
    torch.testing.assert_close(*logits, rtol=1e-10, atol=1e-12)


def _outputs(model: Any, way: str) -> list[Tensor]:
    """What a model with a prompt computes by each of the calls."""
    batch = batches(1)[0][0]
    values = [hfscale.eval_step(model, batch)]
    loss, outputs = hfscale.eval_step(model, batch, return_outputs=True)
    values += [loss, outputs.logits]
    values.append(hfscale.token_scores(model, batch).log_probs)
    if way != "stages":
        with torch.no_grad():
            values += [model(**batch).loss, model.eval()(input_ids=batch["input_ids"]).logits]
    return [value.detach().cpu() for value in values]


def _read(directory: Path, kind: str, layout: dict[str, Any]) -> list[Tensor]:
    """Load the saved prompt, and the state of a layout, into others; compare what both compute."""
    with in_float64():
        parallel = ParallelConfig(**layout)
        way = "stages" if parallel.pp_size > 1 else "plain"
        found: list[Tensor] = []
        if kind in ("prompt", "prefix"):
            saved = str(directory / "saved")
            model = hfscale.from_pretrained(
                directory / "start", parallel=parallel, peft_config=saved
            )
            found = _outputs(model.eval(), way)
        config = copy.deepcopy(KINDS[kind])
        model = hfscale.from_pretrained(
            directory / "start", parallel=parallel, peft_config=config, seed=9
        )
        hfscale.load_state(model, directory / "state")
        again = _outputs(model.eval(), way)
        for one, other in zip(found, again, strict=bool(found)):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
        return again


@pytest.mark.parametrize("kind", ["prompt", "encoder", "prefix", "projected"])
def test_prompts_and_states_are_read_in_any_layout(pools: Pools, tmp_path: Path, kind: str) -> None:
    expected = reference(tmp_path, "llama", kind, 1)
    pools(2).run(_trained, tmp_path, kind, {"tp_size": 2}, expected)
    assert main(["convert", str(tmp_path / "state"), str(tmp_path / "converted")]) == 0
    converted, saved = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("converted", "saved")
    )
    torch.testing.assert_close(converted, saved, rtol=0, atol=0)
    alone = pools(2).alone(_read, tmp_path, kind, {})
    for layout in ({"tp_size": 2}, {"pp_size": 2}, {"dp_shard_size": 2}):
        for found in pools(2).run(_read, tmp_path, kind, layout):
            for one, other in zip(found, alone, strict=False):
                assert one.shape == other.shape
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def _plain_steps(directory: Path, kind: str, layout: dict[str, Any] | None) -> list[list[float]]:
    """Losses and norms of a loop of one's own, of a loss function of one's own, and with recomputed layers."""
    told: list[list[float]] = []
    with in_float64():
        for way in ("loop", "wrapper", "function", *(["recomputed"] if kind == "prompt" else [])):
            memory = MemoryConfig(recompute="full") if way == "recomputed" else None
            parallel = ParallelConfig(**(layout or {}))
            start = directory / "start"
            model = hfscale.from_pretrained(start, parallel=parallel, memory=memory).train()
            torch.manual_seed(5)
            adapted = hfscale.get_peft_model(model, copy.deepcopy(KINDS[kind]))
            called = adapted if way == "wrapper" or layout is None else model
            optimizer = hfscale.create_optimizer(adapted, "sgd", lr=0.5)
            for batch, _ in batches(1):
                if way == "function":
                    loss = hfscale.train_step(adapted, batch, loss_fn=_sum_of_logits)
                elif way == "recomputed":
                    loss = hfscale.train_step(adapted, batch)
                else:
                    loss = called(**batch).loss
                    loss.backward()
                norm = hfscale.clip_grad_norm_(adapted, 0.5)
                told.append([float(loss.detach()), float(norm)])
                optimizer.step()
                optimizer.zero_grad()
    return told


def _sum_of_logits(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    """A loss that reads the batch as its loader made it, behind the rows of a prompt."""
    ids = batch["input_ids"]
    own = outputs.logits[:, outputs.logits.shape[1] - ids.shape[1] :]
    of_tokens = own.gather(-1, ids[..., None])[..., 0] * batch["attention_mask"]
    return of_tokens.square().sum(), int((batch["labels"] != -100).sum())


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"tp_size": 2, "sequence_parallel": True}])
def test_loops_and_losses_of_ones_own(
    pools: Pools, tmp_path: Path, kind: str, layout: dict[str, Any]
) -> None:
    _stock(tmp_path, "llama")
    expected = pools(2).alone(_plain_steps, tmp_path, kind, None)
    for found in pools(2).run(_plain_steps, tmp_path, kind, layout):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def _refusals(start: str) -> dict[str, str]:
    told: dict[str, str] = {}
    parallel = ParallelConfig(tp_size=2)
    model = hfscale.from_pretrained(start, parallel=parallel)
    ids = torch.arange(12).view(2, 6)
    batch = {"input_ids": ids, "labels": ids}
    plain = float(hfscale.eval_step(model, batch))

    def adapt(config: Any, other: Any = model) -> str:
        return refusal_of(lambda: hfscale.get_peft_model(other, config))

    lstm = peft.PromptEncoderConfig(encoder_reparameterization_type="LSTM", **_TOKENS)
    told["LSTM"] = adapt(lstm)
    told["task"] = adapt(peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2))
    told["tasks"] = adapt(peft.MultitaskPromptTuningConfig(num_tasks=2, **_TOKENS))
    kinds = [1, 2, 3, 4]
    told["CPT"] = adapt(
        peft.CPTConfig(
            cpt_token_ids=kinds,
            cpt_mask=[1] * 4,
            cpt_tokens_type_mask=kinds,
            task_type="CAUSAL_LM",
        )
    )
    recomputes = hfscale.from_pretrained(
        start, parallel=parallel, memory=MemoryConfig(recompute="full")
    )
    told["recompute"] = adapt(copy.deepcopy(KINDS["prefix"]), recomputes)
    across = hfscale.from_pretrained(start, parallel=ParallelConfig(cp_size=2))
    told["context"] = adapt(copy.deepcopy(KINDS["prefix"]), across)
    adapted = hfscale.get_peft_model(model, copy.deepcopy(KINDS["encoder"]))
    calls: dict[str, Callable[[], Any]] = {
        "second": lambda: adapted.add_adapter("b", copy.deepcopy(KINDS["encoder"])),
        "merge": lambda: hfscale.merge_and_unload(adapted),
        "generate": lambda: adapted.generate(input_ids=ids),
        "teacher": lambda: hfscale.Teacher(across, adapted),
        "positions": lambda: hfscale.train_step(model, {**batch, "position_ids": ids}),
        "vectors": lambda: hfscale.train_step(
            model, {"inputs_embeds": torch.zeros(2, 6, 32), "labels": ids}
        ),
        "outside": lambda: hfscale.train_step(model, {**batch, "input_ids": ids + 60}),
    }
    for name, call in calls.items():
        told[name] = refusal_of(call)
    with adapted.disable_adapter(), torch.no_grad():
        off = [float(hfscale.eval_step(adapted, batch)), float(adapted(**batch).loss)]
    on = float(hfscale.eval_step(adapted, batch))
    told["off"] = str([each == pytest.approx(plain, rel=1e-6) for each in (*off, on)])
    hfscale.save_pretrained(adapted, f"{start}/prompt")
    with pytest.raises(CheckpointError) as error:
        hfscale.from_pretrained(start, parallel=parallel, peft_config=f"{start}/prompt")
    told["saved"] = str(error.value)
    bare = adapted.unload()
    told["unloaded"] = str(float(hfscale.eval_step(bare, batch)) == plain)
    return told


WORDS = {
    "LSTM": "draws its own dropout: use 'MLP'",
    "task": "must be 'CAUSAL_LM' over ranks",
    "tasks": "prompts are those of the tasks of a batch's rows",
    "CPT": "its loss needs the full logits",
    "recompute": "must be read once in each pass",
    "context": "keys by their positions",
    "second": "must have no other adapters, got 2",
    "merge": "got a prompt, whose virtual tokens precede the text",
    "generate": "generate with a prompt must run in one process",
    "positions": "got position_ids",
    "vectors": "got inputs_embeds, labels",
    "outside": "outside of the vocabulary of 67",
    "saved": "holds the prompt alone, which is all that PEFT writes",
    "unloaded": "True",
    "off": "[True, True, False]",
    "teacher": "adds a prompt (virtual tokens) before the text",
}


def test_what_cannot_be_right_is_refused(pools: Pools, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(tmp_path)
    for found in pools(2).run(_refusals, str(tmp_path)):
        assert {name: words for name, words in found.items() if WORDS[name] not in words} == {}


def _without_a_mask(start: str) -> float:
    model = hfscale.from_pretrained(start, parallel=ParallelConfig(tp_size=2))
    hfscale.get_peft_model(model, copy.deepcopy(KINDS["prompt"]))
    ids = torch.arange(12).view(2, 6)
    batch = {"input_ids": ids, "attention_mask": None, "labels": ids}
    return float(hfscale.train_step(model, batch, loss_fn=lambda out, given: (out.logits.sum(), 1)))


def test_a_loss_behind_a_prompt_takes_fields_that_are_none(pools: Pools, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(tmp_path)
    first, second = pools(2).run(_without_a_mask, str(tmp_path))
    assert first == second


def test_a_prefix_in_one_process_that_recomputes_is_refused() -> None:
    model = hfscale.from_config(tiny("llama"), memory=MemoryConfig(recompute="full"))
    assert WORDS["recompute"] in refusal_of(
        lambda: hfscale.get_peft_model(model, copy.deepcopy(KINDS["prefix"]))
    )


def _by_trainer(directory: Path, kind: str, layout: dict[str, Any] | None, sft: bool) -> Any:
    """Losses and norms of three steps of a stock trainer, or of hfscale's."""
    rows = torch.randint(3, 60, (24, 9), generator=torch.Generator().manual_seed(0)).tolist()
    model = AutoModelForCausalLM.from_pretrained(directory / "start", dtype=torch.float32)
    parallel = ParallelConfig(**(layout or {}))
    arguments: dict[str, Any] = {
        "max_steps": 3,
        "per_device_train_batch_size": 4 // parallel.batch_world,
        "logging_steps": 1,
        "learning_rate": 0.05,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "seed": 5,
    }
    config = copy.deepcopy(KINDS[kind])
    trainer: Any
    if sft:
        stock_kind: Any = trl.SFTTrainer if layout is None else hfscale.trl.SFTTrainer
        given = model if layout is None else hfscale.parallelize(model, parallel)
        trainer = stock_kind(
            given,
            args=trl.SFTConfig(
                str(directory), gradient_checkpointing=False, bf16=False, **arguments
            ),
            train_dataset=Dataset.from_dict({"input_ids": rows}),
            processing_class=tokenizer(directory),
            peft_config=config,
        )
    else:
        kinds: Any = transformers.Trainer if layout is None else hfscale.Trainer
        torch.manual_seed(5)
        adapted = (
            peft.get_peft_model(model, config)
            if layout is None
            else hfscale.get_peft_model(hfscale.parallelize(model, parallel), config)
        )
        trainer = kinds(
            model=adapted,
            args=transformers.TrainingArguments(str(directory), **arguments),
            train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
        )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return [(log["loss"], float(log["grad_norm"])) for log in logs]


@pytest.mark.parametrize("kind", ["rows", "encoder", "prefix"])
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated")
@pytest.mark.parametrize("sft", [False, True], ids=["Trainer", "SFTTrainer"])
def test_trainers(pools: Pools, tmp_path: Path, kind: str, sft: bool) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(tmp_path / "start")
    expected = pools(2).alone(_by_trainer, tmp_path, kind, None, sft)
    assert expected[0] != expected[2]
    for layout in ({"tp_size": 2}, {"dp_shard_size": 2}):
        for found in pools(2).run(_by_trainer, tmp_path, kind, layout, sft):
            torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
