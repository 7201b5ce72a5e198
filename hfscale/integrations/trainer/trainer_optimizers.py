"""Create the optimizer that ``TrainingArguments`` name, over shards."""

import copy
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..._compat.transformers.trainer import StockTrainer
from ...config.environment import started_processes
from ...cost.model.optimizer_bytes import BITSANDBYTES, WIDE_EMBEDDINGS
from ...optim import create_optimizer
from ...optim.catalog import CHOICES, find_choice, parse_arguments

OF_BACKWARD = frozenset(
    {"lomo", "adalomo"}
)  # these step during the backward pass, and work only in one process


def optimizer_name(arguments: Any) -> str:
    """Return the name of the optimizer in ``TrainingArguments``."""
    return str(getattr(arguments.optim, "value", arguments.optim))


def check_optimizer(arguments: Any) -> None:
    """Check that hfscale supports the optimizer that the arguments name, and that the optimizer accepts
    ``optim_args``.
    """
    name = optimizer_name(arguments)
    if left_to_host(name):
        return
    adam = {"betas": (arguments.adam_beta1, arguments.adam_beta2), "eps": arguments.adam_epsilon}
    choice = find_choice(name)
    given = parse_arguments(arguments.optim_args)
    # These optimizers have their own arguments.
    unheard = {*_unheard_options(arguments, given)} & {*choice.adam}
    choice.options(
        name, adam, {option: value for option, value in given.items() if option not in unheard}
    )


def left_to_host(name: str) -> bool:
    """Return whether stock Trainer creates the optimizer ``name``: in one process, if hfscale has no sharded version of
    it.
    """
    return started_processes() == 1 and name not in CHOICES


def named_optimizer(trainer: Any, model: nn.Module) -> Any:
    """Return the optimizer of ``args.optim``, or ``None`` if Trainer creates the optimizer: because the script chooses
    another one, or because hfscale has no sharded version and there is one process.
    """
    args = trainer.args
    kind = type(trainer)
    stock = StockTrainer
    overridden = kind.get_optimizer_cls_and_kwargs is not stock.get_optimizer_cls_and_kwargs
    name = optimizer_name(args)
    if trainer.optimizer_cls_and_kwargs is not None or overridden or left_to_host(name):
        return None
    groups = None
    # The subclass chooses which parameters decay.
    if kind.get_decay_parameter_names is not stock.get_decay_parameter_names:
        names = set(trainer.get_decay_parameter_names(model))
        trained = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]
        groups = [
            {
                "params": [each for name, each in trained if (name in names) == decays],
                "weight_decay": rate,
            }
            for decays, rate in ((True, args.weight_decay), (False, 0.0))
        ]
    return create_optimizer(
        model,
        args.optim,
        groups=groups,
        lr=args.learning_rate,
        weight_decay=args.weight_decay,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        optim_args=heard_options(args) | _as_trainer_steps_embeddings(args),
    )


def _as_trainer_steps_embeddings(arguments: Any) -> dict[str, Any]:
    """Return the option that keeps embeddings' states in 32 bits if other states have 8 bits, like stock Trainer."""
    known = BITSANDBYTES.get(optimizer_name(arguments))
    return {WIDE_EMBEDDINGS: True} if known is not None and known.bits == 8 else {}


def heard_options(arguments: Any) -> dict[str, Any]:
    """Return those ``optim_args`` that ``transformers.Trainer`` uses. Warn of options that Trainer ignores: hfscale
    ignores these, too, so that results stay equal.
    """
    given = parse_arguments(arguments.optim_args)
    unheard = _unheard_options(arguments, given)
    if unheard:
        warnings.warn(
            f"TrainingArguments(optim_args={arguments.optim_args!r}): transformers.Trainer ignores "
            f"{', '.join(unheard)} for this optimizer, and so does hfscale: to use it, give the trainer "
            "optimizers=(hfscale.create_optimizer(model, name, lr=..., optim_args=...), None)",
            stacklevel=4,
        )
    return {name: value for name, value in given.items() if name not in unheard}


def _unheard_options(arguments: Any, given: Mapping[str, Any]) -> list[str]:
    """Return the options in ``optim_args`` that Trainer ignores for this ``optim``."""

    def made(options: str | None) -> Any:
        asked = copy.copy(arguments)
        asked.optim_args = options
        return StockTrainer.get_optimizer_cls_and_kwargs(asked)

    usual = made(None) if given else None
    return [name for name, value in given.items() if made(f"{name}={value}") == usual]
