"""Prove the roles of parameters that a blueprint forgot."""

from typing import Any

from ....models.blueprint import Blueprint
from ....models.names import wild_name
from .proof import prove
from .subject import Unproved, aside, make_subject


def prove_completed(model: Any, blueprint: Blueprint, forgotten: list[str]) -> tuple[bool, bool]:
    """Return whether two ranks of a clone compute the same as one, with roles for the ``forgotten`` parameters."""
    return _holds(model, blueprint, forgotten), True


def _holds(model: Any, blueprint: Blueprint, forgotten: list[str]) -> bool:
    try:
        subject = make_subject(model)
        if {wild_name(name) for name in forgotten} - {wild_name(name) for name, _ in subject.model.named_parameters()}:
            return False  # somebody has put them into this model, and a clone proves nothing of them
        with aside():
            prove(subject, blueprint)
    except Unproved:
        return False
    return True
