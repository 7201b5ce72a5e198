"""Find the modules and parameters outside a list of layers, or outside a text model.

Also find a module of the first layer that computes an input for all other layers, like T5's relative positions.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..._compat.torch import own_modules
from ...models.facts import ask
from ..parameter import join_path
from ..stages import Loan

# numbers of samples and of tokens per sample in the batch with which a clone is run
PROBED = (1, 2)

ALONE = ", and only the stream travels between stages"
GIVEN = f"its layers are given what another layer computed, besides the stream{ALONE}"


def items_around(model: nn.Module, path: str) -> Iterator[str]:
    """Yield the names of all parameters and modules outside ``path``, from the outermost module inwards.

    These are the children of every module that contains ``path``, except the child that is or contains ``path``.
    """
    owner = ""
    for inner in path.split("."):
        module = model.get_submodule(owner)
        names = [name for name, _ in module.named_parameters(recurse=False)]
        # named_children would omit the second name of a module that has two names.
        names += [
            name
            for name, child in own_modules(module).items()
            if child is not None and name != inner
        ]
        yield from (join_path(owner, name) if owner else name for name in names)
        owner = join_path(owner, inner) if owner else inner


def tensors_of(model: nn.Module, item: str) -> dict[int, int]:
    """Return, by ``id``, the number of entries of each parameter in ``item``: the name of a module or a parameter."""
    owner, _, child = item.rpartition(".")
    holder = getattr(model.get_submodule(owner), child)
    held = holder.parameters() if isinstance(holder, nn.Module) else [holder]
    return {id(parameter): parameter.numel() for parameter in held}


def find_loan(model: Any, layer_list: str) -> Loan | None:
    """Return the module of the first layer whose result every later layer receives, if a run of a tiny copy of the
    model shows that later layers could run this module themselves and get the same result. Otherwise return ``None``.
    """
    loan = candidate(list(model.get_submodule(layer_list)), layer_list)
    return loan if loan is not None and ask("loan", model, loan.name, loan=loan) else None


def candidate(layers: list[nn.Module], layer_list: str) -> Loan | None:
    """Return the single module that the first layer has and all other layers lack; ``None`` if layers differ in another
    way.
    """
    first, *others = ([name for name, _ in layer.named_modules()] for layer in layers)
    if not others or any(names != others[0] for names in others):
        return None
    known = set(others[0])
    extra = [name for name in first if name not in known and name.rpartition(".")[0] in known]
    if len(extra) != 1 or not known <= set(first):
        return None
    owner, _, child = extra[0].rpartition(".")
    has, lacks = (vars(layer.get_submodule(owner)) for layer in layers[:2])
    flags = (
        (name, value)
        for name, value in has.items()
        if isinstance(value, bool) and lacks.get(name) is not value
    )
    return Loan(layer_list, owner, child, tuple(sorted(flags)))


def lend(loan: Loan, module: nn.Module, layer: nn.Module) -> None:
    """Make ``layer`` use ``module``, which belongs to the first layer of its list, without registering it: the module
    keeps a single name.
    """
    owner: Any = layer.get_submodule(loan.owner)
    owner.__dict__.update({loan.child: module, **dict(loan.flags)})
