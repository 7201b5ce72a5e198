"""Create the optimizer that ``TrainingArguments`` name, over shards."""

import warnings
from typing import Any

from torch import nn

from ..._compat.transformers.trainer import chooses_optimizer, groups_by_decay, unheard_options
from ...optim import create_optimizer
from ...optim.catalog import parse_arguments


def named(trainer: Any, model: nn.Module) -> Any:
    """Return the optimizer of ``args.optim``, or ``None`` if the script chooses another, which Trainer creates.

    Weight decay follows the subclass's choice of parameters.
    """
    args = trainer.args
    if trainer.optimizer_cls_and_kwargs is not None or chooses_optimizer(trainer):
        return None
    return create_optimizer(
        model,
        args.optim,
        groups=groups_by_decay(trainer, model),
        lr=args.learning_rate,
        weight_decay=args.weight_decay,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        optim_args=heard_options(args),
    )


def heard_options(arguments: Any) -> dict[str, Any]:
    """Return the ``optim_args`` that ``transformers.Trainer`` uses, so that a script logs the same; warn of others."""
    given = parse_arguments(arguments.optim_args)
    unheard = unheard_options(arguments, given)
    if unheard:
        warnings.warn(
            f"TrainingArguments(optim_args={arguments.optim_args!r}): transformers.Trainer makes nothing of "
            f"{', '.join(unheard)} for this optimizer, and nor does this one; to have it, give the trainer "
            "optimizers=(hfscale.create_optimizer(model, name, lr=..., optim_args=...), None)",
            stacklevel=4,
        )
    return {name: value for name, value in given.items() if name not in unheard}
