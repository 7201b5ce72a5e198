"""What is planned about the parts of a model that are not of its text."""

from dataclasses import dataclass

from .contents import Feature, PlanContents
from .parameter import wild_name


@dataclass(frozen=True)
class TowersPlan(Feature):
    """Towers and projectors around a model of text, and such of its layers as read nothing else: what only texts with a
    picture, or a sound, go through.

    Attributes:
        text: name of the model of text; empty where that is the model itself.
        items: modules and parameters around it, its head left out, and layers.
        parameters: how many numbers they hold.
        read_inside: inputs of the model of text by which its layers read them, besides the embeddings that go in.
        first_layers: how many of the first layers read them alone; 0 where any may, or none does.
    """

    text: str
    items: tuple[str, ...]
    parameters: int
    read_inside: tuple[str, ...] = ()
    first_layers: int = 0

    def describe(self, plan: PlanContents) -> list[str]:
        """What stays whole, and on which ranks."""
        where = "every tensor rank" if plan.layout.size("tp") > 1 else "every rank"
        gathered = "; data ranks gather them together" if plan.layout.data_world > 1 else ""
        what = f"{', '.join(dict.fromkeys(map(wild_name, self.items)))}, {self.parameters:,} parameters"
        beside = f"beside the text of {self.text}" if self.text else "not used for tokens"
        return [f"{beside}: {what}, whole on {where}{gathered}"]

    def holds(self, name: str) -> bool:
        """Whether a parameter or a module is one of them, or in one."""
        return any(name == item or name.startswith(f"{item}.") for item in self.items)
