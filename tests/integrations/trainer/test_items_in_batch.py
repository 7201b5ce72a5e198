"""Losses that divide by nothing of the step train and report over data ranks what they do in one process."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import default_data_collator

import hfscale
from hfscale import ParallelConfig
from hfscale.integrations.trainer.items_in_batch import Noticed
from hfscale.testing import RankPool

Pools = Callable[[int], RankPool]
SMALL: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "conv_dim": (8,),
    "conv_stride": (4,), "conv_kernel": (4,), "num_feat_extract_layers": 1, "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "final_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0, "layerdrop": 0.0, "mask_time_prob": 0.0,
    "num_labels": 2,
}  # fmt: skip
SOUND = {
    "wav2vec2": (transformers.Wav2Vec2Config, transformers.Wav2Vec2ForSequenceClassification),
    "hubert": (transformers.HubertConfig, transformers.HubertForSequenceClassification),
    "wavlm": (transformers.WavLMConfig, transformers.WavLMForSequenceClassification),
}
KINDS = (*SOUND, "vit")


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "vit":
        sizes = {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
        }
        config = transformers.ViTConfig(
            **sizes, image_size=8, patch_size=4, num_labels=2, hidden_dropout_prob=0.0
        )
        return transformers.ViTForImageClassification(config)
    config_class, model_class = SOUND[kind]
    return model_class(config_class(**SMALL))


def rows_of(kind: str, dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(2)
    shape, name = ((3, 8, 8), "pixel_values") if kind == "vit" else ((64,), "input_values")
    return [
        {name: torch.randn(shape, generator=generator, dtype=dtype), "labels": index % 2}
        for index in range(24)
    ]


def trained(
    kind: str,
    layout: dict[str, int] | None,
    out: str,
    accumulated: int,
    loss: Any = None,
    **options: Any,
) -> list[float]:
    world = ParallelConfig(**layout or {}).batch_world
    args = transformers.TrainingArguments(
        out, per_device_train_batch_size=4 // world, gradient_accumulation_steps=accumulated, max_steps=3, report_to=[],
        use_cpu=True, save_strategy="no", logging_steps=1, learning_rate=1e-2, optim="sgd", disable_tqdm=True,
        **options,
    )  # fmt: skip
    made: Any = transformers.Trainer if layout is None else hfscale.Trainer
    more = {} if layout is None else {"parallel": ParallelConfig(**layout)}
    given = {"args": args, "train_dataset": rows_of(kind), "data_collator": default_data_collator}
    trainer = made(model_of(kind), compute_loss_func=loss, **given, **more)
    trainer.train()
    return [
        row[key]
        for row in trainer.state.log_history
        if "loss" in row
        for key in ("loss", "grad_norm")
    ]


@pytest.mark.daily("wav2vec2-layout0-1", "vit-layout0-2")
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("layout", [{"dp_shard_size": 2}, {"dp_replicate_size": 2}])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_one_process(
    pools: Pools,
    kind: str,
    layout: dict[str, int],
    accumulated: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected = trained(kind, None, str(tmp_path), accumulated)
    for found in pools(2).run(trained, kind, layout, str(tmp_path), accumulated):
        assert found == pytest.approx(expected, rel=1e-4)


def mean_of_rows(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return F.cross_entropy(outputs.logits, labels)


def sum_over_items(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return torch.div(
        F.cross_entropy(outputs.logits, labels, reduction="sum"), other=num_items_in_batch
    )


OWN: dict[str, dict[str, Any]] = {
    "mean": {"loss": mean_of_rows},
    "items": {"loss": sum_over_items},
    "smoothed": {"label_smoothing_factor": 0.2},
}


@pytest.mark.daily("wav2vec2-mean", "wav2vec2-items", "wav2vec2-smoothed")
@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("kind", ["wav2vec2", "vit"])
def test_losses_of_a_script_are_those_of_one_process(
    pools: Pools, kind: str, own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected = trained(kind, None, str(tmp_path), 1, **OWN[own])
    for found in pools(2).run(trained, kind, {"dp_shard_size": 2}, str(tmp_path), 1, **OWN[own]):
        assert found == pytest.approx(expected, rel=1e-4)


def looped(kind: str, layout: dict[str, int] | None, prepares: bool) -> list[float]:
    """Return loss and norm of three steps in a loop of the script's own, in float64."""
    model = model_of(kind).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    world = ParallelConfig(**layout or {}).batch_world
    batches = DataLoader(
        rows_of(kind, torch.float64), batch_size=4 // world, collate_fn=default_data_collator
    )
    accelerator = hfscale.Accelerator(cpu=True) if layout else accelerate.Accelerator(cpu=True)
    if layout is not None:
        model = hfscale.parallelize(model, ParallelConfig(**layout))
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    said = []
    for batch in islice(batches, 3):
        loss = model(**batch).loss
        if prepares:
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        else:
            loss.backward()
            norm = hfscale.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        said += [float(accelerator.reduce(loss.detach(), "mean")), float(norm)]
    return said


@pytest.mark.daily("wav2vec2-layout0-True", "wav2vec2-layout1-False")
@pytest.mark.parametrize("prepares", [True, False])
@pytest.mark.parametrize("layout", [{"dp_shard_size": 2}, {"dp_replicate_size": 2}])
@pytest.mark.parametrize("kind", ["wav2vec2", "vit"])
def test_loops_are_those_of_one_process(
    pools: Pools, kind: str, layout: dict[str, int], prepares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected = looped(kind, None, True)
    for found in pools(2).run(looped, kind, layout, prepares):
        assert found == pytest.approx(expected, rel=1e-12)


def test_a_number_notices_what_is_computed_with_it() -> None:
    number = Noticed.wrap(torch.tensor(4))
    moved = number.to("cpu").float()
    assert moved.device.type == "cpu"
    assert not number.notes
    assert f"{number} of {number!r}"  # a log shows it
    assert not number.notes
    assert float((torch.ones(()) / moved).detach()) == 0.25
    assert number.notes


@pytest.mark.parametrize(
    "use",
    [
        lambda number: torch.div(torch.ones(()), other=number),
        lambda number: torch.stack([number, number]),
        lambda number: max(number, 1) / 2,
        int,
    ],
)
def test_a_number_is_noticed_wherever_it_stands(use: Callable[[Any], Any]) -> None:
    number = Noticed.wrap(torch.tensor(4))
    use(number)
    assert number.notes


def hits(given: Any) -> dict[str, float]:
    return {"hits": float((given.predictions.argmax(-1) == given.label_ids).mean())}


def evaluated(
    kind: str, layout: dict[str, int] | None, out: str, rows: int, loss: Any
) -> list[float]:
    world = ParallelConfig(**layout or {}).batch_world
    args = transformers.TrainingArguments(
        out, per_device_eval_batch_size=4 // world, report_to=[], use_cpu=True, disable_tqdm=True
    )
    made: Any = transformers.Trainer if layout is None else hfscale.Trainer
    more = {} if layout is None else {"parallel": ParallelConfig(**layout)}
    found = []
    for metrics in (None, hits):
        given = {"compute_metrics": metrics, "compute_loss_func": loss}
        trainer = made(model_of(kind), args, data_collator=default_data_collator, **given, **more)
        told = trainer.evaluate(rows_of(kind)[:rows])
        found += [told["eval_loss"], told.get("eval_hits", 0.0)]
    return found


@pytest.mark.daily("wav2vec2-None-5", "vit-None-5", "vit-mean_of_rows-7")
@pytest.mark.parametrize("rows", [8, 7, 5])
@pytest.mark.parametrize("loss", [None, mean_of_rows])
@pytest.mark.parametrize("kind", ["wav2vec2", "vit"])
def test_evaluations_are_those_of_one_process(
    pools: Pools,
    kind: str,
    loss: Any,
    rows: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where one rank has a row less, or has none of the last batch."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected = evaluated(kind, None, str(tmp_path), rows, loss)
    for found in pools(2).run(evaluated, kind, {"dp_shard_size": 2}, str(tmp_path), rows, loss):
        assert found == pytest.approx(expected, rel=1e-5)
