"""Check that parameters of a model can be cast to 16 bits."""

from ...models.precision import WIDENS_AROUND, WIDENS_INSIDE
from ...plan.drafting.draft import Draft, Planned


def plan_precision(draft: Draft) -> None:
    """Report a problem (raised when the plan ``draft`` is complete) if the option ``"bf16_params"`` would cast
    parameters that the model multiplies with activations in 32 bits.
    """
    family = draft.config.model_type
    if draft.options.casts_parameters and family in (*WIDENS_INSIDE, *WIDENS_AROUND):
        draft.problem(
            f"mixed_precision='bf16_params' cannot be used with {family!r}: this model converts activations to 32 "
            "bits, which cannot be multiplied with 16-bit parameters: use mixed_precision='bf16', which casts both "
            "in each product"
        )


def scales_loss(model: Planned) -> bool:
    """Return whether the loss is scaled, for gradients in float16."""
    return model.options.mixed_precision == "fp16"


def replaces_kernels(model: Planned) -> bool:
    """Return whether modules are replaced by Liger's kernels."""
    return model.options.use_liger_kernel is not False


def copies_parameters(model: Planned) -> bool:
    """Return whether modules compute with 16-bit copies of parameters; over data ranks FSDP2 makes such copies."""
    options = model.options
    in_stages = model.plan.stages is not None and options.mixed_precision != "no"
    return model.plan.layout.data_world == 1 and (options.casts_parameters or in_stages)


def computes_in_16_bits(model: Planned) -> bool:
    """Return whether forward passes compute in another dtype than the weights'."""
    return model.options.mixed_precision != "no"
