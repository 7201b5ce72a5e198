"""What became of a draw: both scripts run in forked processes, and everything that they leave behind is compared."""

import json
import math
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hfscale.config.parallel import ParallelConfig

from ..children import Ended, Note, await_all, in_a_child, join_group
from ..judge import Verdict as Verdict, failed
from .data import MIXTURES, make_model
from .draw import Draw
from .script import Place, run, save_rows

TIMEOUT = 120.0
STEP = 2
"""The checkpoint that is gone on from."""


def judge(draw: Draw, models: Path, timeout: float = TIMEOUT) -> Verdict:
    """Run a draw and compare it with one process.

    What differs in float32 and is equal in float64, where roundings are nine digits smaller, is a rounding that the run
    amplifies: ``amplified``. What has few bits whatever the model is in (4-bit weights, states of 8 bits) is compared
    with what stock code makes of weights that begin one rounding apart.

    Args:
        models: where models are kept between draws.
    """
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hfscale-trainers-") as name:
        verdict = _judged(draw, Path(name), models, timeout)
    precise = draw.in_float64() if verdict.outcome == "wrong" else None
    if precise is not None and judge(precise, models, timeout).outcome == "equal":
        verdict.outcome = "amplified"
    verdict.seconds = time.monotonic() - begin
    return verdict


def _judged(draw: Draw, directory: Path, models: Path, timeout: float) -> Verdict:
    start = models / draw.model

    def prepare(_: Note) -> None:
        if not start.exists():
            make_model(draw.model, start)
        if draw.source == "datasets":
            save_rows(draw, directory)

    ended = await_all({"prepare": in_a_child(prepare, directory, "prepare")}, directory, timeout)[
        "prepare"
    ]
    if ended.error:
        return Verdict("crash", "prepare", ended.error, ended.trace)
    place = Place(str(start), str(directory / "stock"), None)
    stock, failed = _alone(draw, place, directory, timeout)
    if failed is not None:
        return Verdict("stock", failed.error[:100], failed.error[:600], failed.trace)
    place = replace(place, out=str(directory / "ours"), layout=draw.layout)
    if draw.resume:
        return _judged_going_on(draw, place, stock, timeout)
    found, verdict = _ranks(draw, place, directory, timeout)
    verdict = verdict or compared(draw, place, found, stock)
    return _weighed(verdict, draw, place, found, stock, timeout)


def _weighed(
    verdict: Verdict, draw: Draw, place: Place, found: list[Any], stock: Any, timeout: float
) -> Verdict:
    """What is wrong may be a rounding that the run amplifies; TRL's scores have 32 bits in float64 too."""
    few = draw.in_float64() is None or draw.trainer != "Trainer"
    if verdict.outcome == "wrong" and few and _amplifies(draw, place, found[0], stock, timeout):
        verdict.outcome = "amplified"
    return verdict


_NUDGES = 4
_SPREAD = 4.0
"""How many times as far a layout may be from stock code as a nudged run of stock code is, at the most, so far."""


def _amplifies(draw: Draw, place: Place, ours: Any, stock: Any, timeout: float) -> bool:
    """Whether stock code parts from itself as early and as far, where it begins one rounding apart."""
    spread = [0.0] * len(stock["history"])
    for nudge in range(1, _NUDGES + 1):
        out = str(Path(place.out).parent / f"nudged-{nudge}")
        nudged, failed = _alone(
            replace(draw, nudge=nudge),
            replace(place, out=out, layout=None),
            Path(out).parent,
            timeout,
        )
        if failed is None:
            spread = [
                max(pair) for pair in zip(spread, _apart(draw, place, nudged, stock), strict=False)
            ]
    apart = _apart(draw, place, ours, stock)
    if len(spread) != len(apart) or max(apart) <= 1e-5:  # what is wrong is not in what is logged
        return False
    return all(
        mine <= max(1e-5, _SPREAD * max(spread[: row + 1])) for row, mine in enumerate(apart)
    )


def _apart(draw: Draw, place: Place, one: Any, other: Any) -> list[float]:
    """By how much the numbers of each logged row differ, at the most."""
    ignored = set(_ignored(draw, place))
    return [
        max(
            (
                abs(mine[name] - theirs[name]) / max(1.0, abs(theirs[name]))
                for name in theirs.keys() & mine.keys() - ignored
            ),
            default=0.0,
        )
        for mine, theirs in zip(one["history"], other["history"], strict=False)
    ]


def _judged_going_on(draw: Draw, place: Place, stock: Any, timeout: float) -> Verdict:
    """Runs that go on: stock code from its own checkpoint, a layout from another's, stock code from that layout's."""
    directory = Path(place.out).parent
    writer = "stock"
    if draw.resume != "stock":
        writer = "first"
        first = replace(place, out=str(directory / writer), layout=json.loads(draw.resume))
        found, verdict = _ranks(draw, first, directory, timeout)
        verdict = verdict or compared(draw, first, found, stock)
        if (
            verdict.outcome == "wrong"
            and draw.in_float64() is None
            and _amplifies(draw, first, found[0], stock, timeout)
        ):
            verdict.outcome = "amplified"
        if verdict.outcome != "equal":
            return replace(verdict, detail=f"{verdict.detail} (in {draw.resume})")
    place = replace(place, resume=f"{directory}/{writer}/checkpoint-{STEP}")
    # Whose experts stock code leaves as they are when it goes on (transformers#48805).
    if draw.model in MIXTURES:
        found, verdict = _ranks(draw, place, directory, timeout)
        verdict = verdict or compared(draw, place, found, stock)
    else:
        verdict = _against_stock(draw, place, directory / "stock", STEP, timeout)
    if verdict.outcome != "equal" or int(draw.arguments["max_steps"]) <= 2 * STEP:
        return verdict
    back = replace(
        place, out=str(directory / "back"), layout=None, resume=f"{place.out}/checkpoint-{2 * STEP}"
    )
    # What TRL counts and copies begins anew wherever it goes on, so stock code goes on twice as well.
    twice = directory / ("stock" if draw.model in MIXTURES else f"stock-{STEP}")
    return _against_stock(draw, back, twice, 2 * STEP, timeout)


def _against_stock(draw: Draw, place: Place, before: Path, step: int, timeout: float) -> Verdict:
    """A run that goes on from ``step``, and stock code that goes on there from what it wrote ``before``."""
    directory = Path(place.out).parent
    own = replace(
        place, out=f"{directory}/stock-{step}", layout=None, resume=f"{before}/checkpoint-{step}"
    )
    expected, failed = _alone(draw, own, directory, timeout)
    if failed is not None:
        return Verdict("stock", failed.error[:100], failed.error[:600], failed.trace)
    if place.layout is not None:
        found, verdict = _ranks(draw, place, directory, timeout)
        return verdict or compared(draw, place, found, expected, Path(own.out))
    back, failed = _alone(draw, place, directory, timeout)
    if failed is not None:  # an optimizer's state that stock code is not to read
        kind = "refused" if "parameter group" in failed.error else "crash"
        return Verdict(kind, f"back: {failed.error[:100]}", failed.error[:600], failed.trace)
    return compared(draw, place, [back], expected, Path(own.out))


def _alone(draw: Draw, place: Place, directory: Path, timeout: float) -> tuple[Any, Ended | None]:
    name = Path(place.out).name

    def stock(note: Note) -> None:
        (directory / f"{name}.json").write_text(json.dumps(run(draw, place, note)))

    ended = await_all({name: in_a_child(stock, directory, name)}, directory, timeout)[name]
    return (
        (None, ended)
        if ended.error
        else (json.loads((directory / f"{name}.json").read_text()), None)
    )


def _ranks(
    draw: Draw, place: Place, directory: Path, timeout: float
) -> tuple[list[Any], Verdict | None]:
    """What every rank found, or what went wrong."""
    name = Path(place.out).name
    try:
        world = ParallelConfig(**(place.layout or {})).total_size
    except ValueError as error:
        return [], Verdict("refused", "config", str(error))
    (directory / "store").unlink(missing_ok=True)

    def rank(index: int) -> Callable[[Note], None]:
        def started(note: Note) -> None:
            join_group(index, world, directory, timeout)
            (directory / f"{name}-{index}.json").write_text(json.dumps(run(draw, place, note)))

        return started

    pids = {
        f"{name}-{index}": in_a_child(rank(index), directory, f"{name}-{index}")
        for index in range(world)
    }
    ended = await_all(pids, directory, timeout)
    if any(end.error for end in ended.values()):
        verdict = failed(list(ended.values()))
        # Which is read behind ``train``.
        if verdict.outcome == "late" and "CheckpointError" in verdict.kind:
            verdict.outcome = "refused"
        return [], verdict
    return [
        json.loads((directory / f"{name}-{index}.json").read_text()) for index in range(world)
    ], None


def compared(
    draw: Draw, place: Place, found: list[Any], stock: Any, wrote: Path | None = None
) -> Verdict:
    """Every number of every logged row, predictions, and the weights that are left.

    Args:
        wrote: what stock code has written; by default beside ``place.out``.
    """
    wrote = wrote or Path(place.out).parent / "stock"
    weights = wrote / "final"
    # Likewise without its experts.
    if draw.model in MIXTURES and draw.arguments.get("load_best_model_at_end"):
        weights = wrote / stock["best"][1]
        stock = _without_predictions(stock)
    steep = draw.arguments.get("optim") in ("rmsprop", "adagrad")  # which divide by next to nothing
    loose = (
        _LOOSE
        if draw.rounds
        else 1e-4
        if steep or draw.arguments.get("learning_rate", 0.0) > 0.01
        else 1e-5
    )
    for rank, ours in enumerate(found):
        problem = _histories(ours, stock, draw, place, loose) or _others(
            ours, stock, draw, place, loose
        )
        if problem:
            return Verdict("wrong", problem.split(":")[0], f"rank {rank}: {problem}")
    problem = "" if draw.rounds else _weights(Path(place.out) / "final", weights)
    return Verdict("wrong", "weights", problem) if problem else Verdict("equal")


_LOOSE = 5e-2


def _without_predictions(stock: Any) -> Any:
    return {name: value for name, value in stock.items() if name not in ("predictions", "metrics")}


def _histories(ours: Any, stock: Any, draw: Draw, place: Place, loose: float) -> str:
    ignored = set(_ignored(draw, place))
    # Held to a run without a stop, and TRL counts anew wherever it goes on.
    if place.resume and draw.model in MIXTURES:
        ignored |= {"num_tokens", "eval_num_tokens"}
    one = ours["history"]
    other = stock["history"]
    if place.resume:  # the summary of a run that goes on is of its second part
        one, other = ([row for row in rows if "train_loss" not in row] for rows in (one, other))
    if len(one) != len(other):
        return f"rows: {len(one)} for {len(other)}"
    for mine, theirs in zip(one, other, strict=True):
        if mine.keys() != theirs.keys():
            return f"keys: {sorted(mine)} for {sorted(theirs)}"
        for name in theirs.keys() - ignored:
            if (
                "accuracies" in name
                and abs(theirs[name.replace("accuracies", "margins")]) < 10 * loose
            ):
                continue  # of what is equal but for rounding
            if not _close(mine[name], theirs[name], loose):
                return f"{name}: {mine[name]!r} for {theirs[name]!r} at step {theirs.get('step')}"
    return ""


def _ignored(draw: Draw, place: Place) -> list[str]:
    """What data ranks pad by lengths of their own, and means of ranks' means, which stock code has too."""
    # Which has a copy of the adapter.
    if draw.adapter and draw.trainer not in (
        "Trainer",
        "SFTTrainer",
    ):
        return ["total_flos", *_ignored(replace(draw, adapter=""), place)]
    wrote = json.loads(draw.resume) if draw.resume.startswith("{") else {}
    # A run that goes on has the rows of the one before, too.
    if all(each.batches == 1 for each in (place, Place("", "", draw.layout), Place("", "", wrote))):
        return []
    names = ["total_flos", *(["kl", "entropy"] if draw.trainer == "GRPOTrainer" else [])]
    if draw.trainer == "SFTTrainer":  # which counts tokens of rows that even out data ranks, too
        names += ["num_tokens", "eval_num_tokens", "num_input_tokens_seen"]
    if draw.arguments.get("include_num_input_tokens_seen") in ("all", True):
        names += ["num_input_tokens_seen"]
    if draw.collator == "DataCollatorWithFlattening":
        names += ["eval_rows", "test_rows"]
    return names


def _others(ours: Any, stock: Any, draw: Draw, place: Place, loose: float) -> str:
    names = {"step", "epoch", "types", "best", "metrics", "labels", "predictions"} & stock.keys()
    # Which TRL makes bfloat16, and PEFT float32 where stock code goes on.
    if place.resume and draw.adapter == "qlora":
        names -= {"types"}
    for name in sorted(names):
        if not _close(ours[name], stock[name], 10 * loose):
            return f"{name}: {str(ours[name])[:200]} for {str(stock[name])[:200]}"
    return ""


def _close(one: Any, other: Any, loose: float) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            _close(one[name], other[name], loose) for name in one
        )
    if isinstance(one, list):
        return len(one) == len(other) and all(
            _close(a, b, loose) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, int | float) and isinstance(other, int | float):
        if not math.isfinite(other):
            return str(one) == str(other)
        return abs(one - other) <= loose * max(1.0, abs(other))
    return bool(one == other)


_KEY_BIAS = re.compile(r"k_proj\.bias|c_attn\.bias")
"""Moves no attention weight, so that its gradient is rounding, which some optimizers make as large as any other."""


def _weights(ours: Path, stock: Path) -> str:
    from safetensors.torch import load_file

    worst = 0.0
    where = ""
    for file in sorted(stock.glob("*.safetensors")):
        theirs = load_file(file)
        mine = load_file(ours / file.name)
        if theirs.keys() != mine.keys():
            return f"names: {sorted(theirs.keys() ^ mine.keys())}"
        for name, value in theirs.items():
            if value.shape != mine[name].shape or value.dtype != mine[name].dtype:
                return (
                    f"{name}: {mine[name].shape} {mine[name].dtype} for {value.shape} {value.dtype}"
                )
            if _KEY_BIAS.search(name):
                continue
            apart = float((value.double() - mine[name].double()).abs().max())
            worst, where = max((worst, where), (apart, name))
    return f"{where} is off by {worst:.1e}" if worst > 1e-3 else ""
