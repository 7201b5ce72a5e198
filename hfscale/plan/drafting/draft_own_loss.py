"""Plan how to divide a loss that the model computes itself, where it is a mean over rows or over labels."""

from ..._compat.transformers.classes import takes_argument
from ...models.facts import ask
from ..own_loss import OwnLossPlan
from .draft import Draft


def plan_own_loss(draft: Draft) -> None:
    """Plan the division of a model's own loss, where ``train_step`` does not know it."""
    if not draft.no_step or not takes_argument(draft.model, "labels") or not takes_argument(draft.model, "input_ids"):
        return
    found = ask("own loss", draft.model)
    if found is not None:
        draft.features.append(OwnLossPlan(**found))
        draft.no_step = ""
