"""In one process whatever PEFT's own functions do to a model trains, is counted, saved and read as in stock code."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale.models.precision import keep_float64

from ...tiny_models import tiny

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    # PEFT 0.21 knows the cache by its name before transformers 5.24 alone.
    pytest.mark.filterwarnings("ignore:.*`past_key_values`:FutureWarning"),
]
IDS = torch.randint(3, 60, (4, 9), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}
TARGETS: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
CONFIGS = {
    "prompt": peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "prefix": peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "encoder": peft.PromptEncoderConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "adaption": peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM"),
    "vera": peft.VeraConfig(r=4, **TARGETS),
    "adalora": peft.AdaLoraConfig(init_r=6, target_r=4, total_step=10, **TARGETS),
    "bank": peft.VBLoRAConfig(r=2, num_vectors=8, vector_length=8, **TARGETS),
    "tokens": peft.LoraConfig(r=4, trainable_token_indices=[int(IDS[0, 1])], **TARGETS),
    "invoked": peft.LoraConfig(r=4, alora_invocation_tokens=[int(IDS[0, 3])], **TARGETS),
    "replicated": peft.LoraConfig(r=4, layer_replication=[(0, 2), (1, 2)], **TARGETS),
    "copied": peft.LoraConfig(r=4, modules_to_save=["mlp"], **TARGETS),
    "lora": peft.LoraConfig(r=4, **TARGETS),
}


def stock() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float64)


def by_stock(model: Any, kind: str, adapt: Callable[..., Any] = peft.get_peft_model) -> Any:
    torch.manual_seed(1)
    return adapt(model, copy.deepcopy(CONFIGS[kind])).train()


def built(kind: str, way: str) -> Any:
    """A model of hfscale's with adapters, which have the values of :func:`by_stock`."""
    if way == "get_peft_model":
        return by_stock(hfscale.parallelize(stock()), kind, hfscale.get_peft_model)
    if way == "around ours":
        return by_stock(hfscale.parallelize(stock()), kind)
    return hfscale.parallelize(by_stock(stock(), kind))


def trained(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.daily(
    "prompt-get_peft_model", "adaption-parallelize", "tokens-get_peft_model", "bank-around ours"
)
@pytest.mark.parametrize("way", ["get_peft_model", "around ours", "parallelize"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_it_trains_as_in_stock_code(tmp_path: Path, kind: str, way: str) -> None:
    with keep_float64():  # stock rotary embeddings are in 32 bits
        reference = by_stock(stock(), kind)
        model = built(kind, way)
        expected = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=1.0)
        optimizer = hfscale.create_optimizer(model, "sgd", lr=1.0)
        for _ in range(3):
            loss = reference(**BATCH).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            assert float(hfscale.train_step(model, BATCH)) == pytest.approx(
                float(loss.detach()), rel=1e-9
            )
            assert float(hfscale.clip_grad_norm_(model, 0.1)) == pytest.approx(
                float(norm), rel=1e-8
            )
            for each in (expected, optimizer):
                each.step()
                each.zero_grad()
        found = trained(model)
        for name, value in trained(reference).items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)
    hfscale.save_state(model, tmp_path / "state", optimizer=optimizer)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.zero_()
    hfscale.load_state(model, tmp_path / "state", optimizer=optimizer)
    for name, value in trained(model).items():
        assert torch.equal(value, found[name]), name
    hfscale.save_pretrained(model, tmp_path / "adapter")
    model = stock().eval()
    again = peft.PeftModel.from_pretrained(model, str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(
        again(input_ids=IDS).logits, reference.eval()(input_ids=IDS).logits, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("kind", ["lora", "vera"])
def test_a_config_says_afterwards_which_modules_it_stood_for(kind: str) -> None:
    """As PEFT's own function leaves it: scripts read it, and a second adapter is compared with it."""
    made = {"lora": peft.LoraConfig, "vera": peft.VeraConfig}[kind]
    expected = made(target_modules="all-linear")
    config = made(target_modules="all-linear")
    peft.get_peft_model(stock(), expected)
    model = hfscale.get_peft_model(hfscale.parallelize(stock()), config)
    assert config == expected == model.peft_config["default"]
    assert "model.layers.0.self_attn.q_proj" in config.target_modules


def test_a_second_adapter_and_all_that_pefts_model_does(tmp_path: Path) -> None:
    reference = by_stock(stock(), "lora")
    model = built("lora", "get_peft_model")
    reference.save_pretrained(tmp_path / "third")
    for each in (reference, model):
        torch.manual_seed(2)
        each.add_adapter("two", peft.LoraConfig(r=3, **TARGETS))
        each.set_adapter("two")
        each.load_adapter(str(tmp_path / "third"), "three")
        each.delete_adapter("three")
    optimizers = [
        torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=1.0)
        for each in (reference, model)
    ]
    for _ in range(2):
        loss = reference(**BATCH).loss
        loss.backward()
        assert float(hfscale.train_step(model, BATCH)) == pytest.approx(
            float(loss.detach()), rel=1e-6
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    hfscale.save_pretrained(model, tmp_path / "both")
    assert (tmp_path / "both" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "both" / "two" / "adapter_model.safetensors").is_file()
    adapted = model.eval()(input_ids=IDS).logits
    model.merge_adapter()
    model.unmerge_adapter()
    with model.disable_adapter():
        plain = model(input_ids=IDS).logits
    merged = hfscale.merge_and_unload(model)
    torch.testing.assert_close(merged(input_ids=IDS).logits, adapted, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(plain, adapted)


def test_replicas_of_layers_are_not_merged_into_the_weights_they_share() -> None:
    """PEFT merges the adapter of each replica into the shared weights, which changes what the model computes."""
    model = built("replicated", "get_peft_model")
    with pytest.raises(ConfigError, match="got replicas of layers"):
        hfscale.merge_and_unload(model)
    once = peft.LoraConfig(r=4, layer_replication=[(0, 1), (1, 2)], **TARGETS)
    model = hfscale.get_peft_model(hfscale.parallelize(stock()), once).eval()
    adapted = model(input_ids=IDS).logits
    merged = hfscale.merge_and_unload(model)
    torch.testing.assert_close(merged(input_ids=IDS).logits, adapted, rtol=1e-5, atol=1e-6)


class OwnFactors(torch.nn.Linear):
    """A layer of a model's own, with a factor named like PEFT's."""

    def __init__(self) -> None:
        super().__init__(64, 64)
        self.lora_A = torch.nn.Linear(64, 2)


def test_modules_of_the_models_own_may_be_named_like_pefts_factors() -> None:
    model = hfscale.parallelize(stock())
    model.own = OwnFactors()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    merged = hfscale.merge_and_unload(adapted)
    assert isinstance(merged.own, OwnFactors)


@pytest.mark.parametrize("end", ["unload", "merge_and_unload"])
def test_the_model_without_its_adapters_is_whole_again(tmp_path: Path, end: str) -> None:
    model = built("lora", "get_peft_model")
    bare = getattr(model, end)()
    for parameter in bare.parameters():
        parameter.requires_grad_(True)
    hfscale.train_step(bare, BATCH)
    norm = torch.nn.utils.clip_grad_norm_(bare.parameters(), 1e9)
    assert float(hfscale.clip_grad_norm_(bare, 1e9)) == pytest.approx(float(norm), rel=1e-6)
    hfscale.save_pretrained(bare, tmp_path / "bare")
    assert (tmp_path / "bare" / "model.safetensors").is_file()


def test_injected_adapters_train_and_are_not_left_out_of_a_save(tmp_path: Path) -> None:
    model = hfscale.parallelize(stock())
    peft.inject_adapter_in_model(copy.deepcopy(CONFIGS["lora"]), model)
    hfscale.train_step(model.train(), BATCH)
    assert float(hfscale.clip_grad_norm_(model, 1.0)) > 0
    with pytest.raises(ConfigError, match="would omit trainable parameters"):
        hfscale.save_pretrained(model, tmp_path / "out")


@pytest.mark.parametrize("kind", ["prompt", "vera"])
def test_a_checkpoint_gets_them_and_goes_on(tmp_path: Path, kind: str) -> None:
    stock().float().save_pretrained(tmp_path / "base")
    given: dict[str, Any] = {"peft_config": copy.deepcopy(CONFIGS[kind]), "seed": 3}
    model = hfscale.from_pretrained(tmp_path / "base", **given)
    hfscale.save_pretrained(model, tmp_path / "adapter")
    again = hfscale.from_pretrained(tmp_path / "base", peft_config=str(tmp_path / "adapter"))
    assert trained(again).keys() == trained(model).keys()
    assert torch.equal(again.eval()(input_ids=IDS).logits, model.eval()(input_ids=IDS).logits)


@pytest.mark.parametrize("kind", ["prefix", "adaption"])
def test_a_trainer_trains_them_as_stock_trainer_does(tmp_path: Path, kind: str) -> None:
    rows = Dataset.from_dict(
        {"input_ids": IDS.repeat(4, 1).tolist(), "labels": IDS.repeat(4, 1).tolist()}
    )
    logs = []
    for trainer, folder in (
        (transformers.Trainer, tmp_path / "stock"),
        (hfscale.Trainer, tmp_path / "ours"),
    ):
        arguments = transformers.TrainingArguments(
            str(folder),
            max_steps=3,
            save_steps=2,
            per_device_train_batch_size=2,
            logging_steps=1,
            learning_rate=1e-2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        made = trainer(model=by_stock(stock().float(), kind), args=arguments, train_dataset=rows)
        made.train()
        made = trainer(model=by_stock(stock().float(), kind), args=arguments, train_dataset=rows)
        made.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        found = [
            (log["loss"], float(log["grad_norm"]))
            for log in made.state.log_history
            if "loss" in log
        ]
        logs.append([number for pair in found for number in pair])
    assert len(logs[0]) == 6
    assert logs[1] == pytest.approx(logs[0], rel=1e-4)


def test_it_generates_behind_a_prefix() -> None:
    found = []
    for model in (
        by_stock(stock().float(), "prefix"),
        by_stock(hfscale.parallelize(stock().float()), "prefix"),
    ):
        given = {
            "input_ids": IDS,
            "attention_mask": torch.ones_like(IDS),
            "max_new_tokens": 3,
            "do_sample": False,
        }
        found.append(model.eval().generate(**given))
    assert torch.equal(*found)


def test_a_plan_of_one_process_takes_what_peft_applies() -> None:
    config = tiny("llama")
    planned = hfscale.plan(config, peft_config=copy.deepcopy(CONFIGS["bank"]))
    assert planned.by_name.keys() == hfscale.plan(config).by_name.keys()
    with pytest.raises(ConfigError, match="VBLORA is not supported"):
        hfscale.plan(config, ParallelConfig(tp_size=2), peft_config=copy.deepcopy(CONFIGS["bank"]))


def _by_cpt(model: Any, adapt: Callable[..., Any]) -> Any:
    kinds = [1, 2, 3, 4]  # of its tokens; 4 is a label
    config = peft.CPTConfig(
        cpt_token_ids=kinds, cpt_mask=[1] * 4, cpt_tokens_type_mask=kinds, task_type="CAUSAL_LM"
    )
    torch.manual_seed(1)
    return adapt(model, config).train()


@pytest.mark.parametrize("adapt", [peft.get_peft_model, hfscale.get_peft_model])
def test_a_loss_of_peft_is_of_plain_loops(adapt: Callable[..., Any]) -> None:
    """A step, which has no logits, is refused in words; a loop of one's own trains as in stock code."""
    runs = [_by_cpt(stock(), peft.get_peft_model), _by_cpt(hfscale.parallelize(stock()), adapt)]
    with pytest.raises(ConfigError, match="got PEFT's CPT, which computes another"):
        hfscale.train_step(runs[1], BATCH)
    found: list[list[float]] = []
    for model in runs:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        told: list[float] = []
        for _ in range(3):
            loss = model(**{**BATCH, "attention_mask": torch.ones_like(IDS)}).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            told += [float(loss.detach()), float(norm)]
        found.append(told)
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[0][0] != found[0][4]
