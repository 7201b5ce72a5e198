"""Render timelines in the terminal: a row of characters per rank, optionally in colours."""

from collections.abc import Sequence

from ...parallel.pipeline.timeline import Kind, Span, Timeline
from .schedule_plot import LABELS, forward_length, has_later_stages, shown_kinds, title

_LETTERS: dict[Kind, str] = {
    "forward": "F",
    "backward": "B",
    "backward_input": "I",
    "backward_weight": "W",
    "update": "U",
}
# Of the 256 colours: a darker and a lighter background each (a rank's first stage and its later ones), and the ink.
_BACKGROUNDS: dict[Kind, tuple[int, int]] = {
    "forward": (25, 67),
    "backward": (29, 72),
    "backward_input": (30, 73),
    "backward_weight": (172, 179),
    "update": (160, 167),
}
_WIDEST_FORWARD = 4  # columns


def render(timelines: Sequence[tuple[str, Timeline]], width: int = 100, colour: bool = False) -> str:
    """Render ``(heading, timeline)`` pairs, all in one unit, below each other on one time scale of ``width`` columns.

    Without colour a box is a letter (F forward, B backward, I and W its two halves, U update), the microbatch where it
    fits, and dashes to its end; a dot is idle. With ``colour``, in ANSI codes, the letter gives way to the background.
    """
    margin = len(f"rank {max(timeline.num_ranks for _, timeline in timelines) - 1} ")
    horizon = max(timeline.end for _, timeline in timelines)
    room = max(width - margin, 20)
    scale = _scale(timelines[0][1], horizon, room)
    lines = []
    for heading, timeline in timelines:
        lines.append(f"{heading}: {title(timeline)}" if heading else title(timeline))
        for rank, spans in enumerate(timeline.ranks):
            lines.append(f"rank {rank}".ljust(margin) + _row(spans, scale, round(horizon * scale), colour))
        lines.append("")
    return "\n".join([*lines, _legend(shown_kinds(timelines), colour, has_later_stages(timelines))])


def _scale(timeline: Timeline, horizon: float, room: int) -> float:
    """Return columns per unit of time: an integer number per forward where there is room for that."""
    forward = forward_length(timeline)
    columns = min(room / horizon * forward, float(_WIDEST_FORWARD)) if forward else 1.0
    return (int(columns) if columns >= 1 else columns) / forward if forward else room / horizon


def _row(spans: tuple[Span, ...], scale: float, columns: int, colour: bool) -> str:
    chunks = sorted({span.action.stage for span in spans})
    cells = [" " if colour else "."] * columns
    for span in spans:
        first, last = round(span.start * scale), round(span.end * scale)
        if last <= first:
            continue
        box = _box(span, last - first, colour, bool(chunks.index(span.action.stage)))
        cells[first:last] = box
    return "".join(cells)


def _box(span: Span, columns: int, colour: bool, later: bool) -> list[str]:
    letter, number = _LETTERS[span.action.kind], str(span.action.microbatch)
    if not colour:
        text = letter + number if len(number) < columns else letter
        return list(text.ljust(columns, "-"))
    text = number if len(number) <= columns else ""
    # A thin bar keeps neighbours of one colour apart where the number leaves room for it.
    text = ("▏" + text if len(text) < columns else text).ljust(columns)
    cells = list(text)
    cells[0] = f"\x1b[48;5;{_BACKGROUNDS[span.action.kind][later]};38;5;231m" + cells[0]
    cells[-1] += "\x1b[0m"
    return cells


def _legend(shown: Sequence[Kind], colour: bool, later: bool) -> str:
    if colour:
        parts = [f"\x1b[48;5;{_BACKGROUNDS[kind][0]}m  \x1b[0m {LABELS[kind]}" for kind in shown]
        return "   ".join([*parts, *(["lighter: a rank's later stages"] if later else []), "blank: idle"])
    return "   ".join([*(f"{_LETTERS[kind]} {LABELS[kind]}" for kind in shown), ". idle"])
