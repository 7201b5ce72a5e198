"""Random runs that are killed and go on in another layout, beside one process that nothing interrupted.

A draw is twelve steps: six, a save, some more until ranks are killed, between two steps or while the next save is
written; then the rest in a second layout, from whatever whole state is found. Losses, norms and weights must be those
of one process, and no state that a save had reported may be lost.

Half of the draws with a lever that rounds or scales numbers (fp8, fp16, 8-bit activations, compressed gradients,
rounding by chance) go on in the same layout, bit by bit as if nothing had come between: states of loss scales, errors
of factors and seeds are theirs. In another layout fp8 and fp16 in float64 are those of one process. What a layout
rounds in other places is off by four times, at most, what the same run that nothing interrupted is off from one
process without levers.
"""

import json
import os
import signal
import threading
import warnings
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import torch

from hfscale.testing.pool import RankError, RankPool

from .lever_values import WIDE
from .resume_compared import differences, further_off, not_bit_by_bit
from .resume_levers import (
    Levers,
    are_exact,
    arithmetic_of,
    built_with,
    choose_levers,
    dtype_with,
    layout_with,
    planned_with,
    row_by_row,
)

STEPS = 12
SAVED = 6
ROWS = 8
TOKENS = 16
KINDS = ("dense", "tied", "lora", "8-bit", "mixture")
_OPTIMIZERS = {
    "dense": ("adamw_torch", "adafactor", "muon", "stock"),
    "tied": ("adamw_torch", "stock", "lion_32bit"),
    "8-bit": ("adamw_8bit", "ademamix_8bit"),
}
_SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "zbv")


@dataclass(frozen=True)
class ResumeDraw:
    """One run.

    Attributes:
        kind: one of :data:`KINDS`.
        optimizer: a name of :func:`hfscale.create_optimizer`, or ``stock`` for ``torch.optim.AdamW``.
        first: fields of the layout that is killed.
        second: of the one that goes on.
        behind: whether it saves behind the steps.
        while_saving: whether it is killed while it saves once more.
        seconds: from the sixth step, or the beginning of that save, to the kill.
        victims: the ranks that are killed.
        levers: that round or scale numbers, by name: see :data:`tests.fuzz.lever_values.LEVERS`.
    """

    kind: str
    optimizer: str
    first: dict[str, Any]
    second: dict[str, Any]
    behind: bool
    while_saving: bool
    seconds: float
    victims: tuple[int, ...]
    levers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def write(self) -> str:
        """As one line."""
        return json.dumps(asdict(self))


def choose_resume(seed: int, index: int) -> ResumeDraw:
    """Everything follows from the two numbers."""
    random = Random(f"{seed}/{index}")
    kind = KINDS[index % len(KINDS)]
    first = _layout(random, kind)
    second = _layout(random, kind)
    while _one(first) == _one(second):
        second = _layout(random, kind)
    world = _world(first)
    victims = tuple(range(world)) if random.random() < 0.5 else (random.randrange(world),)
    optimizer = random.choice(_OPTIMIZERS.get(kind, ("adamw_torch", "stock")))
    behind = random.random() < 0.5
    saving = random.random() < 0.6
    draw = ResumeDraw(
        kind, optimizer, first, second, behind, saving, random.uniform(0, 0.15), victims
    )
    return draw if kind == "8-bit" else _with_levers(Random(f"{seed}/{index}/levers"), draw)


def _with_levers(random: Random, draw: ResumeDraw) -> ResumeDraw:
    """The same draw with some of them, in layouts that they fit."""
    levers = choose_levers(random)
    if not levers:
        return draw

    def drawn(fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while not fits(layout := layout_with(levers, _layout(random, draw.kind, levers))):
            pass
        return layout

    first = drawn(
        lambda layout: "gradient_compression" not in levers or "gradient_compression" in layout
    )
    # Where a rounding sends a token to another expert, nothing but the same layout can be compared.
    same = random.random() < 0.5 or (draw.kind == "mixture" and not are_exact(levers))
    second = first if same else drawn(lambda layout: _one(layout) != _one(first))
    world = _world(first)
    victims = tuple(range(world)) if len(draw.victims) > 1 else (random.randrange(world),)
    optimizer = levers.get("stochastic_rounding", {}).get("optimizer", draw.optimizer)
    return replace(
        draw, first=first, second=second, victims=victims, levers=levers, optimizer=optimizer
    )


def judge_resume(draw: ResumeDraw, directory: Path, pools: dict[int, RankPool]) -> str:
    """What is wrong with a draw, in words; empty where nothing is."""
    reported = directory / "reported"
    try:
        _pool(pools, draw.first).run(leg, draw, draw.first, str(directory), 0)
    except RankError as error:
        if "the process died" not in str(error):
            return f"before the kill: {error}"
    else:
        return "nobody was killed"
    acknowledged = int(reported.read_text().split()[-1]) if reported.exists() else 0
    if acknowledged < SAVED:
        return f"killed before step {SAVED} was saved, by an error of the draw"
    try:
        found = _pool(pools, draw.second).run(leg, draw, draw.second, str(directory), 1)
    except RankError as error:
        return f"going on: {error}"
    lost = next((rank for rank, told in enumerate(found) if told["start"] < acknowledged), None)
    if lost is not None:
        return f"rank {lost} went on from step {found[lost]['start']}, and step {acknowledged} had been reported"
    return _compared(draw, found, pools)


def _compared(draw: ResumeDraw, found: list[dict[str, Any]], pools: dict[int, RankPool]) -> str:
    """With the run that nothing interrupted: in the same layout, in one process, or as far off as that is."""
    if draw.levers and (draw.second == draw.first or not are_exact(draw.levers)):
        whole = _pool(pools, draw.first).run(leg, draw, draw.first, None, 0)
        if draw.second == draw.first:
            return not_bit_by_bit(whole, found)
        skipped = [step for step, (_, skips) in enumerate(whole[0]["scales"]) if skips]
        exact = leg(replace(draw, levers={}), {}, None, 0, skipped)
        return further_off(exact, whole, found)
    return differences(draw.kind == "8-bit", leg(draw, {}, None, 0), found)


def leg(
    draw: ResumeDraw,
    layout: dict[str, Any],
    directory: str | None,
    number: int,
    skipped: Collection[int] = (),
) -> dict[str, Any]:
    """What one rank does; the first leg is killed, and the one without a directory goes through.

    Args:
        skipped: steps that change nothing, as if their gradients had overflowed.
    """
    import hfscale

    dtype = dtype_with(draw.levers) if draw.kind != "8-bit" else torch.float32
    with arithmetic_of(dtype), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _model(draw, layout, seed=number, dtype=dtype)
        optimizer = _optimizer(draw, model)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, total_iters=STEPS)
        start = 0
        if number:
            resumed = hfscale.load_state(
                model, f"{directory}/states", optimizer=optimizer, scheduler=scheduler
            )
            start = int(resumed.step or 0)
        done: dict[str, Any] = {"start": start, "losses": [], "norms": [], "scales": []}
        for step in range(start, STEPS):
            _step(draw, model, optimizer, scheduler, step, done, step in skipped)
            if directory is not None and not number and step + 1 == SAVED:
                _be_killed(draw, model, optimizer, scheduler, directory)
        done["weights"] = {
            name: tensor.clone() for name, tensor in hfscale.stream_weights(model, ranks="all")
        }
    return done


def _step(
    draw: ResumeDraw,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    step: int,
    done: dict[str, Any],
    skips: bool = False,
) -> None:
    import hfscale

    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(3, 66, (ROWS, TOKENS), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
    rank = hfscale.batch_rank(model)
    world = hfscale.batch_world(model)
    batch = {"input_ids": ids[rank::world], "labels": labels[rank::world]}
    rows = [
        {name: value[row : row + 1] for name, value in batch.items()}
        for row in range(len(batch["labels"]))
    ]
    given: Any = rows if row_by_row(draw.levers) else batch
    done["losses"].append(float(hfscale.train_step(model, given)))
    told = hfscale.metrics(model)
    done["scales"].append((told.get("loss_scale"), told.get("step_was_skipped")))
    if skips:
        model.zero_grad()
    done["norms"].append(float(hfscale.clip_grad_norm_(model, 0.5)))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def _be_killed(
    draw: ResumeDraw, model: Any, optimizer: Any, scheduler: Any, directory: str
) -> None:
    """Save, report it, and go on until the kill comes."""
    import hfscale

    rank = int(os.environ["RANK"])
    reported = Path(directory) / "reported"

    def save(step: int) -> None:
        target = Path(directory, "states", f"step-{step}")
        hfscale.save_state(
            model,
            target,
            optimizer=optimizer,
            scheduler=scheduler,
            step=step,
            asynchronous=draw.behind,
            keep_last=2,
        )

    save(SAVED)
    hfscale.wait_for_saves()
    if rank == 0:
        reported.write_text(f"{SAVED}\n")
    ignored: dict[str, Any] = {"losses": [], "norms": [], "scales": []}
    for step in range(SAVED, 10**6):
        if step == SAVED + 2 * draw.while_saving and rank in draw.victims:
            threading.Timer(draw.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        _step(draw, model, optimizer, scheduler, step, ignored)
        if draw.while_saving and SAVED + 2 <= step + 1 < STEPS:
            save(step + 1)
            if not draw.behind and rank == 0:
                with reported.open("a") as file:
                    file.write(f"{step + 1}\n")


def _model(draw: ResumeDraw, layout: dict[str, Any], seed: int, dtype: torch.dtype) -> Any:
    import hfscale

    extra: dict[str, Any] = {"experts_implementation": "eager"} if draw.kind == "mixture" else {}
    parallel = hfscale.ParallelConfig(**layout)
    config = _config(draw.kind, "fp8" in draw.levers)
    extra = {**extra, **built_with(draw.levers)}
    model = hfscale.from_config(config, parallel=parallel, seed=seed, dtype=dtype, **extra)
    if draw.kind == "lora":
        from peft import LoraConfig

        model = hfscale.get_peft_model(
            model, LoraConfig(r=4, target_modules="all-linear"), seed=0
        ).base_model.model
    return model.train()


def _optimizer(draw: ResumeDraw, model: Any) -> torch.optim.Optimizer:
    import hfscale

    if draw.optimizer == "stock":
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    own: dict[str, Any] = {"min_8bit_size": 256} if draw.kind == "8-bit" else {}
    if "stochastic_rounding" in draw.levers:
        own["stochastic_rounding"] = True
    made: torch.optim.Optimizer = hfscale.create_optimizer(
        model, draw.optimizer, lr=1e-2, weight_decay=0.1, **own
    )
    return made


def _config(kind: str, in_8_bits: bool = False) -> Any:
    from transformers import GPT2Config, LlamaConfig, Qwen2Config, Qwen3MoeConfig

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 67,
    }
    if kind == "tied":
        still: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=67, n_positions=64, **still)
    if kind == "mixture":
        experts: dict[str, Any] = {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "head_dim": 8,
        }
        return Qwen3MoeConfig(**sizes, **experts, intermediate_size=32, num_key_value_heads=2)
    if kind == "8-bit":
        return LlamaConfig(
            **{**sizes, "vocab_size": 128}, intermediate_size=512, num_key_value_heads=2
        )
    inner = WIDE["intermediate_size"] if in_8_bits else 50
    return Qwen2Config(
        **sizes, intermediate_size=inner, num_key_value_heads=1 if kind == "lora" else 2
    )


def _layout(random: Random, kind: str, levers: Levers = MappingProxyType({})) -> dict[str, Any]:
    """Of one, two or four ranks, such as the model fits."""
    import hfscale
    from hfscale.errors import HFScaleError

    for _ in range(1000):
        sizes = dict.fromkeys(("tp", "pp", "dp_shard", "dp_replicate", "cp"), 1)
        for _ in range(random.choice((0, 1, 1, 2, 2))):
            sizes[random.choice(list(sizes))] *= 2
        layout: dict[str, Any] = {f"{axis}_size": size for axis, size in sizes.items() if size > 1}
        if sizes["pp"] > 1:
            layout |= {
                "pipeline_schedule": random.choice(_SCHEDULES),
                "num_microbatches": 2 * sizes["pp"],
            }
        if sizes["tp"] > 1 and random.random() < 0.4:
            layout["sequence_parallel"] = True
        if kind == "mixture" and sizes["tp"] * sizes["dp_shard"] > 1 and random.random() < 0.7:
            layout["ep_size"] = sizes["tp"] * sizes["dp_shard"]
        if layout.get("num_microbatches", 1) > ROWS // (sizes["dp_shard"] * sizes["dp_replicate"]):
            continue
        try:
            asked = hfscale.ParallelConfig(**layout_with(levers, layout))
            hfscale.plan(
                _config(kind, "fp8" in levers),
                asked,
                dtype=dtype_with(levers),
                **planned_with(levers),
            )
        except (HFScaleError, ValueError):
            continue
        return layout
    raise AssertionError(f"no layout fits {kind}")


def _one(layout: dict[str, Any]) -> str:
    return json.dumps(layout, sort_keys=True)


def _world(layout: dict[str, Any]) -> int:
    import hfscale

    return hfscale.ParallelConfig(**layout).total_size


def _pool(pools: dict[int, RankPool], layout: dict[str, Any]) -> RankPool:
    return pools.setdefault(_world(layout), RankPool(_world(layout)))
