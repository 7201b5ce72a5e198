"""Let a drawing made for light pages fit dark ones as well: its ground, lines and words follow what the reader prefers.

The ground stays the drawing's own, so that it can be read on a page whose theme the browser does not know of.
"""

from collections.abc import Mapping

GROUND, INK = "#1e2129", "#d5d8df"
"""Of a dark page (mkdocs-material's slate), and of words on it."""


def in_both(svg: str, dark: Mapping[str, str]) -> str:
    """``svg`` with a style that a browser uses where its reader prefers dark pages.

    Args:
        dark: what it changes: a CSS selector -> a declaration, as ``{'rect[fill="#ffffff"]': "fill: #1e2129"}``. It
            wins over the drawing's own attributes and styles.

    Raises:
        ValueError: the text has no ``<svg>`` tag.
    """
    begin = svg.find("<svg")
    if begin < 0:
        raise ValueError("there is no <svg> tag in this text: give a whole drawing")
    end = svg.index(">", begin) + 1
    rules = "".join(f"\n{selector} {{ {change} !important }}" for selector, change in dark.items())
    style = f"\n<style>@media (prefers-color-scheme: dark) {{{rules}\n}}</style>"
    return svg[:end] + style + svg[end:]
