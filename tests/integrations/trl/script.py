"""Scripts with TRL's trainers, stock or in a layout; what both log is compared."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import peft
import torch
import trl
from datasets import Dataset, load_from_disk
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

import hfscale
import hfscale.trl
from hfscale import ParallelConfig

_TIMES = ("runtime", "per_second", "preparation_time", "step_time", "profiling")
_CHAT = """{% for message in messages %}{% if message.role == 'user' %}q {{ message.content }} \
{% else %}a {% generation %}{{ message.content }} end{% endgeneration %} {% endif %}{% endfor %}"""


def tokenizer(path: Path) -> PreTrainedTokenizerFast:
    words = ["pad", "end", "unknown", "q", "a", *(f"w{number}" for number in range(62))]
    whole = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="unknown")
    )
    whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=whole,
        pad_token="pad",
        eos_token="end",
        unk_token="unknown",
        chat_template=_CHAT,
    )
    made.save_pretrained(path)
    return made


def words(count: int, generator: torch.Generator) -> str:
    return " ".join(
        f"w{number}" for number in torch.randint(0, 62, (count,), generator=generator).tolist()
    )


def rows(path: str, kind: str, seed: int) -> Dataset:
    """What :func:`save_rows` has written: ranks share what TRL caches beside it."""
    return load_from_disk(f"{path}/rows/{kind}-{seed}")


def save_rows(path: Path, kind: str, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 8, (count, 3), generator=generator).tolist()
    made = []
    for index, (first, second, third) in enumerate(lengths):
        prompt, good, bad = (words(length, generator) for length in (first, second, third))
        if kind == "text":
            made.append({"text": f"{prompt} {good}"})
        elif kind == "completion":
            made.append({"prompt": prompt + " ", "completion": good})
        elif kind == "chat":
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": good}]
            made.append({"messages": turns})
        elif kind == "label":
            made.append({"prompt": prompt + " ", "completion": good, "label": bool(index % 2)})
        elif kind == "prompt":
            made.append({"prompt": prompt})
        else:
            made.append({"prompt": prompt + " ", "chosen": good, "rejected": bad})
    Dataset.from_list(made).save_to_disk(path / "rows" / f"{kind}-{seed}")


@dataclass
class Case:
    """What a script is asked for.

    Attributes:
        trainer: name of TRL's.
        data: which columns its rows have.
        arguments: of its config; ``batch`` rows of all distinct batches go through one forward pass.
        lora: a PEFT config for the trainer.
        ours: whether a stock trainer is given a model of hfscale's.
        load: arguments of ``from_pretrained``.
        more: arguments of the trainer.
    """

    trainer: str
    data: str
    arguments: dict[str, Any] = field(default_factory=dict)
    lora: Any = None
    batch: int = 4
    ours: bool = False
    load: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    adapted: Any = None  # a PEFT config of adapters that the model has before
    taught: bool = False  # by the model in the folder ``teacher``
    # More arguments of the trainer, made on every rank.
    made: Callable[[str], dict[str, Any]] | None = None


def length_reward(completions: list[str], **_: Any) -> list[float]:
    return [len(each.split()) / 4 + 0.1 * each.count("3") for each in completions]


def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """The same completions for a prompt, whichever rank has it; those of its group differ."""
    first = trainer.accelerator.process_index * len(prompts)
    prompt_ids = []
    completions = []
    for place, prompt in enumerate(prompts, first):
        ids = trainer.processing_class(prompt)["input_ids"]
        number = place % trainer.num_generations
        prompt_ids.append(ids)
        completions.append(
            [(sum(ids) + 7 * number + k * k) % 60 + 5 for k in range(2 + number)] + [1]
        )
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None}


def build(case: Case, path: str, layout: dict[str, Any] | None) -> Any:
    ranks = case.trainer == "RewardTrainer"
    auto = AutoModelForSequenceClassification if ranks else AutoModelForCausalLM
    load: dict[str, Any] = {
        "dtype": torch.float32,
        **({"num_labels": 1} if ranks else {}),
        **case.load,
    }
    if layout is None and not case.ours:
        model = auto.from_pretrained(path, **load)
        torch.manual_seed(1)
        return model if case.adapted is None else peft.get_peft_model(model, case.adapted)
    model = hfscale.from_pretrained(
        path, parallel=ParallelConfig(**(layout or {})), auto_class=auto, **load
    )
    return model if case.adapted is None else hfscale.get_peft_model(model, case.adapted, seed=1)


def run(case: Case, path: str, out: str, layout: dict[str, Any] | None) -> list[dict[str, float]]:
    world = 1 if layout is None else ParallelConfig(**layout).batch_world
    given: dict[str, Any] = {
        "max_steps": 3,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "warmup_steps": 0,  # or the second step compares a policy with its equal, and its signs are rounding
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        **case.arguments,
    }
    size = case.batch // world
    config = getattr(trl, case.trainer.replace("Trainer", "Config"))(
        out, per_device_train_batch_size=size, per_device_eval_batch_size=size, **given
    )
    kind = getattr(trl if layout is None else hfscale.trl, case.trainer)
    adapters = {} if case.lora is None else {"peft_config": case.lora}
    trainer = kind(
        model=build(case, path, layout),
        args=config,
        train_dataset=rows(path, case.data, 1),
        eval_dataset=rows(path, case.data, 2) if "eval_strategy" in given else None,
        processing_class=PreTrainedTokenizerFast.from_pretrained(path),
        **adapters,
        **({"teacher_model": f"{path}/teacher"} if case.taught else {}),
        **case.more,
        **({} if case.made is None else case.made(path)),
    )
    trainer.train()
    trainer.save_model(str(Path(out) / "final"))
    return [
        {name: value for name, value in row.items() if not any(part in name for part in _TIMES)}
        for row in trainer.state.log_history
    ]


def once_each(stock: Callable[[str], Any]) -> Callable[[str], Any]:
    """What stock code logs for a case, by name; each is run once."""

    @cache
    def find(name: str) -> Any:
        with warnings.catch_warnings():  # TRL's own, of names that transformers is about to change
            warnings.simplefilter("ignore")
            return stock(name)

    return find


def assert_equal(
    found: Any, expected: Any, layout: dict[str, Any], tolerance: float = 1e-5
) -> None:
    """Every number of every logged row.

    Data ranks may pad their rows to lengths of their own, and GRPO logs means of their means of ``kl`` and ``entropy``.
    """
    means = {"kl", "entropy"} if any("kl" in row for row in expected) else set()
    left_out = {"total_flos", *means} if ParallelConfig(**layout).batch_world > 1 else set()
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs.keys() - left_out:
            apart = abs(ours[name] - theirs[name])
            assert apart <= tolerance * max(1.0, abs(theirs[name])), (
                theirs["step"],
                name,
                ours[name],
                theirs[name],
            )
