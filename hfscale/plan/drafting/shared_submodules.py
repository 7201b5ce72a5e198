"""Find a module that a list's first layer lends to the others, if a proof shows that any layer can compute it."""

from typing import Any

from torch import nn

from ...models.facts import ask
from ..stages import Loan


def find_loan(model: Any, layer_list: str) -> Loan | None:
    """Return the module that later layers can compute themselves instead of getting its output from the first layer;
    ``None`` where a tiny clone does not prove it.
    """
    loan = candidate(list(model.get_submodule(layer_list)), layer_list)
    return loan if loan is not None and ask("loan", model, loan.name, loan=loan) else None


def candidate(layers: list[nn.Module], layer_list: str) -> Loan | None:
    """Return the only module that the first of some otherwise equal layers has alone."""
    first, *others = ([name for name, _ in layer.named_modules()] for layer in layers)
    if not others or any(names != others[0] for names in others):
        return None
    known = set(others[0])
    extra = [name for name in first if name not in known and name.rpartition(".")[0] in known]
    if len(extra) != 1 or not known <= set(first):
        return None
    owner, _, child = extra[0].rpartition(".")
    has, lacks = (vars(layer.get_submodule(owner)) for layer in layers[:2])
    flags = ((name, value) for name, value in has.items() if isinstance(value, bool) and lacks.get(name) is not value)
    return Loan(layer_list, owner, child, tuple(sorted(flags)))


def lend(loan: Loan, module: nn.Module, layer: nn.Module) -> None:
    """Let another layer of the list use the module, without being listed as its owner: it has one name."""
    owner: Any = layer.get_submodule(loan.owner)
    owner.__dict__.update({loan.child: module, **dict(loan.flags)})
