"""Find what the first layer of a list lends to the others, and prove that any of them can use it by itself."""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from .._host.transformers.classes import takes_argument
from ..plan.loans import Loan
from .probe import end_texts, tiny_model
from .remembered import Remembered, said_by

_TOKENS = 5


def find_loan(model: Any, layer_list: str) -> Loan | None:
    """What layers can make themselves of a module that the first one lends them, instead of being given it; ``None``
    where a tiny clone does not show that they can.
    """
    key = type(model), said_by(model.config), layer_list
    return _known.answer(key, lambda: _find(model, layer_list))


_known = Remembered[Loan | None]()


def _find(model: Any, layer_list: str) -> Loan | None:
    loan, clone = candidate(list(model.get_submodule(layer_list)), layer_list), tiny_model(model)
    if loan is None or clone is None:
        return None
    with suppress(Exception):  # whatever stock code says of layers that are not given what they were
        return loan if proved(clone, loan) else None
    return None


def candidate(layers: list[nn.Module], layer_list: str) -> Loan | None:
    """The one module that the first of some layers, which are otherwise alike, has alone."""
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


@torch.no_grad()
def proved(model: Any, loan: Loan) -> bool:
    """Whether a model computes the same where each layer is given the stream alone, and the loan. Changes the model."""
    model.eval()
    lent = model.get_submodule(loan.name)
    for parameter in lent.parameters():  # a table of zeros would prove nothing
        parameter.normal_()
    together = _output(model)
    first, *others = model.get_submodule(loan.layer_list)
    for layer in (first, *others):
        layer.register_forward_hook(_stream_alone)
    for layer in others:
        lend(loan, lent, layer)
    return torch.equal(together, _output(model))


def _stream_alone(_: nn.Module, args: Any, output: Any) -> Any:
    """What a stand-in for a layer returns."""
    return (output[0], *(None for _ in output[1:])) if isinstance(output, tuple) else output


def _output(model: Any) -> Tensor:
    # All tokens differ: attention to equal ones is the same whatever its scores.
    ids = torch.arange(3, 3 + _TOKENS)[None]
    inputs: dict[str, Any] = {"decoder_input_ids": ids.flip(1)} if model.config.is_encoder_decoder else {}
    inputs |= {"use_cache": False} if takes_argument(model, "use_cache") else {}
    end_texts(ids, model.config)
    output: Tensor = model(input_ids=ids, **inputs)[0]
    return output
