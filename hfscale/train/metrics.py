"""Numbers that the parts count during training, for logs."""

from torch import nn

from .runtime import runtime_of


def metrics(model: nn.Module) -> dict[str, float]:
    """Return numbers about the training so far, for a log; no communication, the same on every rank.

    Under ``mixed_precision="fp16"``: ``loss_scale``; ``steps_since_loss_scale_changed``; ``skipped_steps``, because a
    gradient overflowed on some rank; ``step_was_skipped``, 1.0 if the last one was. Empty otherwise.
    """
    runtime = runtime_of(model)
    return {name: value for part in runtime.parts for name, value in part.metrics(runtime).items()}
