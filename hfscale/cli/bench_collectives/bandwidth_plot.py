"""Draw measured collectives: bus bandwidth over message size."""

from collections.abc import Sequence
from pathlib import Path

from .collectives import Measured


def draw(target: Path, measured: Sequence[Measured], title: str) -> None:
    """Write the picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(each.collective for each in measured):
        own = [each for each in measured if each.collective == name]
        axes.plot([each.size for each in own], [each.bus_bandwidth / 1e9 for each in own], marker="o", ms=3, label=name)
    axes.set(title=title, xlabel="message (bytes)", ylabel="bus bandwidth (GB/s)", xscale="log", yscale="log")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(target, dpi=150)
