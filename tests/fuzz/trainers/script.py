"""The script of a draw, as people write it: with a stock trainer, or with hfscale's in a layout."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

import hfscale
import hfscale.trl
from hfscale._compat.transformers.experts import use_eager_experts
from hfscale.config.parallel import ParallelConfig
from hfscale.models.precision import keep_float64

from .data import CLASSIFIERS, Rows, Stream, collate, rows_of
from .draw import Draw
from .own import Begin, digit_reward, length_reward, optimizers, rollouts, subclass, wide

_TIMES = ("runtime", "per_second", "preparation_time", "mem_", "step_time", "profiling")


@dataclass
class Place:
    """Where a run happens.

    Attributes:
        start: the directory of the model that it begins with.
        out: where it writes.
        layout: fields of the layout; ``None`` for stock code in one process.
        resume: the checkpoint that it goes on from.
    """

    start: str
    out: str
    layout: dict[str, Any] | None
    resume: str | None = None

    @property
    def batches(self) -> int:
        """Distinct batches of a step."""
        return 1 if self.layout is None else ParallelConfig(**self.layout).batch_world


class Stop(TrainerCallback):
    """Ends a run early."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Of the optimizer."""
        control.should_training_stop |= state.global_step >= self._steps


def loss_function(output: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """Cross entropy and a penalty of large logits, as ``compute_loss_func``."""
    logits = wide(output.logits)[:, :-1]
    labels = labels[:, 1:]
    valid = labels != -100
    entropy = torch.nn.functional.cross_entropy(logits[valid], labels[valid], reduction="sum")
    total = entropy + 0.01 * logits[valid].logsumexp(-1).square().sum()
    return total / (valid.sum() if num_items_in_batch is None else num_items_in_batch)


class Metrics:
    """``compute_metrics``, of all batches or of one after the other."""

    def __init__(self, kind: str, model: str) -> None:
        self._kind = kind
        self._model = model
        self._rows: list[dict[str, float]] = []

    def __call__(self, prediction: Any, compute_result: bool = True) -> dict[str, float]:
        """Of an evaluation; of one batch, until ``compute_result`` ends them."""
        found = prediction.predictions
        labels = prediction.label_ids
        found, labels = (
            each.numpy() if isinstance(each, torch.Tensor) else each for each in (found, labels)
        )
        if self._model in CLASSIFIERS:
            numbers = {"size": float(np.abs(found).mean()), "rows": float(len(found))}
        else:
            valid = labels[:, 1:] != -100
            chosen = (found if self._kind == "chosen" else found.argmax(-1))[:, :-1]
            numbers = {
                "accuracy": float((chosen == labels[:, 1:])[valid].mean()),
                "rows": float(len(labels)),
            }
            if self._kind != "chosen":
                numbers["size"] = float(np.abs(found[:, :-1][valid]).mean())
        if self._kind != "batches":
            return numbers
        self._rows.append(numbers)
        if not compute_result:
            return {}
        rows = self._rows
        self._rows = []
        return {name: float(np.mean([row[name] for row in rows])) for name in numbers}


def chosen_tokens(logits: Any, labels: Any) -> Any:
    """What metrics need of logits."""
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


def build(draw: Draw, place: Place) -> Any:
    """The model."""
    auto = AutoModelForSequenceClassification if draw.model in CLASSIFIERS else AutoModelForCausalLM
    given: dict[str, Any] = {"dtype": torch.float64 if draw.precise else torch.float32}
    if draw.adapter == "qlora":
        given["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4"
        )
    adapter = f"{place.start}/adapter" if draw.adapter else None
    if place.layout is not None:
        precision = "bf16" if draw.arguments.get("bf16") else "no"
        model = hfscale.from_pretrained(
            place.start,
            parallel=ParallelConfig(**place.layout),
            auto_class=auto,
            peft_config=adapter,
            mixed_precision=precision,
            **given,
        )
    else:
        model = auto.from_pretrained(place.start, **given)
        for module in model.modules():
            # A layout that some processors have for evaluation.
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
        if adapter is not None:
            from peft import PeftModel

            # What it draws and then overwrites is not part of a run.
            with torch.random.fork_rng(devices=[]):
                model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
        # Trainer says it to the model that it is made with, and the one that trains is another.
        if draw.late:
            model.config.use_cache = False
        if draw.nudge:
            generator = torch.Generator().manual_seed(draw.nudge)
            size = 2**-8 if draw.rounds else 2**-22
            with torch.no_grad():
                for parameter in filter(lambda each: each.requires_grad, model.parameters()):
                    parameter.mul_(
                        1 + (torch.rand(parameter.shape, generator=generator) - 0.5) * size
                    )
    if draw.precise:
        use_eager_experts(model)
    return model


def source(draw: Draw, place: Place, train: bool) -> Any:
    """A data set."""
    rows = rows_of(draw.data, draw.rows if train else draw.evaluated, 2 * draw.seed + train)
    if draw.source == "torch":
        return Rows(rows)
    if draw.source == "stream":
        return Stream(rows) if train else Rows(rows)
    from datasets import load_from_disk

    return load_from_disk(f"{Path(place.out).parent}/rows-{train}")


def save_rows(draw: Draw, directory: Path) -> None:
    """Data sets on disk, where ranks share what is cached beside them."""
    from datasets import Dataset

    for train, count in ((True, draw.rows), (False, draw.evaluated)):
        Dataset.from_list(rows_of(draw.data, count, 2 * draw.seed + train)).save_to_disk(
            directory / f"rows-{train}"
        )


def kinds(draw: Draw, place: Place) -> tuple[Any, Any]:
    """The classes of the trainer and of its arguments."""
    if draw.trainer == "Trainer":
        trainer: Any = transformers.Trainer if place.layout is None else hfscale.Trainer
        return subclass(draw, trainer), transformers.TrainingArguments
    import trl

    if draw.trainer == "ORPOTrainer":  # which is experimental there, and not in hfscale.trl
        from trl.experimental import orpo

        ours = (hfscale.TrainerMixin, orpo.ORPOTrainer)
        return (
            orpo.ORPOTrainer if place.layout is None else type("ORPOTrainer", ours, {})
        ), orpo.ORPOConfig
    trainer = getattr(trl if place.layout is None else hfscale.trl, draw.trainer)
    return subclass(draw, trainer), getattr(trl, draw.trainer.replace("Trainer", "Config"))


def collator(draw: Draw, tokens: Any) -> Any:
    """What makes a batch of rows."""
    if draw.collator == "own":
        return collate
    kind = getattr(transformers, draw.collator)
    if draw.collator == "DataCollatorForLanguageModeling":
        return kind(tokens, mlm=False)
    return kind() if draw.collator == "DataCollatorWithFlattening" else kind(tokens)


def run(draw: Draw, place: Place, note: Callable[[str], None]) -> dict[str, Any]:
    """Train, evaluate, predict and save.

    Args:
        note: is told when training begins, behind which nothing is to be refused.
    """
    with keep_float64() if draw.precise else nullcontext():
        return _run(draw, place, note)


def _run(draw: Draw, place: Place, note: Callable[[str], None]) -> dict[str, Any]:
    trainer_class, arguments_class = kinds(draw, place)
    size = draw.batch // place.batches
    given = {
        "logging_steps": 1,
        "learning_rate": 2e-3,
        "adam_epsilon": 1e-5,  # what is rounding in a gradient must not become an update
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
        **draw.arguments,
    }
    args = arguments_class(
        place.out, per_device_train_batch_size=size, per_device_eval_batch_size=size, **given
    )
    held = source(draw, place, False)
    trainer = trainer_class(
        **_models(draw, place),
        args=args,
        train_dataset=source(draw, place, True),
        eval_dataset={"one": held, "two": source(draw, place, True)}
        if draw.brings == "sets"
        else held,
        **_given(draw, place),
    )
    note("train")
    trainer.train(resume_from_checkpoint=place.resume)
    trainer.save_model(f"{place.out}/final")
    state = trainer.state
    found: dict[str, Any] = {
        "history": [_without_times(row) for row in state.log_history],
        "step": state.global_step,
        "epoch": state.epoch,
        "tokens": state.num_input_tokens_seen,
        "types": sorted(
            {str(each.dtype) for each in trainer.model.parameters() if each.requires_grad}
        ),
        "best": [state.best_metric, Path(state.best_model_checkpoint or "").name],
    }
    if draw.predicts:
        predicted = trainer.predict(source(draw, place, False))
        labels = predicted.label_ids
        found["metrics"] = _without_times(predicted.metrics or {})
        found["labels"] = labels.tolist()
        chosen = predicted.predictions
        valid = np.ones(chosen.shape[:1], bool) if draw.model in CLASSIFIERS else labels != -100
        found["predictions"] = chosen[valid].astype(float).tolist()
    return found


def _given(draw: Draw, place: Place) -> dict[str, Any]:
    """What else the trainer is given."""
    tokens = PreTrainedTokenizerFast.from_pretrained(place.start)
    more: dict[str, Any] = {"processing_class": tokens}
    if draw.trainer == "Trainer":
        more["data_collator"] = collator(draw, tokens)
        if draw.loss == "function":
            more["compute_loss_func"] = loss_function
    if draw.metrics:
        more["compute_metrics"] = Metrics(draw.metrics, draw.model)
        if draw.metrics == "chosen":
            more["preprocess_logits_for_metrics"] = chosen_tokens
    if draw.stops:
        stop = (
            transformers.EarlyStoppingCallback(-draw.stops) if draw.stops < 0 else Stop(draw.stops)
        )
        more["callbacks"] = [stop]
    if "LOO" in draw.trainer or "GRPO" in draw.trainer:
        many = len(draw.arguments.get("reward_weights") or [1])
        more["reward_funcs"] = [length_reward, digit_reward][:many]
        if draw.trainer == "GRPOTrainer":
            more["rollout_func"] = rollouts
    return more


def _models(draw: Draw, place: Place) -> dict[str, Any]:
    """The model, and what is made of it or belongs to it."""
    if draw.late:
        return {"model_init": lambda: build(draw, place)}
    if draw.brings == "path":
        layout = {} if place.layout is None else {"parallel": ParallelConfig(**place.layout)}
        return {"model": place.start, **layout}
    model = build(draw, place)
    given = {"model": model, **optimizers(draw, model)}
    if draw.brings == "reference":
        given["ref_model"] = build(draw, place)
    if draw.brings == "peft":
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        given["callbacks"] = [Begin(f"{place.start}/adapter", place.layout is None)]
    return given


def _without_times(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not any(part in name for part in _TIMES)}
