"""Plan the towers and projectors around a model's text model."""

from dataclasses import dataclass

from ..models.names import wild_name
from .contents import Feature, PlanContents


@dataclass(frozen=True)
class TowersPlan(Feature):
    """Plan of towers and projectors around a text model, and of layers that read only their output (images, audio)."""

    text: str  # name of the text model; empty if that is the model itself
    items: tuple[str, ...]  # modules and parameters around it, its head left out, and layers
    parameters: int  # how many numbers they hold
    read_inside: tuple[str, ...] = ()  # inputs of the text model by which its layers read them, besides the embeddings
    first_layers: int = 0  # how many of the first layers alone read them; 0 if any may, or none does

    def describe(self, plan: PlanContents) -> list[str]:
        """Return the line about the towers in the plan's printout."""
        where = "every tensor rank" if plan.layout.tp > 1 else "every rank"
        gathered = "; data ranks gather them together" if plan.layout.data_world > 1 else ""
        what = f"{', '.join(dict.fromkeys(map(wild_name, self.items)))}, {self.parameters:,} parameters"
        beside = f"beside the text of {self.text}" if self.text else "not used for tokens"
        return [f"{beside}: {what}, whole on {where}{gathered}"]

    def holds(self, name: str) -> bool:
        """Return whether a parameter or a module is one of the items, or inside of one."""
        return any(name == item or name.startswith(f"{item}.") for item in self.items)
