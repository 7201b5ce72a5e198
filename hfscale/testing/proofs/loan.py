"""Prove that layers make the same of a module that the first one lends them as of what it made."""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..._host.transformers.classes import takes_argument
from ...plan.loans import Loan
from ...planner.loans import lend
from .clones import tiny_model
from .probe import end_texts

_TOKENS = 5


def prove_loan(model: Any, loan: Loan) -> tuple[bool, bool]:
    """Return whether a tiny clone shows that layers can use the loan."""
    clone = tiny_model(model)
    if clone is None:
        return False, True
    with suppress(Exception):  # whatever stock code says of layers that are not given what they were
        return proved(clone, loan), True
    return False, True


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
