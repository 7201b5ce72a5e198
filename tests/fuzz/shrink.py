"""Make a failing draw small: towards defaults, one change at a time, as long as it fails in the same way."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from .draw import Draw
from .judge import Verdict


def shrink(
    draw: Draw,
    verdict: Verdict,
    judge: Callable[[Draw], Verdict],
    say: Callable[[str], None] = lambda _: None,
) -> Draw:
    """The smallest draw found that still fails like ``verdict``.

    Args:
        judge: what becomes of a draw.
        say: told of every smaller draw that still fails.
    """
    tried: set[str] = {draw.write()}
    progress = True
    while progress:
        progress = False
        for smaller in candidates(draw):
            text = smaller.write()
            if text in tried:
                continue
            tried.add(text)
            if judge(smaller).same(verdict):
                draw = smaller
                progress = True
                say(text)
                break
    return draw


def candidates(draw: Draw) -> Iterator[Draw]:
    """Draws that are one step smaller, the largest steps first."""
    yield from _with_defaults(draw)
    if draw.config:
        yield draw.change(config={})
    yield from (draw.change(config=less) for less in _without_one(draw.config))
    yield from (draw.change(layout=less) for less in _smaller_layouts(draw.layout))
    for name in ("memory", "resume_layout"):
        yield from (draw.change(**{name: less}) for less in _without_one(getattr(draw, name) or {}))
    if draw.peft:
        yield from (draw.change(peft=less) for less in _smaller_adapters(draw.peft))
    for name in ("frozen", "between", "lengths"):
        values: tuple[Any, ...] = getattr(draw, name)
        if len(values) > 1:
            yield from (
                draw.change(**{name: (*values[:i], *values[i + 1 :])}) for i in range(len(values))
            )
    for name in ("layers", "rows", "microbatches", "steps"):
        if getattr(draw, name) > 1:
            yield draw.change(**{name: 1})
            yield draw.change(**{name: getattr(draw, name) - 1})
    if draw.family != "llama":
        yield draw.change(family="llama")


def _with_defaults(draw: Draw) -> Iterator[Draw]:
    usual = Draw(draw.family)
    for field in fields(Draw):
        if field.name in ("family", "config", "layout", "seed", "layers", "rows", "steps"):
            continue
        if getattr(draw, field.name) != getattr(usual, field.name):
            yield draw.change(**{field.name: getattr(usual, field.name)})


def _smaller_adapters(peft: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from (less for less in _without_one(peft) if "target_modules" in less)
    targets = peft["target_modules"]
    if isinstance(targets, list) and len(targets) > 1:
        yield from ({**peft, "target_modules": [target]} for target in targets)


def _without_one(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in values:
        yield {key: value for key, value in values.items() if key != name}


def _smaller_layouts(layout: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from _without_one(layout)
    for name, value in layout.items():
        if name.endswith("_size") and value > 2:
            yield {**layout, name: value // 2}
        elif name == "num_microbatches" and value > 1:
            yield {**layout, name: value - 1}
    if layout.get("pipeline_schedule") not in (None, "1f1b"):
        yield {**layout, "pipeline_schedule": "gpipe"}
