"""What became of a draw."""

import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .children import Ended, Note, await_all, in_a_child, join_group
from .draw import Draw

OUTCOMES = ("equal", "refused", "stock", "late", "wrong", "crash", "hang")
DEFECTS = ("late", "wrong", "crash", "hang")
TIMEOUT = 60.0
# Before any weight is read, or, of the second row, before any is changed.
_EARLY = ("", "config", "plan", "build", "adapt", "optimizer")
_OF_THE_BATCH = re.compile(
    r"\brows?\b|microbatch|position_ids|attention_mask|input_ids|no valid|sequences of|one distinct batch"
    r"|frozen on others|label_smoothing="  # an argument of the step itself
)


@dataclass
class Verdict:
    """The judgement of one draw.

    Attributes:
        outcome: one of :data:`OUTCOMES`; ``stock``: stock code itself cannot train it, so there is nothing to equal.
        kind: a short name of the reason, the same for the same reason: failures are told apart by it.
        detail: what differs and by how much, or what was raised.
        trace: where.
        seconds: it took.
    """

    outcome: str
    kind: str = ""
    detail: str = ""
    trace: str = ""
    seconds: float = 0.0

    @property
    def defect(self) -> bool:
        """Whether hfscale is to blame."""
        return self.outcome in DEFECTS

    def same(self, other: "Verdict") -> bool:
        """Whether it is the same failure."""
        return (self.outcome, self.kind) == (other.outcome, other.kind)


def judge(draw: Draw, timeout: float = TIMEOUT) -> Verdict:
    """Run a draw in forked processes of this one and compare it with one process."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hfscale-fuzz-") as name:
        verdict = _judged(draw, Path(name), timeout)
    verdict.seconds = time.monotonic() - begin
    return verdict


def judge_in_a_child(draw: Draw, path: Path, timeout: float = TIMEOUT) -> int:
    """The same in a process of its own, which writes the verdict to ``path``; returns the process's id."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            path.write_text(json.dumps(asdict(judge(draw, timeout))))
            status = 0
        finally:
            os._exit(status)
    return pid


def _judged(draw: Draw, directory: Path, timeout: float) -> Verdict:
    from .ranks import run
    from .reference import reference

    try:
        world = draw.parallel().total_size
    except ValueError as error:
        return Verdict("refused", "config", str(error))
    child = in_a_child(lambda _: reference(draw, directory), directory, "stock")
    stock = await_all({"stock": child}, directory, timeout)["stock"]

    def rank(index: int) -> Callable[[Note], None]:
        def started(note: Note) -> None:
            if world > 1:
                join_group(index, world, directory, timeout)
            run(draw, directory, index, note)

        return started

    if stock.refused:  # of what only hfscale has: losses of routing
        return Verdict("refused", f"one process: {_short(stock.error)}", stock.error[:400])
    if stock.error:
        return Verdict("stock", _short(stock.error), stock.error[:400], stock.trace)
    pids = {
        f"rank{index}": in_a_child(rank(index), directory, f"rank{index}") for index in range(world)
    }
    ended = await_all(pids, directory, timeout)
    if any(end.error for end in ended.values()):
        return failed(list(ended.values()))
    return compared(
        draw, [json.loads((directory / f"rank-{index}.json").read_text()) for index in range(world)]
    )


def failed(ended: list[Ended]) -> Verdict:
    """Of ranks that did not all return: an error counts more than those it left waiting."""
    errors = [end for end in ended if end.error and not end.refused and not end.hung]
    own = [
        end
        for end in errors
        if not re.search("gloo|Connection (reset|closed)|Broken pipe", end.error)
    ]
    refused = [end for end in ended if end.refused]
    if own or (errors and not refused):
        end = (own or errors)[0]
        return Verdict("crash", f"{end.phase}: {_short(end.error)}", end.error[:600], end.trace)
    if refused:
        # the rank that says why, before those that only heard of it
        end = min(refused, key=lambda end: "other rank(s) refused" in end.error)
        outcome = "refused" if _in_time(end) else "late"
        return Verdict(outcome, f"{end.phase}: {_short(end.error)}", end.error[:600], end.trace)
    end = next(end for end in ended if end.hung)
    phases = ", ".join(sorted({end.phase for end in ended}))
    return Verdict(
        "hang", end.phase, f"ranks stand at {phases}", "\n".join(end.trace for end in ended)
    )


def _in_time(refused: Ended) -> bool:
    """Whether a refusal came before anything was computed in vain."""
    early = refused.phase in _EARLY or (
        refused.phase == "step 0" and _OF_THE_BATCH.search(refused.error)
    )
    # A budget meets its first tokens there, and transformers' own switch may be turned once a model is built.
    early = early or re.search(
        "recompute=.* is too small|gradient_checkpointing_enable", refused.error
    )
    return bool(early) or refused.phase in (
        "eval",
        "generate",
        "outputs",
        "scores",
        "save",
        "save_state",
    )


def compared(draw: Draw, found: list[dict[str, Any]]) -> Verdict:
    """Of what every rank measured."""
    worst: dict[str, tuple[float, float, str]] = {}
    for one in found:
        for kind, (ratio, value, name) in one["worst"].items():
            if kind not in worst or ratio > worst[kind][0]:
                worst[kind] = (ratio, value, name)
    bad = {kind: entry for kind, entry in worst.items() if not entry[0] <= 1}
    if bad:
        detail = "; ".join(f"{kind} {value:.2g} ({name})" for kind, (_, value, name) in bad.items())
        return Verdict("wrong", "+".join(sorted(bad)), detail)
    # Ranks of one pipeline and tensor group are told the same; a plain loop's losses are those of its own batch.
    if draw.loop == "train_step" and any(one["losses"] != found[0]["losses"] for one in found):
        return Verdict(
            "wrong", "ranks differ", f"losses and norms {[one['losses'] for one in found]}"
        )
    sums: dict[str, str] = {}
    for one in found:
        for place, value in one["sums"].items():
            if sums.setdefault(place, value) != value:
                return Verdict(
                    "wrong", "copies differ", f"two ranks hold different values of {place}"
                )
    detail = ", ".join(
        f"{kind} {value:.0e}"
        for kind, (_, value, _) in worst.items()
        if kind in ("loss", "gradient")
    )
    return Verdict("equal", "", detail)


def _short(error: str) -> str:
    """An error without what differs from draw to draw."""
    line = next((line for line in error.splitlines()[::1] if line.strip()), "")
    lines = error.splitlines()
    if len(lines) > 1 and lines[1].startswith("  - "):
        line = f"{line.split(':')[0]}: {lines[1][4:]}"
    return re.sub(r"'[^']*'|\d[\d.e+-]*", "_", line)[:110]
