"""Checkpoints and states with trained multi-token-prediction layers, and what is refused."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments
from transformers.modeling_layers import MtpModel

import hfscale
from hfscale import CheckpointError, ConfigError, ParallelConfig, PlanError
from hfscale.cli import main
from hfscale.testing import RankPool
from hfscale.testing.parity import stored

from ...tiny_models import tiny
from .plain_prediction import PredictionCase, config_with, reference, trains

Pools = Callable[[int], RankPool]
BATCH = {name: torch.arange(20).view(2, 10) % 11 for name in ("input_ids", "labels")}


def checkpoint(directory: Path, family: str = "deepseek_v3", depths: int = 1) -> str:
    reference(PredictionCase(config_with(family, depths), steps=0), 1, directory)
    return str(directory / "start")


def loaded(source: str, layout: ParallelConfig | None = None, **options: Any) -> Any:
    return hfscale.from_pretrained(
        source, parallel=layout, mtp_loss_weight=0.1, dtype=torch.float32, **options
    )


def trained(source: str, target: str, layout: ParallelConfig) -> None:
    model = loaded(source, layout)
    for _ in range(2):
        hfscale.train_step(model, BATCH)
        torch.optim.SGD(model.parameters(), 0.1).step()
    hfscale.save_state(model, f"{target}/state")
    hfscale.save_pretrained(model, f"{target}/saved")


def resumed(source: str, target: str, layout: ParallelConfig) -> None:
    model = loaded(source, layout)
    hfscale.load_state(model, f"{target}/state")
    hfscale.save_pretrained(model, f"{target}/resumed")


@trains
def test_states_are_resumed_and_converted(pools: Pools, tmp_path: Path) -> None:
    source = checkpoint(tmp_path)
    target = str(tmp_path)
    pools(2).run(trained, source, target, ParallelConfig(tp_size=2))
    pools(2).run(resumed, source, target, ParallelConfig(pp_size=2))
    assert main(["convert", f"{target}/state", f"{target}/converted"]) == 0
    before = stored(tmp_path / "start")
    after = stored(tmp_path / "saved")
    assert before.keys() == after.keys()
    assert "model.layers.2.mlp.experts.3.gate_proj.weight" in after
    assert not torch.equal(
        before["model.layers.2.eh_proj.weight"], after["model.layers.2.eh_proj.weight"]
    )
    assert torch.equal(after["model.layers.2.shared_head.head.weight"], after["lm_head.weight"])
    for name in ("resumed", "converted"):
        found = stored(tmp_path / name)
        assert found.keys() == after.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in after.items()), name


@trains
def test_transformers_drafts_with_them(tmp_path: Path) -> None:
    model = loaded(checkpoint(tmp_path, "mellum"))
    hfscale.train_step(model, BATCH)
    torch.optim.SGD(model.parameters(), 0.1).step()
    hfscale.save_pretrained(model, tmp_path / "out")
    found = MtpModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    ours = dict(model.mtp.layers.named_parameters())
    theirs = dict(found.layers.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(theirs[name], parameter) for name, parameter in ours.items())


def test_without_the_option_they_are_carried(tmp_path: Path) -> None:
    source = checkpoint(tmp_path)
    model = hfscale.from_pretrained(source)
    assert not [name for name, _ in model.named_parameters() if name.startswith("mtp")]
    hfscale.save_pretrained(model, tmp_path / "out")
    before = stored(tmp_path / "start")
    after = stored(tmp_path / "out")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        if ".layers.2." not in key:  # the model's own: its routers are in 32 bits since 5.24
            tensor = tensor.to(after[key].dtype)
        assert torch.equal(after[key], tensor), key


@trains
@pytest.mark.parametrize("family", ["glm4_moe", "mellum"])
def test_new_ones(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint without them gets them, said once, under the family's names."""
    config = config_with(family)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "in")
    with caplog.at_level(logging.WARNING, "hfscale"):
        model = loaded(str(tmp_path / "in"), seed=3)
    assert [each.getMessage() for each in caplog.records if "multi-token" in each.getMessage()] == [
        "the checkpoint has no weights of the model's multi-token-prediction layers, so these begin with random "
        "weights: train them, or load a checkpoint that has them"
    ]
    hfscale.save_pretrained(model, tmp_path / "out")
    key = "mtp.fc.weight" if family == "mellum" else "model.layers.2.eh_proj.weight"
    found = stored(tmp_path / "out")
    assert torch.equal(found[key], model.mtp.layers[0].eh_proj.weight)
    again = loaded(str(tmp_path / "out"))
    assert all(
        torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True)
    )
    fresh = hfscale.from_config(config, mtp_loss_weight=0.1)
    assert float(fresh.mtp.layers[0].eh_proj.weight.detach().std()) == pytest.approx(
        config.initializer_range, rel=0.2
    )


@trains
def test_evaluation_returns_the_models_own_loss(tmp_path: Path) -> None:
    source = checkpoint(tmp_path)
    plain = hfscale.eval_step(hfscale.from_pretrained(source, dtype=torch.float32), BATCH)
    model = loaded(source)
    assert torch.equal(hfscale.eval_step(model, BATCH), plain)
    assert hfscale.metrics(model) == {}
    assert hfscale.train_step(model, BATCH) > plain
    assert hfscale.metrics(model).keys() == {"mtp_loss", "mtp_acceptance"}
    loss, outputs = hfscale.eval_step(model, BATCH, return_outputs=True)
    assert float(loss) == pytest.approx(float(plain))
    assert outputs.logits.shape == (2, 10, 11)


@trains
def test_the_plan_counts_them() -> None:
    config = config_with(depths=2)
    layout = ParallelConfig(pp_size=2)
    plain = hfscale.plan(config, layout)
    found = hfscale.plan(config, layout, mtp_loss_weight=0.1)
    assert found.layers == (*plain.layers, "mtp.layers.0", "mtp.layers.1")
    assert found.stages is not None
    assert plain.stages is not None
    assert found.stages.stages[1].parameters > plain.stages.stages[1].parameters
    assert (
        "multi-token prediction: mtp.layers.0, mtp.layers.1 after model; on the last stage"
        in str(found)
    )
    cut = hfscale.plan(
        config, ParallelConfig(tp_size=2, sequence_parallel=True), mtp_loss_weight=0.1
    )
    assert [region.owner for region in cut.sequence_regions] == [
        "model",
        "mtp.layers.0",
        "mtp.layers.1",
    ]
    assert cut.by_name["mtp.layers.0.eh_proj.weight"].partial == ("tp",)
    assert (
        hfscale.memory_estimate(found, tokens=64).total
        > hfscale.memory_estimate(plain, tokens=64).total
    )


@trains
def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not fit 'llama'.*num_nextn_predict_layers"):
        hfscale.from_config(LlamaConfig(**tiny("llama").to_diff_dict()), mtp_loss_weight=0.1)
    with pytest.raises(ConfigError, match="mtp_loss_weight"):
        hfscale.from_config(config_with(), mtp_loss_weight=0.0)
    with pytest.raises(PlanError, match="needs a schedule with a flush"):
        hfscale.plan(
            config_with(),
            ParallelConfig(pp_size=2, pipeline_schedule="pipedream_2bw"),
            mtp_loss_weight=0.1,
        )
    model = hfscale.from_config(config_with(), mtp_loss_weight=0.1)
    with pytest.raises(ConfigError, match="leave mtp_loss_weight"):
        hfscale.train_step(model, BATCH, loss_fn=lambda outputs, batch: (outputs.logits.sum(), 1))
    embeds = model.get_input_embeddings()(BATCH["input_ids"])
    with pytest.raises(ConfigError, match="needs input_ids"):
        hfscale.train_step(model, {"inputs_embeds": embeds, "labels": BATCH["labels"]})


@trains
def test_adapters_are_merged_in_memory(tmp_path: Path) -> None:
    """From file to file, transformers' model would not have the layers."""
    source = checkpoint(tmp_path)
    adapter = str(tmp_path / "adapter")
    lora = peft.LoraConfig(r=2, target_modules=["o_proj", "eh_proj"], init_lora_weights=False)
    model = loaded(source, peft_config=lora)
    hfscale.save_pretrained(model, adapter)
    assert main(["merge", source, adapter, str(tmp_path / "out")]) == 2
    with pytest.raises(CheckpointError, match="does not fit this model"):
        hfscale.from_pretrained(source, peft_config=adapter, dtype=torch.float32)
    hfscale.merge_and_unload(loaded(source, peft_config=adapter))
    hfscale.merge_and_unload(model)
    hfscale.save_pretrained(model, tmp_path / "merged")
    before = stored(tmp_path / "start")
    after = stored(tmp_path / "merged")
    assert before.keys() == after.keys()
    changed = {key for key, tensor in before.items() if not torch.equal(after[key], tensor.float())}
    assert {key for key in changed if ".layers.2." in key} == {
        "model.layers.2.eh_proj.weight",
        "model.layers.2.self_attn.o_proj.weight",
    }


@trains
def test_a_trainer_logs_them(tmp_path: Path) -> None:
    model = hfscale.from_config(config_with(depths=2), mtp_loss_weight=0.1)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, logging_steps=1, report_to=[], use_cpu=True, save_strategy="no"
    )
    rows = [{name: value[row] for name, value in BATCH.items()} for row in range(2)]
    trainer = hfscale.Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    logged = trainer.state.log_history[0]
    assert {"mtp_loss", "mtp_acceptance", "mtp_acceptance_2"} <= logged.keys()
    assert logged["loss"] > logged["mtp_loss"] > 0


def without_its_masks(source: str, layout: ParallelConfig) -> None:
    with pytest.raises(
        ConfigError,
        match=r"needs the attention mask of model.layers.0, but this layer is not on the last",
    ):
        loaded(source, layout)


@trains
def test_masks_of_another_stage(pools: Pools, tmp_path: Path) -> None:
    config = config_with("mellum", layer_types=["sliding_attention", "full_attention"])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    pools(2).run(without_its_masks, str(tmp_path), ParallelConfig(pp_size=2))
