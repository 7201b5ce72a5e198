"""Plan the division of a loss that the model takes itself, where it is a mean over rows or over labels."""

from .._host.transformers.classes import takes_argument
from ..families.facts import ask
from ..plan.own_loss import OwnLossPlan
from .draft import Draft


def plan_own_loss(draft: Draft) -> None:
    """Where ``train_step`` does not know the loss of a model: whether it can be divided all the same."""
    if not draft.no_step or not takes_argument(draft.model, "labels") or not takes_argument(draft.model, "input_ids"):
        return
    found = ask("own loss", draft.model)
    if found is not None:
        draft.features.append(OwnLossPlan(**found))
        draft.no_step = ""
