"""One random script."""

import json
from random import Random
from typing import Any

from .data import CLASSIFIERS, MIXTURES
from .draw import Draw
from .wider import widen

_DATA = ({"dp_shard_size": 2}, {"dp_replicate_size": 2})
_STAGES: tuple[dict[str, Any], ...] = (
    {},
    {"num_microbatches": 2},
    {"num_microbatches": 4},
    {"num_microbatches": 4, "pipeline_schedule": "gpipe"},
    {"num_microbatches": 4, "pipeline_schedule": "zbv", "virtual_stages": 2},
    {"num_microbatches": 4, "pipeline_schedule": "interleaved1f1b", "virtual_stages": 2},
)
_OPTIMIZERS = (
    "adamw_torch",
    "adamw_torch_fused",
    "sgd",
    "adafactor",
    "adamw_8bit",
    "rmsprop",
    "adagrad",
    "adamw_bnb_8bit",
)
_SCHEDULES = (
    "linear",
    "cosine",
    "constant_with_warmup",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
    "constant",
    "cosine_with_min_lr",
    "warmup_stable_decay",
    "reduce_lr_on_plateau",
)
_LOSSES = (
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "sigmoid_norm",
)
_DIVERGENT = {"discopop", "exo_pair", "hinge", "ipo", "robust", "sft", "sigmoid", "sigmoid_norm"}
_BY_BATCH = ("aot", "aot_unpaired", "sft")
"""Losses that are more than a mean over rows, so that two halves of a batch are not the whole."""


def choose(seed: int, index: int) -> Draw:
    """Everything follows from the two numbers."""
    random = Random(f"{seed}/{index}")
    trainer = random.choices(tuple(_TRAINERS), (46, 20, 16, 4, 4, 7, 3))[0]
    model = _model(random, trainer)
    layout = _layout(random, model)
    draw: dict[str, Any] = {
        "trainer": trainer,
        "model": model,
        "layout": layout,
        "seed": random.randrange(1000),
    }
    draw["adapter"] = random.choices(("", "lora", "qlora"), (70, 20, 10))[0]
    if model in (*MIXTURES, *CLASSIFIERS) or trainer not in ("Trainer", "SFTTrainer", "DPOTrainer"):
        draw["adapter"] = ""
    if draw["adapter"] == "qlora":
        draw["model"] = "wide"
    layout = draw["layout"] = _of_scores(trainer, layout)
    arguments = _arguments(random, draw["adapter"])
    _TRAINERS[trainer](random, draw, arguments)
    batches = layout.get("dp_shard_size", 1) * layout.get("dp_replicate_size", 1)
    draw["batch"] = random.choice((2, 4, 4, 6)) if "num_microbatches" not in layout else 4 * batches
    spread = layout.get("pp_size", 1) > 1 or batches > 1
    if trainer != "Trainer" and model in MIXTURES and spread:  # a router's loss is a batch's
        arguments["router_aux_loss_coef"] = 0.0
        draw["model"] = "mixture"
    # A loss of rows that data ranks repeat, too
    if draw.get("loss") or trainer in ("DPOTrainer", "KTOTrainer", "RewardTrainer"):
        draw["rows"], draw["evaluated"] = 24, 12
    if (
        random.random() < 0.3
        and draw["source"] != "stream"
        and trainer not in ("GRPOTrainer", "RLOOTrainer")
    ):
        _resume(random, draw, arguments)
    draw.setdefault("metrics", "")
    widen(random, draw, arguments)
    if trainer != "Trainer" and layout.get("pp_size", 1) > 1:
        _whole_batches(random, layout, arguments)
    draw["arguments"] = arguments
    return Draw(**draw)


def _of_scores(trainer: str, layout: dict[str, Any]) -> dict[str, Any]:
    """A layout for losses of TRL's."""
    # Generates by itself, which data ranks do with numbers of their own.
    if trainer == "RLOOTrainer":
        return {"tp_size": 2}
    if layout.get("pp_size", 1) == 1 or trainer == "Trainer":
        return layout
    left_out = ["num_microbatches"]  # as many as batches are accumulated
    if trainer in ("RewardTrainer", "GRPOTrainer"):  # which refuse stages
        left_out += ["pp_size", "pipeline_schedule", "virtual_stages"]
        layout = {"tp_size": 2, **layout}
    return {name: value for name, value in layout.items() if name not in left_out}


def _whole_batches(random: Random, layout: dict[str, Any], arguments: dict[str, Any]) -> None:
    """A loss of TRL's has a microbatch for each batch that is accumulated: mostly as many as stages need."""
    if random.random() < 0.9:
        arguments["gradient_accumulation_steps"] = 4


def _model(random: Random, trainer: str) -> str:
    if trainer == "RewardTrainer":
        return "regression"
    # GPT-2's positions count what pads prompts on the left.
    if trainer in (
        "GRPOTrainer",
        "RLOOTrainer",
    ):
        return random.choice(("llama", "tied"))
    names = ["llama", "tied", "gpt2", "mixture", "balanced"]
    if trainer == "Trainer":
        names += CLASSIFIERS
    return random.choices(names, [6, 2, 2, 2, 1, 1, 1][: len(names)])[0]


def _layout(random: Random, model: str) -> dict[str, Any]:
    kind = random.choices(
        ("tp", "sp", "pp", "cp", "dp", "ep", "tpdp", "ppdp", "pptp"), (20, 6, 28, 7, 16, 9, 6, 4, 4)
    )[0]
    if kind == "ep":
        return {"ep_size": 2, "dp_shard_size": 2} if model in MIXTURES else random.choice(_DATA)
    stages = {"pp_size": 2, **random.choice(_STAGES)}
    return {
        "tp": {"tp_size": 2},
        "sp": {"tp_size": 2, "sequence_parallel": True},
        "pp": stages,
        "cp": {"cp_size": 2},
        "dp": random.choice(_DATA),
        "tpdp": {"tp_size": 2, **random.choice(_DATA)},
        "ppdp": {**stages, **random.choice(_DATA)},
        "pptp": {**stages, "tp_size": 2},
    }[kind]


def _arguments(random: Random, adapter: str) -> dict[str, Any]:
    """What all trainers take."""
    chosen: dict[str, Any] = {
        "gradient_accumulation_steps": random.choice((1, 2, 2, 4)),
        "max_grad_norm": random.choice((1.0, 0.3, 0.0)),
        "weight_decay": random.choice((0.0, 0.1)),
        "lr_scheduler_type": random.choice(_SCHEDULES),
        "warmup_steps": random.choice((0, 0, 2)),
        "optim": random.choice(_OPTIMIZERS) if random.random() < 0.5 else "adamw_torch",
        "gradient_checkpointing": random.random() < 0.25,
    }
    if chosen["lr_scheduler_type"] == "cosine_with_min_lr":
        chosen["lr_scheduler_kwargs"] = {"min_lr": 1e-3}
    if chosen["lr_scheduler_type"] == "warmup_stable_decay":
        chosen["lr_scheduler_kwargs"] = {"num_decay_steps": 2}
    if random.random() < 0.5:
        chosen["max_steps"] = random.choice((3, 4, 5, 6))
    else:
        chosen["num_train_epochs"] = random.choice((1, 2, 1.5))
    if random.random() < 0.7 or chosen["lr_scheduler_type"] == "reduce_lr_on_plateau":
        chosen |= {"eval_strategy": "steps", "eval_steps": random.choice((1, 2))}
        if random.random() < 0.2:
            chosen = {**chosen, "eval_strategy": "epoch", "eval_steps": None}
    rare: list[dict[str, Any]] = [
        {"dataloader_drop_last": True},
        {"logging_first_step": True, "logging_steps": 2},
        {"eval_on_start": True},
        {"include_num_input_tokens_seen": "non_padding"},
        {"include_num_input_tokens_seen": "all"},
        {"eval_accumulation_steps": 1},
        {"bf16": True},
        {"seed": 7},
        {"data_seed": 11},
        {"torch_empty_cache_steps": 1},
        {"skip_memory_metrics": False},
        {"accelerator_config": {"use_seedable_sampler": False}},
        {"logging_nan_inf_filter": False},
        {"logging_strategy": "epoch"},
        {"dataloader_num_workers": 1},
    ]
    for more in random.sample(rare, 2):
        if random.random() < 0.6:
            chosen |= more
    if adapter == "qlora" or chosen.get("bf16"):
        chosen["bf16"] = chosen.get("bf16", False)
    return chosen


def _plain(random: Random, draw: dict[str, Any], arguments: dict[str, Any]) -> None:
    draw["rows"], draw["evaluated"] = random.choice((16, 19, 22, 24)), random.choice((7, 8, 11))
    classifies = draw["model"] in CLASSIFIERS
    draw["data"] = random.choice(("masked", "masked", "plain"))
    if classifies:
        draw["data"] = {"classifier": "class", "regression": "number"}[draw["model"]]
    draw["source"] = random.choices(("torch", "datasets", "stream"), (6, 2, 1))[0]
    if draw["source"] == "stream":
        arguments["max_steps"] = arguments.get("max_steps", 4)
        arguments.pop("group_by_length", None)
    elif random.random() < 0.2:
        arguments["train_sampling_strategy"] = "group_by_length"
    elif random.random() < 0.1:
        arguments["train_sampling_strategy"] = "sequential"
    if not classifies and random.random() < 0.25:
        plain = ("DataCollatorForLanguageModeling", "DataCollatorWithPadding")
        draw["collator"] = plain[0] if draw["data"] == "plain" else "DataCollatorForSeq2Seq"
        if random.random() < 0.3:
            draw["collator"] = "DataCollatorWithFlattening"
    if not classifies and random.random() < 0.2:
        arguments["label_smoothing_factor"] = 0.1
    if not classifies:
        draw["loss"] = random.choices(("", "own", "function"), (84, 8, 8))[0]
        if draw["loss"] == "own" and draw.get("collator") == "DataCollatorWithFlattening":
            draw["loss"] = ""  # a batch is one row then, whose mean is not that of two ranks' means
    draw["late"] = random.random() < 0.1
    _looks(random, draw, arguments)
    if random.random() < 0.12:
        draw["stops"] = random.choice((2, 3))
    _best(random, draw, arguments)


def _best(random: Random, draw: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Whether the best model is loaded at the end."""
    if "eval_steps" in arguments and arguments["eval_steps"] and random.random() < 0.25:
        # So high that the last model may not be the best; an adaptive update does not shrink with its gradient.
        rate = 0.1 if arguments.get("optim") == "sgd" else 0.005
        arguments |= {
            "load_best_model_at_end": True,
            "save_strategy": "steps",
            "learning_rate": rate,
        }
        arguments["save_steps"] = arguments["eval_steps"]
        if random.random() < 0.4:
            draw["stops"] = -1
        if random.random() < 0.4:
            arguments["save_total_limit"] = 1


def _looks(random: Random, draw: dict[str, Any], arguments: dict[str, Any]) -> None:
    """What is asked of logits."""
    classifies = draw["model"] in CLASSIFIERS
    draw["metrics"] = random.choice(("", "", "logits", "chosen", "batches"))
    draw["predicts"] = (
        random.random() < 0.3 and draw.get("collator") != "DataCollatorWithFlattening"
    )
    if classifies:  # whose microbatches count alike, also where they have fewer rows
        draw["rows"] = 24
        draw["metrics"] = draw["metrics"].replace("chosen", "logits")
    if draw["model"] == "balanced":  # whose predictions are logits and those of routers
        draw["predicts"], draw["metrics"] = False, ""
        arguments["gradient_accumulation_steps"] = 1  # or its loss would count once for each
    if draw["metrics"] == "batches":  # of which predictions are those of the last one
        arguments["batch_eval_metrics"] = True
        draw["predicts"] = False


def _sft(random: Random, draw: dict[str, Any], arguments: dict[str, Any]) -> None:
    draw["rows"], draw["evaluated"], draw["source"] = random.choice((24, 24, 22)), 8, "datasets"
    draw["data"] = random.choice(("text", "completion", "chat"))
    arguments["loss_type"] = random.choice(("nll", "nll", "dft"))
    if random.random() < 0.35:
        arguments |= {
            "packing": True,
            "max_length": 16,
            "packing_strategy": random.choice(("bfd", "wrapped")),
        }
    elif random.random() < 0.2:
        arguments |= {"padding_free": True, "max_length": None}
    elif random.random() < 0.3:
        arguments["max_length"] = 8
    if draw["data"] == "chat" and random.random() < 0.6:
        arguments["assistant_only_loss"] = True
    if draw["data"] == "completion" and random.random() < 0.4:
        arguments["completion_only_loss"] = False
    if random.random() < 0.2:
        arguments["train_sampling_strategy"] = "group_by_length"
    arguments.setdefault("bf16", False)


def _dpo(random: Random, draw: dict[str, Any], arguments: dict[str, Any]) -> None:
    draw["rows"], draw["evaluated"], draw["source"], draw["data"] = 24, 8, "datasets", "pair"
    losses = random.sample(_LOSSES, random.choice((1, 1, 2)))
    if any("dp_" in name for name in draw["layout"]):
        losses = [name for name in losses if name not in _BY_BATCH] or ["sigmoid"]
    arguments |= {"loss_type": losses, "beta": random.choice((0.1, 0.5))}
    if len(losses) > 1:
        arguments["loss_weights"] = [1.0, 0.5]
    if {"robust", "exo_pair", "aot"} & set(losses):
        arguments["label_smoothing"] = 0.1
    for more in (
        {"precompute_ref_log_probs": True},
        {"use_weighting": True} if not {"aot", "aot_unpaired", "hinge"} & set(losses) else {},
        {"ld_alpha": 0.5},
        {"f_divergence_type": random.choice(("forward_kl", "js_divergence"))}
        if set(losses) <= _DIVERGENT
        else {},
        {"max_length": 10},
        {"sync_ref_model": True, "ref_model_sync_steps": 2},
    ):
        if random.random() < 0.15:
            arguments |= more
    arguments.setdefault("bf16", False)


def _kto(random: Random, draw: dict[str, Any], arguments: dict[str, Any]) -> None:
    draw["rows"], draw["evaluated"], draw["source"], draw["data"] = 24, 8, "datasets", "label"
    arguments |= {"loss_type": random.choice(("kto", "apo_zero_unpaired")), "bf16": False}


def _reward(random: Random, draw: dict[str, Any], arguments: dict[str, Any]) -> None:
    draw["rows"], draw["evaluated"], draw["source"], draw["data"] = 24, 8, "datasets", "pair"
    arguments["bf16"] = False


def _policy(random: Random, draw: dict[str, Any], arguments: dict[str, Any]) -> None:
    """GRPO and RLOO, with the same completions everywhere."""
    draw["rows"], draw["evaluated"], draw["source"], draw["data"] = 24, 8, "datasets", "prompt"
    given = {
        "num_generations": 2,
        "max_completion_length": 6,
        "beta": 0.1,
        "bf16": False,
        "remove_unused_columns": False,
    }
    arguments |= {**given, "learning_rate": 0.05, "optim": "sgd", "eval_strategy": "no"}
    arguments |= {"max_steps": 4, "gradient_accumulation_steps": random.choice((1, 2))}
    for name in (
        "eval_steps",
        "eval_on_start",
        "eval_accumulation_steps",
        "train_sampling_strategy",
    ):
        arguments.pop(name, None)
    if arguments["lr_scheduler_type"] == "reduce_lr_on_plateau":
        arguments["lr_scheduler_type"] = "linear"


def _resume(random: Random, draw: dict[str, Any], arguments: dict[str, Any]) -> None:
    draw["resume"] = random.choice(
        ("stock", json.dumps(draw["layout"]), json.dumps(_layout(random, draw["model"])))
    )
    arguments |= {"save_strategy": "steps", "save_steps": 2, "max_steps": random.choice((4, 5, 6))}
    for name in ("num_train_epochs", "save_total_limit", "load_best_model_at_end"):
        arguments.pop(name, None)
    draw["stops"] = 0
    if draw["model"] in MIXTURES and "use_seedable_sampler" in str(
        arguments.get("accelerator_config")
    ):
        # Stock code draws another order, and is no yardstick for them otherwise.
        arguments.pop("accelerator_config")
    if draw["trainer"] != "Trainer":  # TRL's means since the last row are lost
        arguments |= {"logging_steps": 1, "logging_strategy": "steps"}
        arguments.pop("logging_first_step", None)


_TRAINERS = {
    "Trainer": _plain,
    "SFTTrainer": _sft,
    "DPOTrainer": _dpo,
    "KTOTrainer": _kto,
    "RewardTrainer": _reward,
    "GRPOTrainer": _policy,
    "RLOOTrainer": _policy,
}
