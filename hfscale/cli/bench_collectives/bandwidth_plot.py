"""Draw measured collectives: bus bandwidth over message size."""

from collections.abc import Sequence
from pathlib import Path

from ...errors import ConfigError
from .collectives import Measured


def check_target(target: Path) -> None:
    """Refuse a picture that could not be drawn, before anything is measured.

    Raises:
        ConfigError: matplotlib or the directory is missing, or the kind of file is unknown.
    """
    if target.suffix not in (".png", ".svg"):
        raise ConfigError(f"{target} is no picture that can be drawn: use .png or .svg")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"{target} cannot be written: {target.parent} is not a folder")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError('a picture needs matplotlib: pip install "hfscale[plots]"') from error


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
