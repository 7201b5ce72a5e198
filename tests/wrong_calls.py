"""Wrong calls of hfscale's public names, each of which is to be refused in words, on every rank alike.

A call is made over models of :func:`made`; what it does is :func:`outcomes`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ParallelConfig
from hfscale.errors import HFScaleError

from .models import tiny

NAN, INF = float("nan"), float("inf")
IDS = torch.randint(3, 67, (4, 8), generator=torch.Generator().manual_seed(1))


@dataclass
class Made:
    """What calls are about: a model in a layout, its optimizer, and where a checkpoint is."""

    layout: ParallelConfig
    model: Any
    optimizer: Any
    config: Any
    path: str
    folder: Path

    def batch(self, **changes: Any) -> dict[str, Any]:
        """A right batch, changed."""
        return {"input_ids": IDS, "labels": IDS, **changes}

    def stock(self) -> Any:
        """A model that nobody has parallelized."""
        return AutoModelForCausalLM.from_config(self.config)


def made(layout: dict[str, Any], path: str, folder: str) -> Made:
    """A tiny model in a layout."""
    parallel = ParallelConfig(**layout)
    model = hfscale.from_pretrained(path, parallel=parallel).train()
    optimizer = hfscale.create_optimizer(model, lr=1e-3)
    return Made(parallel, model, optimizer, tiny("llama"), path, Path(folder))


Call = Callable[[Made], Any]


def _float(ids: Tensor) -> Tensor:
    return ids.float()


BATCHES: dict[str, Callable[[Made], Any]] = {
    "None": lambda m: None,
    "a number": lambda m: 3,
    "a string": lambda m: "text",
    "a tensor": lambda m: IDS,
    "a set": lambda m: {"input_ids"},
    "a list of strings": lambda m: ["a", "b"],
    "an empty list": lambda m: [],
    "an empty mapping": lambda m: {},
    "a list with None": lambda m: [m.batch(), None],
    "a tuple of tensors": lambda m: (IDS, IDS),
    "no labels": lambda m: {"input_ids": IDS},
    "labels None": lambda m: m.batch(labels=None),
    "no ids": lambda m: {"labels": IDS},
    "ids None": lambda m: m.batch(input_ids=None),
    "float ids": lambda m: m.batch(input_ids=IDS.float()),
    "half ids": lambda m: m.batch(input_ids=IDS.half()),
    "uint8 ids": lambda m: m.batch(input_ids=IDS.to(torch.uint8)),
    "int16 ids": lambda m: m.batch(input_ids=IDS.to(torch.int16)),
    "bool ids": lambda m: m.batch(input_ids=IDS > 5),
    "complex ids": lambda m: m.batch(input_ids=IDS.to(torch.complex64)),
    "float labels": lambda m: m.batch(labels=IDS.float()),
    "bool labels": lambda m: m.batch(labels=IDS > 5),
    "uint8 labels": lambda m: m.batch(labels=IDS.to(torch.uint8)),
    "complex labels": lambda m: m.batch(labels=IDS.to(torch.complex64)),
    "labels of three dims": lambda m: m.batch(labels=IDS[..., None]),
    "labels of one dim": lambda m: m.batch(labels=IDS.flatten()),
    "labels of fewer rows": lambda m: m.batch(labels=IDS[:2]),
    "labels of fewer tokens": lambda m: m.batch(labels=IDS[:, :5]),
    "labels of one row": lambda m: m.batch(labels=IDS[:1]),
    "labels scalar": lambda m: m.batch(labels=torch.tensor(3)),
    "labels a number": lambda m: m.batch(labels=3),
    "labels a list": lambda m: m.batch(labels=IDS.tolist()),
    "labels a string": lambda m: m.batch(labels="text"),
    "labels sparse": lambda m: m.batch(labels=IDS.to_sparse()),
    "labels on meta": lambda m: m.batch(labels=IDS.to("meta")),
    "labels out of range": lambda m: m.batch(labels=IDS + 1000),
    "labels negative": lambda m: m.batch(labels=IDS * 0 - 5),
    "ids of three dims": lambda m: m.batch(input_ids=IDS[..., None], labels=IDS[..., None]),
    "ids of one dim": lambda m: m.batch(input_ids=IDS[0], labels=IDS[0]),
    "ids scalar": lambda m: m.batch(input_ids=torch.tensor(3), labels=torch.tensor(3)),
    "ids a list": lambda m: m.batch(input_ids=IDS.tolist()),
    "ids a string": lambda m: m.batch(input_ids="text"),
    "ids a number": lambda m: m.batch(input_ids=3),
    "ids a list of strings": lambda m: m.batch(input_ids=["a", "b"]),
    "ids a tuple": lambda m: m.batch(input_ids=tuple(map(tuple, IDS.tolist()))),
    "ids sparse": lambda m: m.batch(input_ids=IDS.to_sparse()),
    "ids on meta": lambda m: m.batch(input_ids=IDS.to("meta")),
    "batch on meta": lambda m: m.batch(input_ids=IDS.to("meta"), labels=IDS.to("meta")),
    "ids out of range": lambda m: m.batch(input_ids=IDS + 1000),
    "ids negative": lambda m: m.batch(input_ids=IDS - 1000),
    "zero tokens": lambda m: m.batch(input_ids=IDS[:, :0], labels=IDS[:, :0]),
    "mask of fewer rows": lambda m: m.batch(attention_mask=torch.ones(2, 8, dtype=torch.long)),
    "mask of fewer tokens": lambda m: m.batch(attention_mask=torch.ones(4, 5, dtype=torch.long)),
    "mask of more tokens": lambda m: m.batch(attention_mask=torch.ones(4, 11, dtype=torch.long)),
    "mask of one dim": lambda m: m.batch(attention_mask=torch.ones(8, dtype=torch.long)),
    "mask of three dims": lambda m: m.batch(attention_mask=torch.ones(4, 8, 8, dtype=torch.long)),
    "mask a list": lambda m: m.batch(attention_mask=[[1] * 8] * 4),
    "mask a string": lambda m: m.batch(attention_mask="ones"),
    "mask complex": lambda m: m.batch(attention_mask=torch.ones(4, 8, dtype=torch.complex64)),
    "mask on meta": lambda m: m.batch(attention_mask=torch.ones(4, 8, device="meta")),
    "mask sparse": lambda m: m.batch(attention_mask=torch.ones(4, 8).to_sparse()),
    "positions of fewer rows": lambda m: m.batch(position_ids=torch.arange(8).expand(2, 8)),
    "positions of fewer tokens": lambda m: m.batch(position_ids=torch.arange(5).expand(4, 5)),
    "positions float": lambda m: m.batch(position_ids=torch.arange(8.0).expand(4, 8)),
    "positions a string": lambda m: m.batch(position_ids="restart"),
    "positions of one dim": lambda m: m.batch(position_ids=torch.arange(8)),
    "embeds beside ids": lambda m: m.batch(inputs_embeds=torch.zeros(4, 8, 32)),
    "embeds of other width": lambda m: {"inputs_embeds": torch.zeros(4, 8, 31), "labels": IDS},
    "embeds of integers": lambda m: {"inputs_embeds": torch.zeros(4, 8, 32, dtype=torch.long), "labels": IDS},
    "embeds of two dims": lambda m: {"inputs_embeds": torch.zeros(4, 32), "labels": IDS},
    "unknown key": lambda m: m.batch(colour=IDS),
    "misspelt key": lambda m: m.batch(atention_mask=torch.ones(4, 8)),
    "a number for a key": lambda m: {**m.batch(), 3: IDS},
    "shift_labels of other shape": lambda m: m.batch(shift_labels=IDS[:, :5]),
    "shift_labels float": lambda m: m.batch(shift_labels=IDS.float()),
    "return_dict a string": lambda m: m.batch(return_dict="no"),
    "logits_to_keep": lambda m: m.batch(logits_to_keep=1),
    "past_key_values a string": lambda m: m.batch(past_key_values="cache"),
    "use_cache a string": lambda m: m.batch(use_cache="yes"),
}

NUMBERS: dict[str, Any] = {
    "None": None,
    "nan": NAN,
    "-1": -1,
    "inf": INF,
    "a string": "1.0",
    "a list": [1.0],
    "True": True,
}


def _detached(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    return outputs.logits.detach().float().sum(), 4


CALLS: dict[str, Call] = {
    **{f"train_step: {name}": (lambda m, f=f: hfscale.train_step(m.model, f(m))) for name, f in BATCHES.items()},
    **{f"eval_step: {name}": (lambda m, f=f: hfscale.eval_step(m.model, f(m))) for name, f in BATCHES.items()},
    **{
        f"token_scores: {name}": (lambda m, f=f: hfscale.token_scores(m.model, f(m)))
        for name, f in BATCHES.items()
        if name not in ("no labels", "labels None")
    },
    **{
        f"loss_fn: {name}": (lambda m, f=f: hfscale.train_step(m.model, f(m), lambda o, b: (o.logits.float().sum(), 4)))
        for name, f in BATCHES.items()
        if "label" not in name
    },
    # numbers of a step
    **{
        f"num_items_in_batch: {name}": (lambda m, v=v: hfscale.train_step(m.model, m.batch(), num_items_in_batch=v))
        for name, v in {
            **NUMBERS,
            "-5": -5,
            "0": 0,
            "[]": [],
            "[1, 2, 3]": [1, 2, 3],
            "tensor of two": torch.ones(2),
        }.items()
        if name not in ("None", "a list")
    },
    **{
        f"label_smoothing: {name}": (lambda m, v=v: hfscale.train_step(m.model, m.batch(), label_smoothing=v))
        for name, v in {**NUMBERS, "2": 2.0}.items()
    },
    **{
        f"eval label_smoothing: {name}": (lambda m, v=v: hfscale.eval_step(m.model, m.batch(), label_smoothing=v))
        for name, v in {**NUMBERS, "2": 2.0}.items()
    },
    **{
        f"temperature: {name}": (lambda m, v=v: hfscale.token_scores(m.model, m.batch(), temperature=v))
        for name, v in {**NUMBERS, "0": 0.0}.items()
    },
    **{
        f"score_loss temperature: {name}": (
            lambda m, v=v: hfscale.train_step(
                m.model, [m.batch()] * 2, score_loss=lambda s, i: s.log_probs.sum(), temperature=v
            )
        )
        for name, v in {**NUMBERS, "0": 0.0}.items()
    },
    "temperature without score_loss": lambda m: hfscale.train_step(m.model, m.batch(), temperature=0.5),
    "return_outputs: a string": lambda m: hfscale.eval_step(m.model, m.batch(), return_outputs="yes"),
    "loss_fn: a number": lambda m: hfscale.train_step(m.model, m.batch(), 3),
    "loss_fn: a string": lambda m: hfscale.train_step(m.model, m.batch(), "mse"),
    "loss_fn: returns None": lambda m: hfscale.train_step(m.model, m.batch(), lambda o, b: None),
    "loss_fn: returns a scalar": lambda m: hfscale.train_step(m.model, m.batch(), lambda o, b: o.logits.sum()),
    "loss_fn: detached": lambda m: hfscale.train_step(m.model, m.batch(), _detached),
    "loss_fn: a float": lambda m: hfscale.train_step(m.model, m.batch(), lambda o, b: (3.0, 4)),
    "loss_fn: a vector": lambda m: hfscale.train_step(m.model, m.batch(), lambda o, b: (o.logits.sum(-1), 4)),
    "loss_fn: count None": lambda m: hfscale.train_step(m.model, m.batch(), lambda o, b: (o.logits.sum(), None)),
    "loss_fn: count -4": lambda m: hfscale.train_step(m.model, m.batch(), lambda o, b: (o.logits.sum(), -4)),
    "loss_fn: count nan": lambda m: hfscale.train_step(m.model, m.batch(), lambda o, b: (o.logits.sum(), NAN)),
    "loss_fn: count a string": lambda m: hfscale.train_step(m.model, m.batch(), lambda o, b: (o.logits.sum(), "4")),
    "loss_fn: count a vector": lambda m: hfscale.train_step(
        m.model, m.batch(), lambda o, b: (o.logits.sum(), torch.ones(3))
    ),
    "loss_fn: takes one argument": lambda m: hfscale.train_step(m.model, m.batch(), lambda o: (o.logits.sum(), 4)),
    "loss_fn: and smoothing": lambda m: hfscale.train_step(
        m.model, m.batch(), lambda o, b: (o.logits.sum(), 4), label_smoothing=0.1
    ),
    "eval loss_fn: a number": lambda m: hfscale.eval_step(m.model, m.batch(), 3),
    "eval loss_fn: and num_items": lambda m: hfscale.eval_step(
        m.model, m.batch(), lambda o, b: (o.logits.sum(), 4), num_items_in_batch=3
    ),
    "score_loss: a number": lambda m: hfscale.train_step(m.model, [m.batch()] * 2, score_loss=3),
    "score_loss: returns None": lambda m: hfscale.train_step(m.model, [m.batch()] * 2, score_loss=lambda s, i: None),
    "score_loss: a vector": lambda m: hfscale.train_step(m.model, [m.batch()] * 2, score_loss=lambda s, i: s.log_probs),
    "score_loss: detached": lambda m: hfscale.train_step(
        m.model, [m.batch()] * 2, score_loss=lambda s, i: s.log_probs.sum().detach()
    ),
    "score_loss: and num_items": lambda m: hfscale.train_step(
        m.model, [m.batch()] * 2, score_loss=lambda s, i: s.log_probs.sum(), num_items_in_batch=4
    ),
    "score_loss: and smoothing": lambda m: hfscale.train_step(
        m.model, [m.batch()] * 2, score_loss=lambda s, i: s.log_probs.sum(), label_smoothing=0.1
    ),
    # models
    **{
        f"{name}: of {what}": (lambda m, f=f, w=w: f(w(m), m))
        for name, f in {
            "train_step": lambda w, m: hfscale.train_step(w, m.batch()),
            "eval_step": lambda w, m: hfscale.eval_step(w, m.batch()),
            "token_scores": lambda w, m: hfscale.token_scores(w, m.batch()),
            "clip_grad_norm_": lambda w, m: hfscale.clip_grad_norm_(w, 1.0),
            "save_pretrained": lambda w, m: hfscale.save_pretrained(w, m.folder / "saved"),
            "save_state": lambda w, m: hfscale.save_state(w, m.folder / "state"),
            "load_state": lambda w, m: hfscale.load_state(w, m.folder / "state"),
            "check_save": lambda w, m: hfscale.check_save(w, None, m.folder / "state"),
            "stream_weights": lambda w, m: list(hfscale.stream_weights(w)),
            "metrics": lambda w, m: hfscale.metrics(w),
            "batch_rank": lambda w, m: hfscale.batch_rank(w),
            "batch_world": lambda w, m: hfscale.batch_world(w),
            "create_optimizer": lambda w, m: hfscale.create_optimizer(w, lr=1e-3),
            "get_peft_model": lambda w, m: hfscale.get_peft_model(w, LoraConfig()),
            "merge_and_unload": lambda w, m: hfscale.merge_and_unload(w),
            "coverage_report": lambda w, m: hfscale.coverage_report(w),
            "expert_load": lambda w, m: hfscale.expert_load(w),
            "drain": lambda w, m: list(hfscale.drain(w)),
            "preempted": lambda w, m: hfscale.preempted(w),
            "watchdog": lambda w, m: hfscale.watchdog(w),
            "verify_experts": lambda w, m: hfscale.verify_experts(w, m.path),
            "memory_estimate": lambda w, m: hfscale.memory_estimate(w, tokens=128),
            "record_schedule": lambda w, m: _within(hfscale.record_schedule(w, m.folder / "trace.json")),
        }.items()
        for what, w in {
            "None": lambda m: None,
            "a string": lambda m: m.path,
            "a stock model": lambda m: m.stock(),
        }.items()
        if (name, what) not in {("memory_estimate", "a stock model")}
    },
    "clip of a config": lambda m: hfscale.clip_grad_norm_(m.config, 1.0),
    # clipping
    **{
        f"clip_grad_norm_: max_norm {name}": (lambda m, v=v: hfscale.clip_grad_norm_(m.model, v))
        for name, v in NUMBERS.items()
        if name != "inf"
    },
    **{
        f"clip_grad_norm_: norm_type {name}": (lambda m, v=v: hfscale.clip_grad_norm_(m.model, 1.0, v))
        for name, v in {**NUMBERS, "0": 0, "'inf'": "inf", "-inf": -INF}.items()
        if name not in ("inf", "'inf'", "a string")
    },
    # optimizers
    "create_optimizer: name None": lambda m: hfscale.create_optimizer(m.model, None, lr=1e-3),
    "create_optimizer: misspelt": lambda m: hfscale.create_optimizer(m.model, "adamw_torhc", lr=1e-3),
    "create_optimizer: a class": lambda m: hfscale.create_optimizer(m.model, torch.optim.AdamW, lr=1e-3),
    **{
        f"create_optimizer: lr {name}": (lambda m, v=v: hfscale.create_optimizer(m.model, lr=v))
        for name, v in NUMBERS.items()
    },
    **{
        f"create_optimizer: weight_decay {name}": (
            lambda m, v=v: hfscale.create_optimizer(m.model, lr=1e-3, weight_decay=v)
        )
        for name, v in NUMBERS.items()
    },
    **{
        f"create_optimizer: eps {name}": (lambda m, v=v: hfscale.create_optimizer(m.model, lr=1e-3, eps=v))
        for name, v in NUMBERS.items()
        if name != "None"
    },
    "create_optimizer: betas one": lambda m: hfscale.create_optimizer(m.model, lr=1e-3, betas=(0.9,)),
    "create_optimizer: betas three": lambda m: hfscale.create_optimizer(m.model, lr=1e-3, betas=(0.9, 0.9, 0.9)),
    "create_optimizer: betas nan": lambda m: hfscale.create_optimizer(m.model, lr=1e-3, betas=(0.9, NAN)),
    "create_optimizer: betas 2": lambda m: hfscale.create_optimizer(m.model, lr=1e-3, betas=(0.9, 2.0)),
    "create_optimizer: betas str": lambda m: hfscale.create_optimizer(m.model, lr=1e-3, betas="0.9"),
    "create_optimizer: betas True": lambda m: hfscale.create_optimizer(m.model, lr=1e-3, betas=(True, 0.9)),
    "create_optimizer: unknown option": lambda m: hfscale.create_optimizer(m.model, lr=1e-3, colour=3),
    "create_optimizer: optim_args str": lambda m: hfscale.create_optimizer(m.model, lr=1e-3, optim_args="colour"),
    "create_optimizer: optim_args int": lambda m: hfscale.create_optimizer(m.model, lr=1e-3, optim_args=3),
    "create_optimizer: groups int": lambda m: hfscale.create_optimizer(m.model, lr=1e-3, groups=3),
    "create_optimizer: groups []": lambda m: hfscale.create_optimizer(m.model, lr=1e-3, groups=[]),
    "create_optimizer: groups of strings": lambda m: hfscale.create_optimizer(m.model, lr=1e-3, groups=["a"]),
    "create_optimizer: groups of a stranger": lambda m: hfscale.create_optimizer(
        m.model, lr=1e-3, groups=[{"params": [torch.nn.Parameter(torch.ones(2))]}]
    ),
    "create_optimizer: groups with lr str": lambda m: hfscale.create_optimizer(
        m.model, lr=1e-3, groups=[{"params": list(m.model.parameters()), "lr": "fast"}]
    ),
    "create_optimizer: groups with lr -1": lambda m: hfscale.create_optimizer(
        m.model, lr=1e-3, groups=[{"params": list(m.model.parameters()), "lr": -1.0}]
    ),
    "create_optimizer: twice the same parameter": lambda m: hfscale.create_optimizer(
        m.model, lr=1e-3, groups=[{"params": list(m.model.parameters())}, {"params": list(m.model.parameters())[:1]}]
    ),
    "create_optimizer: rounding_seed": lambda m: hfscale.create_optimizer(m.model, lr=1e-3, rounding_seed=-1),
    "create_optimizer: stochastic str": lambda m: hfscale.create_optimizer(m.model, lr=1e-3, stochastic_rounding="no"),
}


def _within(context: Any) -> None:
    with context:
        pass


def outcomes(layout: dict[str, Any], path: str, folder: str, names: list[str] | None = None) -> dict[str, str]:
    """What every call does on this rank: the words of its error, or what it returned."""
    everything = made(layout, path, folder)
    return {name: outcome(CALLS[name], everything) for name in names or CALLS}


def outcome(call: Call, m: Made) -> str:
    """``refused: words``, ``raw: kind: words`` or ``taken: value``."""
    try:
        value = call(m)
    except HFScaleError as error:
        return f"refused: {error}"
    except Exception as error:  # whatever it is
        return f"raw: {type(error).__name__}: {error}"
    return f"taken: {str(value)[:100]}"
