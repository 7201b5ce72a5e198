"""What the first layer of a list has, and the others read the result of."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Loan:
    """A module that only the first layer of a list has, where the others are given what it makes: T5's table of
    relative positions (Raffel et al. 2020), whose bias every attention of a stack adds.

    Through stages that result does not travel (it is as large as the scores of attention). Every stage with layers of
    the list holds the module instead, as a tied tensor, and the first of these layers makes the result itself.

    Attributes:
        layer_list: name of the list.
        owner: path, within a layer, of the module that holds it.
        child: its attribute there.
        flags: attributes of the owner by which the stock code knows that it is there, and what they are then.
    """

    layer_list: str
    owner: str
    child: str
    flags: tuple[tuple[str, bool], ...] = ()

    @property
    def lender(self) -> str:
        """Name of the layer that has it."""
        return f"{self.layer_list}.0"

    @property
    def name(self) -> str:
        """Of the module, in the model."""
        return ".".join(filter(None, (self.lender, self.owner, self.child)))
