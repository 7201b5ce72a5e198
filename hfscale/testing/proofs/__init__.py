"""Prove facts about a model class that plans need: each proof runs a tiny clone, or the model without memory.

:mod:`hfscale.models.facts` asks for them where its table has no answer; ``scripts/prove_facts.py`` writes the table
with them. An answer is JSON, and comes with whether it holds for all models of the same digest, whatever their sizes.
"""

import json
from collections.abc import Callable
from typing import Any

from .choice_bias import prove_choice_bias
from .infer.search_blueprint import prove_blueprint, prove_completed
from .layer_probes import prove_entry, prove_loan, prove_passage, prove_reach, prove_unused
from .loss_proofs import prove_documents, prove_loss, prove_own_loss, prove_token_loss
from .mixing import prove_mixing
from .score_scaling import prove_score_scaling

_ALL: tuple[Callable[..., tuple[Any, bool]], ...] = (
    prove_blueprint,
    prove_choice_bias,
    prove_completed,
    prove_documents,
    prove_entry,
    prove_loan,
    prove_loss,
    prove_mixing,
    prove_own_loss,
    prove_passage,
    prove_reach,
    prove_score_scaling,
    prove_token_loss,
    prove_unused,
)
PROOFS = {proof.__name__.removeprefix("prove_").replace("_", " "): proof for proof in _ALL}
"""Question -> its proof, of a model and of what else is given."""


def prove(question: str, model: Any, **given: Any) -> tuple[Any, bool]:
    """Return an answer as JSON has it, and whether it holds for all sizes."""
    answer, lasts = PROOFS[question](model, **given)
    return json.loads(json.dumps(answer)), lasts
