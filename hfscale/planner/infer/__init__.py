"""The blueprint of a family that nobody wrote: derived from a tiny clone of the model, and proved on it.

How it goes (:func:`infer`): make a clone of a few layers (:mod:`.subject`), trace one forward (:mod:`.trace`), see
which projections may make a block (:mod:`.candidates`), say in what ways they may (:mod:`.hypotheses`), keep what two
ranks can compute without any difference to one (:mod:`.proof`, :mod:`.ranks`).
"""

from typing import Any

from torch import nn

from ..._host.torch import own_modules
from ...families.blueprint import Blueprint
from ...families.clone import tiny_clone
from ..remembered import Remembered, said_by
from .proof import TOLERANCE, Proof, prove
from .search import Inference
from .search import infer as _infer
from .subject import Subject, Unproved, brief, make_subject, refuse

known = Remembered[Inference]()


def infer(model: Any) -> Inference:
    """Derive and prove the blueprint of ``model``; once per class and switches of its config in a process.

    Raises:
        PlanError: nothing could be proved; says what was tried.
    """
    layers = len(own_modules(model)) if isinstance(model, nn.Module) else 0
    try:
        switches = said_by(tiny_clone(model.config))
    except Exception as error:  # whatever the host says of sizes that it checks against one another
        raise refuse(model, f"its config cannot be made small: {brief(error)}") from error
    return known.answer((type(model), layers, switches), lambda: _infer(model))


def infer_blueprint(model: Any) -> Blueprint:
    """The inferred and proved blueprint of a model on any device, the meta device included.

    Raises:
        PlanError: nothing could be proved; says what was tried.
    """
    return infer(model).blueprint


__all__ = [
    "TOLERANCE",
    "Inference",
    "Proof",
    "Subject",
    "Unproved",
    "infer",
    "infer_blueprint",
    "make_subject",
    "prove",
]
