"""Random runs that are killed and go on in another layout, beside one process that nothing interrupted.

A draw is twelve steps: six, a save, some more until ranks are killed, between two steps or while the next save is
written; then the rest in a second layout, from whatever whole state is found. Losses, norms and weights must be those
of one process, and no state that a save had reported may be lost.
"""

import json
import os
import signal
import threading
import warnings
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from ...families.precision import keep_float64
from ..pool import RankError, RankPool

STEPS, SAVED, ROWS, TOKENS = 12, 6, 8, 16
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
    """

    kind: str
    optimizer: str
    first: dict[str, Any]
    second: dict[str, Any]
    behind: bool
    while_saving: bool
    seconds: float
    victims: tuple[int, ...]

    def write(self) -> str:
        """As one line."""
        return json.dumps(asdict(self))


def choose_resume(seed: int, index: int) -> ResumeDraw:
    """Everything follows from the two numbers."""
    random = Random(f"{seed}/{index}")
    kind = KINDS[index % len(KINDS)]
    first, second = _layout(random, kind), _layout(random, kind)
    while _one(first) == _one(second):
        second = _layout(random, kind)
    world = _world(first)
    victims = tuple(range(world)) if random.random() < 0.5 else (random.randrange(world),)
    optimizer = random.choice(_OPTIMIZERS.get(kind, ("adamw_torch", "stock")))
    behind, saving = random.random() < 0.5, random.random() < 0.6
    return ResumeDraw(kind, optimizer, first, second, behind, saving, random.uniform(0, 0.15), victims)


def judge_resume(draw: ResumeDraw, directory: Path, pools: dict[int, RankPool]) -> str:
    """What is wrong with a draw, in words; empty where nothing is."""
    expected = leg(draw, {}, None, 0)
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
    return _differences(draw, expected, found, acknowledged)


def leg(draw: ResumeDraw, layout: dict[str, Any], directory: str | None, number: int) -> dict[str, Any]:
    """What one rank does; the first leg is killed, and the one without a directory goes through."""
    import hfscale

    wide = draw.kind != "8-bit"
    with keep_float64() if wide else nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _model(draw, layout, seed=number, dtype=torch.float64 if wide else torch.float32)
        optimizer = _optimizer(draw, model)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, total_iters=STEPS)
        start = 0
        if number:
            resumed = hfscale.load_state(model, f"{directory}/states", optimizer=optimizer, scheduler=scheduler)
            start = int(resumed.step or 0)
        done: dict[str, Any] = {"start": start, "losses": [], "norms": []}
        for step in range(start, STEPS):
            _step(model, optimizer, scheduler, step, done)
            if directory is not None and not number and step + 1 == SAVED:
                _be_killed(draw, model, optimizer, scheduler, directory)
        done["weights"] = {name: tensor.clone() for name, tensor in hfscale.stream_weights(model, ranks="all")}
    return done


def _step(model: Any, optimizer: Any, scheduler: Any, step: int, done: dict[str, Any]) -> None:
    import hfscale

    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(3, 66, (ROWS, TOKENS), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
    rank, world = hfscale.batch_rank(model), hfscale.batch_world(model)
    batch = {"input_ids": ids[rank::world], "labels": labels[rank::world]}
    done["losses"].append(float(hfscale.train_step(model, batch)))
    done["norms"].append(float(hfscale.clip_grad_norm_(model, 0.5)))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def _be_killed(draw: ResumeDraw, model: Any, optimizer: Any, scheduler: Any, directory: str) -> None:
    """Save, report it, and go on until the kill comes."""
    import hfscale

    rank, reported = int(os.environ["RANK"]), Path(directory) / "reported"

    def save(step: int) -> None:
        target = Path(directory, "states", f"step-{step}")
        hfscale.save_state(
            model, target, optimizer=optimizer, scheduler=scheduler, step=step, asynchronous=draw.behind, keep_last=2
        )

    save(SAVED)
    hfscale.wait_for_saves()
    if rank == 0:
        reported.write_text(f"{SAVED}\n")
    ignored: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(SAVED, 10**6):
        if step == SAVED + 2 * draw.while_saving and rank in draw.victims:
            threading.Timer(draw.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        _step(model, optimizer, scheduler, step, ignored)
        if draw.while_saving and SAVED + 2 <= step + 1 < STEPS:
            save(step + 1)
            if not draw.behind and rank == 0:
                with reported.open("a") as file:
                    file.write(f"{step + 1}\n")


def _model(draw: ResumeDraw, layout: dict[str, Any], seed: int, dtype: torch.dtype) -> Any:
    import hfscale

    extra: dict[str, Any] = {"experts_implementation": "eager"} if draw.kind == "mixture" else {}
    parallel = hfscale.ParallelConfig(**layout)
    model = hfscale.from_config(_config(draw.kind), parallel=parallel, seed=seed, dtype=dtype, **extra)
    if draw.kind == "lora":
        from peft import LoraConfig

        model = hfscale.get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")).base_model.model
    return model.train()


def _optimizer(draw: ResumeDraw, model: Any) -> torch.optim.Optimizer:
    import hfscale

    if draw.optimizer == "stock":
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    own: dict[str, Any] = {"min_8bit_size": 256} if draw.kind == "8-bit" else {}
    made: torch.optim.Optimizer = hfscale.create_optimizer(model, draw.optimizer, lr=1e-2, weight_decay=0.1, **own)
    return made


def _config(kind: str) -> Any:
    from transformers import GPT2Config, LlamaConfig, Qwen2Config, Qwen3MoeConfig

    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 67}
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
        return LlamaConfig(**{**sizes, "vocab_size": 128}, intermediate_size=512, num_key_value_heads=2)
    return Qwen2Config(**sizes, intermediate_size=50, num_key_value_heads=1 if kind == "lora" else 2)


def _layout(random: Random, kind: str) -> dict[str, Any]:
    """Of one, two or four ranks, such as the model fits."""
    import hfscale
    from hfscale.errors import HFScaleError

    for _ in range(1000):
        sizes = dict.fromkeys(("tp", "pp", "dp_shard", "dp_replicate", "cp"), 1)
        for _ in range(random.choice((0, 1, 1, 2, 2))):
            sizes[random.choice(list(sizes))] *= 2
        layout: dict[str, Any] = {f"{axis}_size": size for axis, size in sizes.items() if size > 1}
        if sizes["pp"] > 1:
            layout |= {"pipeline_schedule": random.choice(_SCHEDULES), "num_microbatches": 2 * sizes["pp"]}
        if sizes["tp"] > 1 and random.random() < 0.4:
            layout["sequence_parallel"] = True
        if kind == "mixture" and sizes["tp"] * sizes["dp_shard"] > 1 and random.random() < 0.7:
            layout["ep_size"] = sizes["tp"] * sizes["dp_shard"]
        if layout.get("num_microbatches", 1) > ROWS // (sizes["dp_shard"] * sizes["dp_replicate"]):
            continue
        try:
            hfscale.plan(_config(kind), hfscale.ParallelConfig(**layout))
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


def _differences(draw: ResumeDraw, expected: dict[str, Any], found: list[dict[str, Any]], acknowledged: int) -> str:
    """In float64 to rounding; states in 8 bits step where a rounding moves them to the next value."""
    loss, norm, weight = (1e-12, 1e-11, 1e-10) if draw.kind != "8-bit" else (2e-5, 1e-3, 0.05)
    for rank, told in enumerate(found):
        start = told["start"]
        if start < acknowledged:
            return f"rank {rank} went on from step {start}, and step {acknowledged} had been reported"
        for kind, limit in (("losses", loss), ("norms", norm)):
            for step, (mine, theirs) in enumerate(zip(told[kind], expected[kind][start:], strict=True), start + 1):
                if abs(mine - theirs) > limit * abs(theirs):
                    return f"{kind} of step {step} on rank {rank}: {mine!r} and {theirs!r}"
        if told["weights"].keys() != expected["weights"].keys():
            return f"names on rank {rank}: {sorted(told['weights'].keys() ^ expected['weights'].keys())[:3]}"
        for name, theirs in expected["weights"].items():
            if float((told["weights"][name] - theirs).abs().max()) > weight * float(theirs.abs().max()):
                return f"{name} on rank {rank}"
    return ""
