"""Prove a blueprint: two ranks compute the same output and gradients as one, in float64."""

from typing import Any

from torch import Tensor

from ....config.parallel import AXES, ParallelConfig
from ....models.blueprint import Blueprint
from ....models.inference import TOLERANCE, Proof
from ....plan.drafting.blocks import plan_blocks
from ....plan.drafting.draft import Draft
from .lockstep import run_as_ranks
from .subject import Subject, Unproved, brief

_FLOOR = 1e-6  # of the largest gradient: what is left of a gradient that is zero in truth is rounding


def prove(subject: Subject, blueprint: Blueprint, tp_size: int = 2) -> Proof:
    """Run the clone as ``tp_size`` ranks that share the blocks of ``blueprint``, and compare with the clone itself.

    Everything that follows from the blueprint is decided by the code that plans real runs. The vocabulary stays whole.

    Raises:
        Unproved: the ranks cannot run, or compute something else.
    """
    sizes: dict[str, Any] = {f"{axis}_size": 1 for axis in AXES}
    layout = ParallelConfig(**{**sizes, "tp_size": tp_size}, sequence_parallel=False)  # nothing from the environment
    draft = Draft(subject.model, layout)
    try:
        blocks = plan_blocks(draft, blueprint, subject.layer_names)
    except (AttributeError, KeyError) as error:  # it names what some layer does not have
        raise Unproved(brief(error)) from error
    if draft.problems:
        raise Unproved(draft.problems[0].partition(": ")[2] or draft.problems[0])
    expected, wanted = subject.reference
    results = run_as_ranks(subject, draft, blocks)
    proof = Proof(max(_difference(result.output, expected) for result in results), 0.0, "")
    if proof.worst > TOLERANCE:
        raise Unproved(f"the output differs by {proof.output:.0e}")
    floor = _FLOOR * max(float(gradient.abs().max()) for gradient in wanted.values() if gradient is not None)
    for name, gradient in wanted.items():
        largest = max(_gradient_difference(result.gradients[name], gradient, floor) for result in results)
        if largest >= proof.gradient:
            proof = Proof(proof.output, largest, name)
    if proof.worst > TOLERANCE:
        raise Unproved(f"the gradient of {proof.parameter} differs by {proof.gradient:.0e}")
    return proof


def _gradient_difference(found: Tensor | None, wanted: Tensor | None, floor: float) -> float:
    if wanted is None:
        return 0.0 if found is None or not found.any() else float("inf")
    return float("inf") if found is None else _difference(found, wanted, floor)


def _difference(found: Tensor, wanted: Tensor, floor: float = 1e-30) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    largest = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=floor))
    return largest if largest == largest else float("inf")
