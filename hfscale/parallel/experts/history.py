"""Expert load over time: kept, written as JSON lines, drawn. matplotlib is imported on use."""

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...errors import ConfigError
from .load_report import ExpertLoad, LayerLoad

_SUFFIXES = (".png", ".svg")


class ExpertLoadHistory:
    """Record the expert loads of many steps::

        history = hfscale.ExpertLoadHistory("loads.jsonl")
        for step, batch in enumerate(batches):
            ...
            history.record(step, hfscale.expert_load(model))
        history.plot("loads.png")

    Args:
        path: a file that gets a line per step, from the first rank; appended to, if it exists. ``None``: none.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.steps: list[tuple[int, ExpertLoad]] = []
        if self.path is not None and not self.path.parent.is_dir():
            raise ConfigError(f"{self.path} cannot be written: there is no folder {self.path.parent}")

    @classmethod
    def read(cls, path: str | Path) -> "ExpertLoadHistory":
        """Read the loads recorded in a file.

        Raises:
            ConfigError: it is no such file.
        """
        history = cls()
        try:
            for line in Path(path).read_text().splitlines():
                entry = json.loads(line)
                layers = tuple(LayerLoad(**{**each, "tokens": tuple(each["tokens"])}) for each in entry["layers"])
                history.steps.append((int(entry["step"]), ExpertLoad(layers)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} holds no loads that hfscale.ExpertLoadHistory recorded: {error}") from error
        return history

    def record(self, step: int, load: ExpertLoad) -> None:
        """Add the load of a step."""
        self.steps.append((step, load))
        if self.path is None or (dist.is_initialized() and dist.get_rank() > 0):
            return
        layers = [vars(layer) for layer in load.layers]
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, "layers": layers}) + "\n")

    def plot(self, path: str | Path) -> Path:
        """Draw a map per layer: steps from left to right, experts from top to bottom, each expert's tokens in a step
        relative to the mean.

        Raises:
            ConfigError: nothing was recorded, another suffix, a folder that does not exist, or no matplotlib.
        """
        target = Path(path)
        if not self.steps:
            raise ConfigError("there is no load to draw: record some steps first")
        if target.suffix not in _SUFFIXES or not target.parent.is_dir():
            raise ConfigError(f"{target} cannot be drawn: use a name in a folder, ending in {' or '.join(_SUFFIXES)}")
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ConfigError("drawing needs matplotlib: pip install 'hfscale[plots]'") from error
        count = len(self.steps[0][1].layers)
        columns = min(count, 4)
        rows = -(-count // columns)
        figure = Figure(figsize=(1.5 + 3.2 * columns, 1.0 + 2.2 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[count:]:
            axes.set_axis_off()
        image: Any = None
        for number, axes in zip(range(count), grid.flat, strict=False):
            image = self._draw_layer(axes, number)
        figure.colorbar(image, ax=grid, label="load over an even share")
        figure.savefig(target, dpi=150)
        return target

    def _draw_layer(self, axes: Any, number: int) -> Any:
        steps = [step for step, _ in self.steps]
        loads = [load.layers[number] for _, load in self.steps]
        relative = [[n * len(load.tokens) / max(1, sum(load.tokens)) for n in load.tokens] for load in loads]
        by_expert = list(zip(*relative, strict=True))
        edges = [steps[0] - 0.5, steps[-1] + 0.5, len(by_expert) - 0.5, -0.5]
        image = axes.imshow(
            by_expert, aspect="auto", interpolation="nearest", vmin=0, vmax=2, extent=edges, cmap="RdBu_r"
        )
        latest = loads[-1]
        axes.set_title(
            f"{latest.name}\nmax/mean {latest.max_over_mean:.2f}, entropy {latest.entropy:.2f}, "
            f"dropped {latest.dropped_share:.1%}",
            fontsize=7,
        )
        axes.set_xlabel("step", fontsize=7)
        axes.set_ylabel("expert", fontsize=7)
        axes.tick_params(labelsize=6)
        return image
