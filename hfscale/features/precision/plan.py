"""Check that parameters of a model can be cast to 16 bits."""

from ...models.precision import WIDENS_AROUND, WIDENS_INSIDE
from ...plan.drafting.draft import Draft


def plan_precision(draft: Draft) -> None:
    """Add a problem if parameters are to be cast (``"bf16_params"``) in a model that multiplies them with activations
    in 32 bits.
    """
    family = draft.config.model_type
    if draft.options.casts_parameters and family in (*WIDENS_INSIDE, *WIDENS_AROUND):
        draft.problem(
            f"mixed_precision='bf16_params' cannot be used with {family!r}, which widens activations to 32 bits, since "
            "16-bit parameters cannot be multiplied with 32-bit activations: use mixed_precision='bf16', which casts "
            "both"
        )
