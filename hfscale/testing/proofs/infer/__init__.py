"""Infer the blueprint of a family without one from a tiny clone of the model, and prove it there.

How it goes (:func:`infer`): make a clone of a few layers (:mod:`.subject`), trace one forward (:mod:`.forward_trace`),
see which projections may make a block (:mod:`.candidate_blocks`), say in what ways they may (:mod:`.hypotheses`), keep
what two ranks can compute without any difference to one (:mod:`.lockstep`).
"""

from ....models.blueprint import TOLERANCE, Inference, Proof
from .lockstep import prove
from .search_blueprint import infer, prove_blueprint, prove_completed
from .subject import Subject, Unproved, make_subject

__all__ = [
    "TOLERANCE",
    "Inference",
    "Proof",
    "Subject",
    "Unproved",
    "infer",
    "make_subject",
    "prove",
    "prove_blueprint",
    "prove_completed",
]
