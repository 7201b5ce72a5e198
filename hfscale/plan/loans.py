"""Plan modules that only the first layer of a list has, and whose result all its layers read."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Loan:
    """Describe a module that only the first layer of a list has, while the others are passed its result: T5's table of
    relative positions (Raffel et al. 2020), whose bias every attention of a stack adds.

    The result is not sent between stages (it is as large as the attention scores). Every stage with layers of the list
    holds the module instead, as a tied tensor, and the first of these layers computes the result itself.
    """

    layer_list: str  # name of the list
    owner: str  # path, within a layer, of the module that holds it
    child: str  # its attribute there
    # attributes of the owner by which the stock code knows that the module is there, with their values then
    flags: tuple[tuple[str, bool], ...] = ()

    @property
    def lender(self) -> str:
        """The name of the layer that has the module."""
        return f"{self.layer_list}.0"

    @property
    def name(self) -> str:
        """The name of the module in the model."""
        return ".".join(filter(None, (self.lender, self.owner, self.child)))
