"""List the supported optimizers: HF Trainer's names (``transformers.training_args.OptimizerNames``), and a few more.

A name stands for a class, fixed options, and the options that a user may give. Options and defaults are those of
``transformers.trainer_optimizer``. Values that are given as strings are converted to numbers.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..cost.model.optimizer_bytes import BITSANDBYTES, WIDE_EMBEDDINGS, BitsAndBytesOptimizer
from ..errors import ConfigError

Options = dict[str, Any]
Parsers = Mapping[str, Callable[[Any], Any]]
"""Name of an option -> the function that parses a user's value, which may be text."""


def _parse_boolean(value: Any) -> bool:
    """Parse a boolean as HF Trainer does."""
    return value.lower() in ("true", "1", "yes") if isinstance(value, str) else bool(value)


def or_none(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a parser that returns ``None`` for ``None`` and ``"None"``, and calls ``convert`` for other values."""
    return lambda value: None if value in (None, "None") else convert(value)


def _floats(value: Any) -> tuple[float, ...]:
    return tuple(map(float, value))


@dataclass(frozen=True)
class OptimizerChoice:
    """Describe an optimizer name: class, options, and how it is built."""

    # Key of the function that builds it: ``torch``, ``bitsandbytes``, ``adafactor`` or ``muon``
    engine: str
    stock: str  # name of the stock class
    fixed: Options = field(default_factory=dict)  # options that the name implies
    takes: Parsers = field(default_factory=dict)  # options that a user may give
    adam: tuple[str, ...] = ()  # those of ``betas`` and ``eps`` that the optimizer has
    # converts the collected options to those of the stock class
    finish: Callable[[Options], Options] | None = None

    @property
    def betas(self) -> tuple[int, ...]:
        """The allowed lengths of ``betas``."""
        return (2, 3) if self.finish is _three_betas else (2,)

    def options(self, name: str, adam: Options, given: Options) -> Options:
        """Return the options of the stock class. Raise :class:`ConfigError` for unknown options, and for values that
        cannot be parsed.
        """
        unknown = [option for option in given if option not in self.takes]
        if unknown:
            raise ConfigError(
                f"{name!r} has no option {', '.join(unknown)}: it takes {', '.join(self.takes) or 'none'}"
                f"{' and ' + ', '.join(self.adam) if self.adam else ''}, in addition to lr and weight_decay"
            )
        options = {**{option: adam[option] for option in self.adam}, **self.fixed}
        for option, value in given.items():
            try:
                options[option] = self.takes[option](value)
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"{name!r}: {option}={value!r} cannot be read: {error}; pass a value of the right type"
                ) from error
        return self.finish(options) if self.finish else options


def _three_betas(options: Options) -> Options:
    """Collect AdEMAMix's three betas in one option: two like Adam's, and a slow one (Pagliardini et al. 2024)."""
    betas = (*options.pop("betas"), 0.9999)[:3]
    given = [options.pop(f"beta{number}", beta) for number, beta in enumerate(betas, 1)]
    return {**options, "betas": tuple(given)}


_KERNELS: Parsers = {
    "fused": or_none(_parse_boolean),
    "foreach": or_none(_parse_boolean),
}
_ADAM = ("betas", "eps")
_ADAMW: Parsers = {"amsgrad": _parse_boolean, **_KERNELS}


def _adamw(**fixed: Any) -> OptimizerChoice:
    return OptimizerChoice("torch", "AdamW", fixed, _ADAMW, _ADAM)


def _bitsandbytes(known: BitsAndBytesOptimizer) -> OptimizerChoice:
    options, adam, finish = _BITSANDBYTES_OPTIONS[known.stock]
    fixed = {"optim_bits": known.bits, **({"is_paged": True} if known.paged else {})}
    if known.bits == 8:
        options = {**options, "min_8bit_size": int, WIDE_EMBEDDINGS: _parse_boolean}
    return OptimizerChoice("bitsandbytes", known.stock, fixed, options, adam, finish)


_ADEMAMIX: Parsers = {
    **dict.fromkeys(("beta1", "beta2", "beta3", "alpha", "eps"), float),
    "t_alpha": or_none(int),
    "t_beta3": or_none(int),
}
_BITSANDBYTES_OPTIONS: dict[str, tuple[Parsers, tuple[str, ...], Any]] = {
    "Adam": ({}, _ADAM, None),
    "AdamW": ({}, _ADAM, None),
    "AdEMAMix": (_ADEMAMIX, _ADAM, _three_betas),
    "Lion": ({}, ("betas",), None),
    "RMSprop": (dict.fromkeys(("alpha", "momentum", "eps"), float), (), None),
}

CHOICES: dict[str, OptimizerChoice] = {
    "adamw_torch": _adamw(),
    "adamw_torch_fused": _adamw(fused=True),
    "sgd": OptimizerChoice(
        "torch",
        "SGD",
        {},
        {"momentum": float, "dampening": float, "nesterov": _parse_boolean, **_KERNELS},
    ),
    "adagrad": OptimizerChoice(
        "torch", "Adagrad", {}, {"lr_decay": float, "eps": float, **_KERNELS}
    ),
    "rmsprop": OptimizerChoice(
        "torch",
        "RMSprop",
        {},
        {
            "momentum": float,
            "alpha": float,
            "eps": float,
            "centered": _parse_boolean,
            "foreach": _KERNELS["foreach"],
        },
    ),
    "adafactor": OptimizerChoice(
        "adafactor",
        "Adafactor",
        {"scale_parameter": False, "relative_step": False},
        {
            "eps": _floats,
            "clip_threshold": float,
            "decay_rate": float,
            "beta1": or_none(float),
            "scale_parameter": _parse_boolean,
            "relative_step": _parse_boolean,
            "warmup_init": _parse_boolean,
        },
    ),
    "muon": OptimizerChoice(
        "muon",
        "Muon",
        {},
        {
            "momentum": float,
            "nesterov": _parse_boolean,
            "ns_coefficients": _floats,
            "ns_steps": int,
            "adjust_lr_fn": or_none(str),
            "ns_dtype": str,
            "adamw_lr": or_none(float),
            "experts": _parse_boolean,  # whether Muon updates experts too, each matrix by itself
            "split": dict,  # projection -> number of matrices that are fused in it
        },
        _ADAM,
    ),
    **{name: _bitsandbytes(known) for name, known in BITSANDBYTES.items()},
}

REFUSED = {
    "galore|apollo": "it projects full gradients, by code that does not support shards",
    "lomo": "it steps inside the backward pass, before gradients are summed over ranks",
    "xla|npu": "it is for another kind of device",
    "anyprecision|torch_[48]bit|grok|schedule_free|stable": "its package does not support shards",
}
"""Patterns of HF Trainer's names that are not supported, each with the reason."""


def find_choice(name: str) -> OptimizerChoice:
    """Return the :class:`OptimizerChoice` of a name. Raise :class:`ConfigError`, with all supported names, for an
    unknown or unsupported name.
    """
    plain = str(getattr(name, "value", name))
    if plain not in CHOICES:
        reason = next(
            (why for pattern, why in REFUSED.items() if re.search(pattern, plain)),
            "",
        )
        why = f"is not supported: {reason}" if reason else "is unknown"
        raise ConfigError(f"optimizer {name!r} {why}. Use one of {', '.join(sorted(CHOICES))}")
    return CHOICES[plain]


def parse_arguments(optim_args: str | Mapping[str, Any] | None) -> Options:
    """Parse HF Trainer's ``optim_args``: ``"momentum=0.9, nesterov=true"``, or a mapping. Raise :class:`ConfigError`
    for other values.
    """
    if isinstance(optim_args, Mapping | None):
        return dict(optim_args or {})
    pairs = []
    if isinstance(optim_args, str):
        pairs = [pair.split("=") for pair in optim_args.replace(" ", "").split(",") if pair]
    if not isinstance(optim_args, str) or any(len(pair) != 2 for pair in pairs):
        raise ConfigError(
            f"optim_args={optim_args!r} cannot be read: write 'name=value,name=value'"
        )
    return dict(pairs)
