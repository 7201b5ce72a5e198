"""Prove facts about a model class that plans need: each proof runs a tiny clone, or the model without memory.

:mod:`hfscale.models.facts` asks for them where its table has no answer; ``scripts/prove_facts.py`` writes the table
with them. An answer is JSON, and comes with whether it holds for all models of the same digest, whatever their sizes.
"""

import json
from collections.abc import Callable
from typing import Any

from .documents import prove_documents
from .entry import prove_entry
from .infer import prove_blueprint
from .infer.completed import prove_completed
from .loan import prove_loan
from .loss_kind import prove_loss
from .mixing import prove_mixing
from .own_loss_proof import prove_own_loss
from .passage_proof import prove_passage
from .reach import prove_reach, prove_unused

PROOFS: dict[str, Callable[..., tuple[Any, bool]]] = {
    "blueprint": prove_blueprint,
    "completed": prove_completed,
    "documents": prove_documents,
    "entry": prove_entry,
    "loan": prove_loan,
    "loss": prove_loss,
    "mixing": prove_mixing,
    "own loss": prove_own_loss,
    "passage": prove_passage,
    "reach": prove_reach,
    "unused": prove_unused,
}
"""Question -> its proof, of a model and of what else is given."""


def prove(question: str, model: Any, **given: Any) -> tuple[Any, bool]:
    """Return an answer as JSON has it, and whether it holds for all sizes."""
    answer, lasts = PROOFS[question](model, **given)
    return json.loads(json.dumps(answer)), lasts
