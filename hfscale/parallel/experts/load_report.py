"""Report the load of experts, summed over ranks, and record the loads of many steps."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..._compat.transformers.classes import class_name
from ...errors import ConfigError
from ...train.runtime import runtime_of
from .layer import NUMBERS
from .part import ExpertRouting

_SUFFIXES = (".png", ".svg")


@dataclass(frozen=True)
class LayerLoad:
    """Report the load of one layer's experts."""

    name: str  # name of the module that holds the experts
    tokens: tuple[int, ...]  # how many tokens each expert computed, padding included
    dropped: int = 0  # routes of tokens (without padding) that were dropped because of the capacity
    # without its coefficient; 1 if loads are balanced, 0 if the loss is off
    balance_loss: float = 0.0
    z_loss: float = 0.0  # without its coefficient; 0 if the loss is off

    @property
    def max_over_mean(self) -> float:
        """The largest load over the mean load: 1 if all loads are equal or zero."""
        total = sum(self.tokens)
        return max(self.tokens) * len(self.tokens) / total if total else 1.0

    @property
    def entropy(self) -> float:
        """Entropy of the loads over its maximum: 1 if all loads are equal or zero, 0 if one expert gets all tokens."""
        total = sum(self.tokens)
        count = len(self.tokens)
        if not total or count == 1:
            return 1.0
        shares = torch.tensor(self.tokens, dtype=torch.float64) / total
        return float(torch.special.entr(shares).sum()) / math.log(count)

    @property
    def dropped_share(self) -> float:
        """The fraction of all assignments of a token to an expert that were dropped because of the capacity."""
        return self.dropped / max(1, self.dropped + sum(self.tokens))


@dataclass(frozen=True)
class ExpertLoad:
    """Report the load of all layers' experts, in the model's order."""

    layers: tuple[LayerLoad, ...]

    def metrics(self, prefix: str = "experts/") -> dict[str, float]:
        """Return numbers to log: ``max_over_mean`` and ``entropy`` of the layer with the worst value, and their means
        over layers.
        """
        dropped = sum(layer.dropped for layer in self.layers)
        routes = dropped + sum(sum(layer.tokens) for layer in self.layers)
        report = {
            "max_over_mean": max(layer.max_over_mean for layer in self.layers),
            "entropy": min(layer.entropy for layer in self.layers),
            "dropped": dropped / max(1, routes),
            "balance_loss": sum(layer.balance_loss for layer in self.layers) / len(self.layers),
            "z_loss": sum(layer.z_loss for layer in self.layers) / len(self.layers),
        }
        return {f"{prefix}{name}": value for name, value in report.items()}


@torch.no_grad()
def expert_load(model: nn.Module) -> ExpertLoad:
    """Return the tokens per expert in the last step, summed over all ranks. Collective: call it on every rank.

    Without :func:`hfscale.train_step`, the counts are of all forward passes since the last call of this function.
    Recomputed layers are counted once.

    Raises:
        ConfigError: the model was loaded without ``routing=``, or has no experts.
    """
    runtime = runtime_of(model)
    part = runtime.part(ExpertRouting)
    if part is None or part.routing is None:
        raise ConfigError(
            "this model does not count the tokens of its experts: load it with routing=hfscale.RoutingConfig()"
            if runtime.plan.mixtures
            else f"{class_name(runtime.model)} has no experts that hfscale knows, so it has no expert load"
        )
    routing = part.routing
    mesh = runtime.mesh
    rows = []
    for planned in runtime.plan.mixtures:
        counter = routing.counters.get(planned.name)
        empty = torch.zeros(planned.count + NUMBERS, dtype=torch.float64, device=mesh.device)
        rows.append(empty if counter is None else counter.total(mesh.device))
    flat = torch.cat(rows)
    for group in (*mesh.loss_groups, *mesh.groups("tp", "pp")):
        dist.all_reduce(flat, group=group)
    routing.asked = True
    layers = []
    totals = flat.cpu().split([len(row) for row in rows])
    for planned, total in zip(runtime.plan.mixtures, totals, strict=True):
        *loads, dropped, balance, z, tokens = total.tolist()
        tokens = max(1.0, tokens)
        counts = tuple(map(round, loads))
        layers.append(LayerLoad(planned.name, counts, round(dropped), balance / tokens, z / tokens))
    return ExpertLoad(tuple(layers))


class ExpertLoadHistory:
    """Record the expert loads of many steps::

        history = hfscale.ExpertLoadHistory("loads.jsonl")
        for step, batch in enumerate(batches):
            ...
            history.record(step, hfscale.expert_load(model))
        history.plot("loads.png")

    Args:
        path: a file to which rank 0 appends a JSON line per step; ``None``: no file is written.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.steps: list[tuple[int, ExpertLoad]] = []
        if self.path is not None and not self.path.parent.is_dir():
            raise ConfigError(
                f"{self.path} cannot be written, since the folder {self.path.parent} does not exist: make it first"
            )

    @classmethod
    def read(cls, path: str | Path) -> "ExpertLoadHistory":
        """Read the loads recorded in a file. Raise :class:`ConfigError` if the file contains no recorded loads."""
        history = cls()
        try:
            for line in Path(path).read_text().splitlines():
                entry = json.loads(line)
                layers = tuple(
                    LayerLoad(**{**layer, "tokens": tuple(layer["tokens"])})
                    for layer in entry["layers"]
                )
                history.steps.append((int(entry["step"]), ExpertLoad(layers)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} holds no loads that hfscale.ExpertLoadHistory recorded ({error}): give the path of a file "
                "that it has written"
            ) from error
        return history

    def record(self, step: int, load: ExpertLoad) -> None:
        """Record the load of a step, also in the file at ``path`` on rank 0."""
        self.steps.append((step, load))
        if self.path is None or (dist.is_initialized() and dist.get_rank() > 0):
            return
        layers = [vars(layer) for layer in load.layers]
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, "layers": layers}) + "\n")

    def plot(self, path: str | Path) -> Path:
        """Draw a heat map per layer to the file ``path``, and return its path: steps from left to right, experts from
        top to bottom, load over mean load as color.

        Raises:
            ConfigError: nothing was recorded, ``path`` has no folder or another ending than .png or .svg, or matplotlib
                is not installed.
        """
        target = Path(path)
        if not self.steps:
            raise ConfigError(
                "this ExpertLoadHistory has no recorded steps to plot: record some steps first"
            )
        if target.suffix not in _SUFFIXES or not target.parent.is_dir():
            raise ConfigError(
                f"{target} cannot be drawn: use a name in a folder, ending in {' or '.join(_SUFFIXES)}"
            )
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
        relative = [
            [n * len(load.tokens) / max(1, sum(load.tokens)) for n in load.tokens] for load in loads
        ]
        by_expert = list(zip(*relative, strict=True))
        edges = [
            steps[0] - 0.5,
            steps[-1] + 0.5,
            len(by_expert) - 0.5,
            -0.5,
        ]
        image = axes.imshow(
            by_expert,
            aspect="auto",
            interpolation="nearest",
            vmin=0,
            vmax=2,
            extent=edges,
            cmap="RdBu_r",
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
