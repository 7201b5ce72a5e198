"""Draw timelines as pictures: matplotlib for PNG and SVG, imported on use."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...cli.look import check_drawing
from ...parallel.pipeline.timeline import Kind, Span, Timeline


class Look(NamedTuple):
    """Hold the look of a kind of action, in pictures and in the terminal."""

    label: str
    colour: str
    letter: str
    # Of the terminal's 256 colours: one for a rank's first stage, one for its later stages.
    backgrounds: tuple[int, int]


LOOKS: dict[Kind, Look] = {
    "forward": Look("forward", "#3b6fb6", "F", (25, 67)),
    "backward": Look("backward", "#3a9a6d", "B", (29, 72)),
    "backward_input": Look("input gradient", "#2aa3a3", "I", (30, 73)),
    "backward_weight": Look("weight gradient", "#e0a030", "W", (172, 179)),
    "update": Look("update", "#c8413b", "U", (160, 167)),
}
IDLE = "#e9e9ec"
_ROW_INCHES = 0.40
_INCHES_PER_FORWARD = 0.27
_EDGE = "#ffffff"


def title(timeline: Timeline) -> str:
    """Return a line with the schedule's name, sizes and bubble."""
    parts = [timeline.name] if timeline.name else []
    parts += [f"p = {timeline.num_ranks}", f"m = {timeline.num_microbatches}"]
    if timeline.virtual_stages > 1:
        parts.append(f"v = {timeline.virtual_stages}")
    parts.append(f"bubble {100 * timeline.bubble:.1f} % of the work")
    if timeline.span_bubble < timeline.bubble - 1e-3:
        parts.append(f"{100 * max(timeline.span_bubble, 0):.1f} % as a rank sees it")
    updates = {
        span.action.microbatch for _, span in timeline.spans() if span.action.kind == "update"
    }
    if len(updates) > 1 and (steady := timeline.steady_idle) is not None:
        parts.append(f"idle {100 * max(steady, 0):.1f} % once filled")
    return ", ".join(parts)


def draw(path: Path, timelines: Sequence[tuple[str, Timeline]]) -> None:
    """Draw ``(heading, timeline)`` pairs, in one unit, below each other; the suffix of ``path`` selects PNG or SVG."""
    check_drawing(path)
    import matplotlib
    from matplotlib.figure import Figure

    horizon = max(timeline.end for _, timeline in timelines)
    unit = forward_length(timelines[0][1]) or 1.0
    width = min(max(horizon / unit * _INCHES_PER_FORWARD, 8.0), 48.0) + 0.9
    heights = [_ROW_INCHES * timeline.num_ranks for _, timeline in timelines]
    head = 0.42
    gap = 0.42
    foot = 0.85
    height = sum(heights) + head * len(heights) + gap * (len(heights) - 1) + foot
    figure: Any = Figure(figsize=(width, height), facecolor="white")
    top = height
    for (heading, timeline), rows in zip(timelines, heights, strict=True):
        top -= head
        axes = figure.add_axes(
            (0.75 / width, (top - rows) / height, (width - 0.9) / width, rows / height)
        )
        _draw_one(axes, timeline, horizon, (width - 0.9) / horizon)
        label = f"{heading}: {title(timeline)}" if heading else title(timeline)
        axes.set_title(label, loc="left", fontsize=10.5, pad=6, color="#222222")
        top -= rows + gap
    axes.set_xlabel(
        "seconds" if timeline.unit == "s" else f"time in {timeline.unit}",
        fontsize=8.5,
        color="#444444",
    )
    _legend(figure, timelines, width, height)
    with matplotlib.rc_context({"svg.hashsalt": "hfscale", "svg.fonttype": "none"}):
        figure.savefig(
            path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else {}
        )


def _draw_one(axes: Any, timeline: Timeline, horizon: float, inches: float) -> None:
    """Draw one timeline into ``axes``; ``inches`` is the width of one unit of time, by which very short actions are
    drawn as marks.
    """
    from matplotlib.patches import Rectangle

    for rank, spans in enumerate(timeline.ranks):
        axes.add_patch(
            Rectangle(
                (timeline.start, rank - 0.46), timeline.makespan, 0.92, facecolor=IDLE, linewidth=0
            )
        )
        chunks = sorted({span.action.stage for span in spans})
        for span in spans:
            face = _shade(
                LOOKS[span.action.kind].colour, chunks.index(span.action.stage), len(chunks)
            )
            wide = (span.end - span.start) * inches
            thin = 0.35 if wide < 0.05 else 0.8
            if wide < 0.012:  # too short for a box: draw a visible mark
                axes.plot(
                    [span.start] * 2,
                    [rank - 0.46, rank + 0.46],
                    color=face,
                    linewidth=1.8,
                    zorder=3,
                )
                continue
            box = Rectangle(
                (span.start, rank - 0.46),
                span.end - span.start,
                0.92,
                facecolor=face,
                edgecolor=_EDGE,
                linewidth=thin,
            )
            axes.add_patch(box)
            _number(axes, span, rank, face, wide)
    axes.set_xlim(0, horizon)
    axes.set_ylim(timeline.num_ranks - 0.5, -0.5)
    axes.set_yticks(
        range(timeline.num_ranks), [f"rank {rank}" for rank in range(timeline.num_ranks)]
    )
    axes.tick_params(axis="both", labelsize=8.5, length=0, colors="#444444")
    axes.tick_params(axis="x", length=3, color="#aaaaaa")
    axes.spines[:].set_visible(False)


def _number(
    axes: Any,
    span: Span,
    rank: int,
    face: str,
    wide: float,
) -> None:
    text = str(span.action.microbatch)
    size = min(9.0, wide * 72 / (0.68 * len(text) + 0.25))  # a digit is 0.6 of its size wide
    if size >= 4.5 and span.action.kind != "update":
        middle, (red, green, blue) = (span.start + span.end) / 2, _rgb(face)
        ink = "#1a1a1a" if 0.299 * red + 0.587 * green + 0.114 * blue > 150 else "#ffffff"
        axes.text(
            middle,
            rank,
            text,
            ha="center",
            va="center_baseline",
            fontsize=size,
            color=ink,
            zorder=4,
        )


def _legend(
    figure: Any, timelines: Sequence[tuple[str, Timeline]], width: float, height: float
) -> None:
    from matplotlib.patches import Patch

    shown = [
        Patch(facecolor=LOOKS[kind].colour, label=LOOKS[kind].label)
        for kind in shown_kinds(timelines)
    ]
    if has_later_stages(timelines):
        shown.append(
            Patch(
                facecolor=_shade(LOOKS["forward"].colour, 1, 2),
                label="lighter: a rank's later stages",
            )
        )
    shown.append(Patch(facecolor=IDLE, label="idle"))
    figure.legend(
        handles=shown,
        loc="lower left",
        bbox_to_anchor=(0.62 / width, 0.02 / height, 1.0, 0.1),
        ncols=len(shown),
        frameon=False,
        fontsize=8.5,
        handlelength=1.2,
        columnspacing=1.6,
    )


def forward_length(timeline: Timeline) -> float:
    """Return the median duration of a forward pass; 0 if there is none."""
    lengths = sorted(
        span.end - span.start for _, span in timeline.spans() if span.action.kind == "forward"
    )
    return lengths[len(lengths) // 2] if lengths else 0.0


def shown_kinds(timelines: Sequence[tuple[str, Timeline]]) -> list[Kind]:
    """Return the kinds of actions that occur, in the order of :data:`LOOKS`."""
    kinds = {span.action.kind for _, timeline in timelines for _, span in timeline.spans()}
    return [kind for kind in LOOKS if kind in kinds]


def has_later_stages(timelines: Sequence[tuple[str, Timeline]]) -> bool:
    """Return whether any rank has several stages."""
    return any(
        len({span.action.stage for span in row}) > 1
        for _, timeline in timelines
        for row in timeline.ranks
    )


def _shade(colour: str, chunk: int, chunks: int) -> str:
    """Return the shade of ``colour`` for stage number ``chunk`` of a rank's ``chunks`` stages: the later the stage, the
    lighter the shade.
    """
    share = 0.0 if chunks == 1 else 0.45 * chunk / (chunks - 1)
    return "#" + "".join(f"{round(value + (255 - value) * share):02x}" for value in _rgb(colour))


def _rgb(colour: str) -> tuple[int, int, int]:
    return (
        int(colour[1:3], 16),
        int(colour[3:5], 16),
        int(colour[5:7], 16),
    )
