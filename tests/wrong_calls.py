"""Wrong calls of hfscale's public names, each to be refused in words on every rank, before anything is changed."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig

import hfscale
from hfscale import Float8Config, MemoryConfig, ParallelConfig, RoutingConfig
from hfscale.errors import HFScaleError

from .tiny_models import tiny
from .wrong_batches import BATCHES, Call, Made, batch, with_options, with_values

NAN, INF = float("nan"), float("inf")
MISSING = "/nowhere/at/all"
NUMBERS = [None, NAN, -1, "1.0", [1.0], True]  # where a positive number is meant
COUNTS = [None, NAN, 0, -1, 1.5, "4", True]  # where a whole number of at least 1 is


def _within(context: AbstractContextManager[Any]) -> None:
    with context:
        pass


def _loss(outputs: Any, _: Any) -> Any:
    return outputs.logits.float().sum(), 4


def _score(scores: Any, _: int) -> Any:
    return scores.log_probs.sum()


_FEW = (
    "None",
    "a tensor",
    "float ids",
    "ids on meta",
    "zero tokens",
    "mask of fewer rows",
    "ids out of range",
)

# Through every layout; what fails on one rank alone is here.
STEPS: dict[str, Call] = {
    **{
        f"train_step: {name}": lambda m, f=f: hfscale.train_step(m.model, f())
        for name, f in BATCHES.items()
    },
    **{
        f"eval_step: {name}": lambda m, f=BATCHES[name]: hfscale.eval_step(m.model, f())
        for name in _FEW
    },
    **{
        f"token_scores: {name}": lambda m, f=BATCHES[name]: hfscale.token_scores(m.model, f())
        for name in _FEW
    },
    **{
        f"loss_fn: {name}": lambda m, f=BATCHES[name]: hfscale.train_step(m.model, f(), _loss)
        for name in _FEW
    },
    **with_values(
        "num_items_in_batch",
        lambda m, v: hfscale.train_step(m.model, batch(), num_items_in_batch=v),
        [*NUMBERS, -5, 0, INF, [], [1, 2, 3], torch.ones(2)],
        leave_out=[None, [1.0]],
    ),
    **with_values(
        "label_smoothing",
        lambda m, v: hfscale.train_step(m.model, batch(), label_smoothing=v),
        [*NUMBERS, 2.0],
    ),
    **with_values(
        "temperature",
        lambda m, v: hfscale.token_scores(m.model, batch(), temperature=v),
        [*NUMBERS, 0.0],
    ),
    "temperature alone": lambda m: hfscale.train_step(m.model, batch(), temperature=0.5),
    "return_outputs": lambda m: hfscale.eval_step(m.model, batch(), return_outputs="yes"),
    **with_values(
        "loss_fn returns",
        lambda m, v: hfscale.train_step(m.model, batch(), lambda o, b: (o.logits.float().sum(), v)),
        [None, -4, NAN, "4", torch.ones(3)],
    ),
    **with_values("loss_fn", lambda m, v: hfscale.train_step(m.model, batch(), v), [3, "mse", len]),
    "loss_fn returns None": lambda m: hfscale.train_step(m.model, batch(), lambda o, b: None),
    "loss_fn returns a sum": lambda m: hfscale.train_step(
        m.model, batch(), lambda o, b: o.logits.sum()
    ),
    "loss_fn: detached": lambda m: hfscale.train_step(
        m.model, batch(), lambda o, b: (o.logits.detach().sum(), 4)
    ),
    "loss_fn: a float": lambda m: hfscale.train_step(m.model, batch(), lambda o, b: (3.0, 4)),
    "loss_fn: a vector": lambda m: hfscale.train_step(
        m.model, batch(), lambda o, b: (o.logits.sum(-1), 4)
    ),
    "loss_fn, smoothed": lambda m: hfscale.train_step(m.model, batch(), _loss, label_smoothing=0.1),
    "loss_fn, divided": lambda m: hfscale.eval_step(m.model, batch(), _loss, num_items_in_batch=3),
    "score_loss": lambda m: hfscale.train_step(m.model, [batch()] * 2, score_loss=3),
    "score_loss: None": lambda m: hfscale.train_step(
        m.model, [batch()] * 2, score_loss=lambda s, i: None
    ),
    "score_loss: a vector": lambda m: hfscale.train_step(
        m.model, [batch()] * 2, score_loss=lambda s, i: s.log_probs
    ),
    "score_loss: detached": lambda m: hfscale.train_step(
        m.model, [batch()] * 2, score_loss=lambda s, i: _score(s, i).detach()
    ),
    "score_loss, divided": lambda m: hfscale.train_step(
        m.model, [batch()] * 2, score_loss=_score, num_items_in_batch=4
    ),
    **with_values("max_norm", lambda m, v: hfscale.clip_grad_norm_(m.model, v), NUMBERS),
    **with_values(
        "norm_type", lambda m, v: hfscale.clip_grad_norm_(m.model, 1.0, v), [*NUMBERS, 0, -INF]
    ),
    **with_options(
        "create_optimizer",
        lambda m, v: hfscale.create_optimizer(m.model, **{"lr": 1e-3, **v}),
        name=[None, "adamw_torhc"],
        lr=[*NUMBERS, INF],
        weight_decay=[*NUMBERS, INF],
        eps=[NAN, -1, INF, "1e-8"],
        betas=[(0.9,), (0.9, 0.9, 0.9), (0.9, NAN), (0.9, 2.0), "0.9", (True, 0.9)],
        colour=[3],
        optim_args=["colour", 3],
        groups=[3, [], ["a"], [{"params": [torch.nn.Parameter(torch.ones(2))]}]],
        rounding_seed=[-1],
        stochastic_rounding=["no"],
    ),
    **with_values(
        "lr of a group",
        lambda m, v: hfscale.create_optimizer(
            m.model, lr=1.0, groups=[{"params": [*m.model.parameters()], "lr": v}]
        ),
        ["fast", -1.0],
    ),
    **with_options(
        "stream_weights",
        lambda m, v: [*hfscale.stream_weights(m.model, **v)],
        ranks=[0, [], [9], None, ["0"]],
        adapters_only=[True, 1],
        version=[-1, 1.5, "1"],
        staged=["no"],
        changed_since=[3],
    ),
    **with_values("preempted", lambda m, v: hfscale.preempted(m.model, patience=v), NUMBERS),
    **with_values("watchdog", lambda m, v: hfscale.watchdog(m.model, patience=v), NUMBERS),
    **with_values(
        "fitting_layout", lambda m, v: hfscale.fitting_layout(v), [None, 3, [], [3], "x"]
    ),
    **with_values(
        "record_schedule", lambda m, v: _within(hfscale.record_schedule(m.model, v)), [None, 3, ""]
    ),
}

_MODELS: dict[str, Callable[[Any, Made], Any]] = {
    "train_step": lambda w, m: hfscale.train_step(w, batch()),
    "eval_step": lambda w, m: hfscale.eval_step(w, batch()),
    "token_scores": lambda w, m: hfscale.token_scores(w, batch()),
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
}

_CONFIG = {
    "num_hidden_layers": [10**9, -1, 0],
    "hidden_size": [10**12],
    "vocab_size": [10**12, -3],
    "intermediate_size": [-5],
    "num_key_value_heads": [0],
    "head_dim": [0, -8],
    "hidden_act": ["swish9"],
}

# What is made, and what is said of it: the same in every layout.
MAKING: dict[str, Call] = {
    **{
        f"{name} of {what}": lambda m, f=f, w=w: f(w(m), m)
        for name, f in _MODELS.items()
        for what, w in {
            "None": lambda m: None,
            "a path": lambda m: m.path,
            "a stock model": Made.stock,
        }.items()
        if name in ("train_step", "batch_rank") or what != "a stock model"
    },
    **with_values(
        "from_pretrained",
        lambda m, v: hfscale.from_pretrained(v, parallel=m.layout),
        [None, 3, "", MISSING, "./nowhere", "nowhere.json", ["a"], tiny("llama")],
    ),
    "from_pretrained of a file": lambda m: hfscale.from_pretrained(
        f"{m.path}/config.json", parallel=m.layout
    ),
    **with_options(
        "from_pretrained",
        lambda m, v: hfscale.from_pretrained(m.path, **{"parallel": m.layout, **v}),
        parallel=[2, "tp2"],
        auto_class=[None, "AutoModelForCausalML", 3, torch.nn.Linear],
        mixed_precision=[None, "fp61", True, torch.bfloat16, ["bf16"]],
        routing=["switch"],
        memory=["full"],
        loss_scaling=[5],
        float8=["rowwise", Float8Config()],
        use_liger_kernel=["yes", 1, {"rope": 1}],
        peft_config=[3, MISSING, {}],
        resize_token_embeddings=[-1, 0, 1.5, "70", True, 10**12],
        seed=[-1, "a", None, 1.5, True],
        dtype=["float33", "bf16", 32, torch.int64, float],
        attn_implementation=["flesh", 3],
        quantization_config=[3, "nf4"],
        tp_sise=[2],
        trust_remote_code=["maybe"],
        state_dict=[{}],
        config=[3],
        subfolder=["nowhere"],
    ),
    **with_values(
        "from_config",
        lambda m, v: hfscale.from_config(v, parallel=m.layout),
        [None, MISSING, {}, 3],
    ),
    **with_options(
        "from_config",
        lambda m, v: hfscale.from_config(m.config, **{"parallel": m.layout, **v}),
        auto_class=[None, torch.nn.Linear],
        seed=[-1, "a", None],
        dtype=["float33", torch.int64],
        quantization_config=[BitsAndBytesConfig(load_in_4bit=True)],
        resize_token_embeddings=[70],
        routing=[RoutingConfig()],
        memory=[MemoryConfig(recompute=100)],
    ),
    **with_options(
        "config", lambda m, v: hfscale.from_config(tiny("llama", **v), parallel=m.layout), **_CONFIG
    ),
    **with_options("plan", lambda m, v: hfscale.plan(tiny("llama", **v), m.layout), **_CONFIG),
    "estimate of 10^9 layers": lambda m: hfscale.estimate(
        tiny("llama", num_hidden_layers=10**9), m.layout
    ),
    **with_values(
        "parallelize", lambda m, v: hfscale.parallelize(v, m.layout), [None, MISSING, tiny("llama")]
    ),
    "parallelize a layer": lambda m: hfscale.parallelize(torch.nn.Linear(4, 4), m.layout),
    "parallelize twice": lambda m: hfscale.parallelize(m.model, m.layout),
    "parallelize other weights": lambda m: hfscale.parallelize(m.seeded(), m.layout),
    "parallelize on meta": lambda m: hfscale.parallelize(m.stock().to("meta"), m.layout),
    **with_values("plan", lambda m, v: hfscale.plan(v, m.layout), [None, 3, MISSING, {}, ""]),
    **with_values("estimate", lambda m, v: hfscale.estimate(v, m.layout), [None, 3, MISSING]),
    **with_options(
        "estimate",
        lambda m, v: hfscale.estimate(m.config, m.layout, **v),
        hardware=["h9000", None, 3],
        sequence_length=COUNTS,
        batch_size=COUNTS,
        num_microbatches=[0, "x"],
        optimizer=["adamm", None],
        optim_args=[3],
        mixed_precision=["x", None],
        colour=[3],
    ),
    **with_options(
        "memory_estimate",
        lambda m, v: hfscale.memory_estimate(m.model, **{"tokens": 64, **v}),
        optimizer=["adamm", None],
        tokens=COUNTS,
        num_microbatches=[0, "x"],
        gradient_checkpointing=["x"],
        mixed_precision=["x"],
        optim_args=[3],
    ),
    **with_options(
        "ParallelConfig",
        lambda m, v: ParallelConfig(**v),
        tp_size=[0, -2, 1.5, "x", True, NAN, [2]],
        tp=[2],
        tensor_parallel_size=[2],
        world_size=[2],
        pipeline_schedule=["1f2b", 3],
        cp_method=["rings"],
        stage_layers=["a,b", 3],
        num_microbatches=[0, "four"],
        gradient_compression=["zip"],
        powersgd_rank=[4, "4"],
    ),
    "powersgd_rank": lambda m: ParallelConfig(
        dp_replicate_size=2, gradient_compression="powersgd", powersgd_rank="4"
    ),
    **with_options(
        "MemoryConfig",
        lambda m, v: MemoryConfig(**v),
        recompute=[None, True, 0, -1, 1.5, "ful", "0GiB", "0", "-1GiB", [], [""], [3], {}],
        tokens=[4],
        recompute_keep=["aten.mm", ["aten.mm"]],
        offload_activations=["0GiB", 3, None, "big"],
        compress_activations=["0", 1],
        offload_parameters=["yes", None],
        offload=[True],
    ),
    **with_values("tokens", lambda m, v: MemoryConfig(recompute="1GiB", tokens=v), COUNTS[1:]),
    **with_options(
        "RoutingConfig",
        lambda m, v: RoutingConfig(**v),
        router=["x", None, 3],
        capacity_factor=[0, -1, NAN, "1", True],
        balance_loss=[*NUMBERS, INF],
        z_loss=[NAN],
        noise_std=[1.0],
        force_balanced=["x", 1],
    ),
    **with_options(
        "Float8Config",
        lambda m, v: Float8Config(**v),
        recipe=["x", None, 3],
        leave_out=["x", None, [3]],
        fp8_all_gather=["x", 1, 0],
    ),
    **with_values("BadSteps", lambda m, v: hfscale.BadSteps(v), COUNTS),
    **with_values("get_peft_model", lambda m, v: hfscale.get_peft_model(m.model, v), [None, 3, {}]),
    **with_options(
        "get_peft_model",
        lambda m, v: hfscale.get_peft_model(m.model, LoraConfig(target_modules=["q_proj"]), **v),
        adapter_name=[3, ""],
        seed=["x", -1],
    ),
    "get_peft_model: targets": lambda m: hfscale.get_peft_model(
        m.model, LoraConfig(target_modules=["colour"])
    ),
    "merge_and_unload": lambda m: hfscale.merge_and_unload(m.model),
    "verify_experts": lambda m: hfscale.verify_experts(m.model, None),
    "coverage_report": lambda m: hfscale.coverage_report(m.model),
    "expert_load": lambda m: hfscale.expert_load(m.model),
    **with_values("upcycle", lambda m, v: hfscale.upcycle(v), [None, 3, MISSING, ""]),
    **with_options(
        "upcycle",
        lambda m, v: hfscale.upcycle(m.path, **v),
        num_experts=COUNTS,
        top_k=[0, 9, 1.5],
        every=[0, "x"],
        noise=[-1, NAN, "x"],
        reinitialize=[2, NAN, "x"],
        seed=[-1, "x"],
        directory=[3],
    ),
}


def outcomes(
    calls: str, layout: dict[str, Any], path: str, folder: str
) -> tuple[dict[str, str], list[float]]:
    """What every call of a list does on this rank, and the loss of a right batch before and after all of them."""
    parallel = ParallelConfig(**layout)
    made = Made(
        parallel, hfscale.from_pretrained(path, parallel=parallel).train(), path, Path(folder)
    )
    before = hfscale.eval_step(made.model, batch()).item()
    found = {name: outcome(call, made) for name, call in globals()[calls].items()}
    return found, [before, hfscale.eval_step(made.model, batch()).item()]


def outcome(call: Call, made: Made) -> str:
    """``refused``, or what was returned or raised instead."""
    try:
        value = call(made)
    except HFScaleError:
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return f"taken: {value}"[:100]
