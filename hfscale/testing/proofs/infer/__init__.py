"""Infer the blueprint of a family without one from a tiny clone of the model, and prove it there.

How it goes (:func:`infer`): make a clone of a few layers (:mod:`.subject`), trace one forward (:mod:`.forward_trace`),
see which projections may make a block (:mod:`.candidate_blocks`), say in what ways they may (:mod:`.hypotheses`), keep
what two ranks can compute without any difference to one (:mod:`.proof`, :mod:`.lockstep`).
"""

from typing import Any

from ....errors import PlanError
from ....models.clone import tiny_clone
from ....models.inference import TOLERANCE, Inference, Proof, as_data
from .proof import prove
from .search_blueprint import infer as _infer
from .subject import Subject, Unproved, brief, make_subject, refuse


def prove_blueprint(model: Any) -> tuple[dict[str, Any], bool]:
    """Return the blueprint of a model, or why it is ``refused``."""
    try:
        return as_data(infer(model)), True
    except PlanError as error:
        return {"refused": str(error)}, True


def infer(model: Any) -> Inference:
    """Derive and prove the blueprint of ``model``.

    Raises:
        PlanError: nothing could be proved; says what was tried.
    """
    try:
        tiny_clone(model.config)
    except Exception as error:  # whatever the host says of sizes that it checks against one another
        raise refuse(model, f"its config cannot be made small: {brief(error)}") from error
    return _infer(model)


__all__ = ["TOLERANCE", "Inference", "Proof", "Subject", "Unproved", "infer", "make_subject", "prove"]
