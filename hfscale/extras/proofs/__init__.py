"""Prove the properties of a model class on which plans depend. Each proof runs a tiny copy of the model, or the model
on the meta device.

:mod:`hfscale.models.facts` calls a proof if its table has no answer; ``scripts/prove_facts.py`` fills the table by the
same proofs. A proof returns its answer (JSON), and whether the answer holds for all models with the same digest (in
:mod:`hfscale.models.facts`), whatever their sizes.
"""

from ...extensions import Extension

_HERE = "hfscale.extras.proofs"

EXTENSION = Extension(
    name="proofs",
    proofs={
        "blueprint": f"{_HERE}.infer.search_blueprint:prove_blueprint",
        "choice bias": f"{_HERE}.choice_bias:prove_choice_bias",
        "completed": f"{_HERE}.infer.search_blueprint:prove_completed",
        "documents": f"{_HERE}.loss_proofs:prove_documents",
        "entry": f"{_HERE}.layer_probes:prove_entry",
        "holds": f"{_HERE}.infer.search_blueprint:prove_holds",
        "loan": f"{_HERE}.layer_probes:prove_loan",
        "loss": f"{_HERE}.loss_proofs:prove_loss",
        "mixing": f"{_HERE}.mixing:prove_mixing",
        "own loss": f"{_HERE}.loss_proofs:prove_own_loss",
        "passage": f"{_HERE}.layer_probes:prove_passage",
        "reach": f"{_HERE}.layer_probes:prove_reach",
        "token loss": f"{_HERE}.loss_proofs:prove_token_loss",
        "unused": f"{_HERE}.layer_probes:prove_unused",
    },
)
