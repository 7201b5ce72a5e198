"""Render an estimate or a search as one HTML page with pictures, without scripts or external files.

Pictures are inline SVG; each mark has a ``<title>``, which browsers show under the pointer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import cycle
from math import floor, log10

from ...cost.tools.estimate import Estimate
from ...cost.tools.fast_cost import CandidateCost
from ...cost.tools.search import Search
from ...parallel.pipeline.timeline import Timeline
from ...plan.table import human

_WIDTH = 960
_LABEL = 70
_ROW = 22
_COLORS = (
    "#4a6fa5", "#e08e45", "#6aa84f", "#b04a5a", "#8064a2", "#50a5b1", "#9c8b5e", "#7f7f7f", "#d4a5c9", "#1f3d63",
    "#c9b037", "#2e6b4f", "#c46bb0",
)  # fmt: skip
_KINDS = {
    "forward": "#4a6fa5",
    "backward": "#e08e45",
    "backward_input": "#e08e45",
    "backward_weight": "#6aa84f",
}
_MOST_SPANS = 4000
_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}"
    "pre{background:#f6f6f6;padding:1em;white-space:pre-wrap;font-size:12px}h1{font-size:1.4em}h2{font-size:1.1em}"
    "svg{display:block;max-width:100%;height:auto}.key span{display:inline-block;margin-right:1em}"
    ".key i{display:inline-block;width:.8em;height:.8em;margin-right:.3em}"
)


def page_of(found: Estimate | Search, title: str) -> str:
    """Return the HTML page of an estimate or a search."""
    if isinstance(found, Search):
        sections = [
            ("Seconds and memory: the frontier, and the fastest of each kind", _scatter(found))
        ]
    else:
        sections = list(_of_estimate(found))
    body = "".join(f"<h2>{escape(name)}</h2>{content}" for name, content in sections)
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    text = f"<h1>{escape(title)}</h1>{body}<pre>{escape(str(found))}</pre>"
    return f'<!DOCTYPE html><html lang="en"><head>{head}</head><body>{text}</body></html>\n'


def _of_estimate(found: Estimate) -> Iterable[tuple[str, str]]:
    kinds = [
        kind
        for kind in found.stages[0].memory.kinds
        if any(stage.memory.kinds[kind] for stage in found.stages)
    ]
    rows = [
        (f"rank {s.rank}", {kind: float(s.memory.kinds[kind]) for kind in kinds})
        for s in found.stages
    ]
    marks = ((found.hardware.budget, "budget"), (found.hardware.memory, "device"))
    memory = _bars(rows, max(found.needed, found.hardware.memory), _size, marks)
    yield "Memory of each pipeline rank, by kind", memory + _key(kinds)
    terms = {name: seconds for name, seconds in found.time.terms.items() if seconds > 0}
    yield (
        "Seconds of a step, by term",
        _bars([("step", terms)], found.seconds, _seconds) + _key(terms),
    )
    if found.schedule is not None and sum(1 for _ in found.schedule.spans()) <= _MOST_SPANS:
        played = {span.action.kind for _, span in found.schedule.spans()}
        key = _key([kind for kind in _KINDS if kind in played], _KINDS)
        yield f"Schedule: {found.schedule.name}", _schedule(found.schedule) + key


def _bars(
    rows: Sequence[tuple[str, dict[str, float]]],
    most: float,
    say: Callable[[float], str],
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    scale = (_WIDTH - _LABEL - 10) / most
    height = _ROW * len(rows) + (20 if marks else 2)
    parts = []
    for number, (name, values) in enumerate(rows):
        y = number * _ROW
        x = float(_LABEL)
        parts.append(_text(0, y + 15, name))
        for color, (kind, value) in zip(
            cycle(_COLORS),
            values.items(),
            strict=False,
        ):
            parts.append(
                _rect(x, y + 2, value * scale, _ROW - 4, color, f"{name}: {kind} {say(value)}")
            )
            x += value * scale
    for value, name in marks:
        x = _LABEL + value * scale
        parts += [
            _dashed(x, 0, height - 14),
            _text(x, height - 2, f"{name} {say(value)}", "end", 11),
        ]
    return _svg(height, parts)


def _schedule(timeline: Timeline) -> str:
    scale = (_WIDTH - _LABEL - 10) / timeline.makespan
    parts = [_text(0, rank * _ROW + 15, f"rank {rank}") for rank in range(timeline.num_ranks)]
    for rank, span in timeline.spans():
        x = _LABEL + (span.start - timeline.start) * scale
        width = (span.end - span.start) * scale
        action = span.action
        takes = _seconds(span.end - span.start)
        says = f"{action.kind} of stage {action.stage}, microbatch {action.microbatch}: {takes}"
        color = _KINDS.get(action.kind, "#7f7f7f")
        parts.append(
            _rect(
                x,
                rank * _ROW + 2,
                max(width - 0.5, 0.5),
                _ROW - 4,
                color,
                says,
            )
        )
    return _svg(timeline.num_ranks * _ROW + 4, parts)


def _scatter(found: Search) -> str:
    """Plot the seconds per step of each layout over its memory per rank, on logarithmic axes, because layouts differ by
    large factors in both.
    """
    shown: list[tuple[CandidateCost, str]] = [
        (candidate, _COLORS[0]) for candidate in found.frontier
    ]
    shown += [
        (candidate, _COLORS[1]) for candidate in found.best if candidate not in found.frontier
    ]
    right = _WIDTH - 30
    bottom = 320
    gib = 2**30
    across = _Scale(
        [candidate.likely / gib for candidate, _ in shown] + [found.budget / gib],
        _LABEL,
        right,
    )
    up = _Scale([candidate.seconds for candidate, _ in shown], bottom, 20)
    parts = []
    for value in across.ticks():
        x = across.at(value)
        parts += [
            _line(x, x, 20, bottom),
            _text(x, bottom + 16, f"{value:g} GiB", "middle"),
        ]
    for value in up.ticks():
        y = up.at(value)
        parts += [
            _line(_LABEL, right, y, y),
            _text(_LABEL - 8, y + 4, f"{value:g} s", "end"),
        ]
    x = across.at(found.budget / gib)
    parts += [_dashed(x, 20, bottom), _text(x, 14, f"budget {_size(found.budget)}", "end")]
    for candidate, color in shown:
        says = f"{candidate.candidate.describe()}: {_seconds(candidate.seconds)}, {_size(candidate.likely)}"
        place = f'cx="{across.at(candidate.likely / gib):.1f}" cy="{up.at(candidate.seconds):.1f}"'
        parts.append(f'<circle {place} r="5" fill="{color}"><title>{escape(says)}</title></circle>')
    parts.append(_text(right, bottom + 32, "likely memory of a rank", "end"))
    return _svg(bottom + 38, parts) + _key(["frontier", "fastest of another kind"])


class _Scale:
    """Map values to positions on a logarithmic axis that has a margin at both ends."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self._low, self._high = log10(min(values) / 1.1), log10(max(values) * 1.1)
        self._start = start
        self._end = end

    def at(self, value: float) -> float:
        share = (log10(value) - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Return round tick values in the range: 1, 2 and 5 times powers of ten, or more values if these are few."""
        ticks = list[float]()
        decades = range(floor(self._low), floor(self._high) + 1)
        for steps in ((1, 2, 5), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9)):
            if len(ticks) <= 2:
                values = [step * 10.0**decade for decade in decades for step in steps]
                ticks = [value for value in values if self._low <= log10(value) <= self._high]
        return ticks


def _key(names: Iterable[str], colors: Mapping[str, str] = {}) -> str:
    shown = (
        f'<span><i style="background:{colors.get(name, color)}"></i>{escape(name)}</span>'
        for name, color in zip(names, cycle(_COLORS), strict=False)
    )
    return f'<p class="key">{"".join(shown)}</p>'


def _text(
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    size: int = 12,
) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(
    x1: float,
    x2: float,
    y1: float,
    y2: float,
    style: str = 'stroke="#ddd"',
) -> str:
    return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" {style}/>'


def _dashed(x: float, y1: float, y2: float) -> str:
    return _line(x, x, y1, y2, 'stroke="#222" stroke-dasharray="4 3"')


def _rect(
    x: float,
    y: float,
    width: float,
    height: float,
    color: str,
    says: str,
) -> str:
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    return f'<rect {place} fill="{color}"><title>{escape(says)}</title></rect>'


def _svg(height: float, parts: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(parts)}</svg>'


def _size(value: float) -> str:
    return human(round(value))


def _seconds(value: float) -> str:
    return f"{value:.3g} s"
