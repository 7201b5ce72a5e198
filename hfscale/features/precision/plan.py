"""Plan the precision of parameters and products."""

from ...models.precision import WIDENS_AROUND, WIDENS_INSIDE
from ...plan.drafting.draft import Draft


def plan_precision(draft: Draft) -> None:
    """Record a problem where parameters are to be cast, and the model multiplies them with activations in 32 bits."""
    family = draft.config.model_type
    if draft.options.casts_parameters and family in (*WIDENS_INSIDE, *WIDENS_AROUND):
        draft.problem(
            f"mixed_precision='bf16_params' cannot be used with {family!r}, which widens activations to 32 bits, and "
            "parameters in 16 cannot be multiplied with them: use mixed_precision='bf16', which casts both"
        )
