"""Define exceptions, and checks that raise :class:`ConfigError`; messages name the wrong value and its remedy."""

import difflib
import math
import os
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any


class HFScaleError(Exception):
    """Root of every error raised by hfscale.

    Attributes:
        everywhere: whether every rank raises the error itself, so that the error need not be sent to other ranks.
    """

    everywhere = False


class ConfigError(HFScaleError, ValueError):
    """Raised if a field of a :class:`~hfscale.ParallelConfig`, or an argument, is unknown or has an invalid value."""


class PlanError(HFScaleError, ValueError):
    """Raised if a layout does not fit a model. The message lists every problem with its valid values."""


class MeshError(HFScaleError, RuntimeError):
    """Raised if the processes that were started do not fit the layout."""


class CheckpointError(HFScaleError, RuntimeError):
    """Raised if a checkpoint could not be read or written completely."""


class RankFailedError(CheckpointError):
    """Raised on every rank if any rank failed in a collective operation; ``failures`` maps failed ranks to messages."""

    everywhere = True

    def __init__(self, message: str, failures: dict[int, str]) -> None:
        super().__init__(message)
        self.failures = failures


def in_words(error: BaseException | None) -> str:
    """Return an error's message, after its class name for most of Python's built-in errors; empty only for ``None``."""
    if error is None:
        return ""
    text = str(error)
    plain = text and isinstance(error, OSError | HFScaleError)
    return text if plain else f"{type(error).__name__}: {text}".rstrip(": ")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class name if the message is empty."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def check_count(name: str, given: object, least: int = 1) -> None:
    """Raise :class:`ConfigError` unless ``given``, the value of the argument ``name``, is an integer >= ``least``."""
    if isinstance(given, bool) or not isinstance(given, Integral) or given < least:
        raise ConfigError(f"{name}={given!r} is invalid: use a whole number of at least {least}")


def check_number(
    name: str,
    given: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    infinite: bool = False,
) -> None:
    """Raise :class:`ConfigError` unless ``given``, the value of the argument ``name``, is a number > ``above``, >=
    ``least`` and <= ``most`` (each bound is optional), finite unless ``infinite``.
    """
    fits = isinstance(given, Real) and not isinstance(given, bool) and not math.isnan(given)
    fits = fits and (infinite or not math.isinf(given)) and (above is None or given > above)
    if not fits or (least is not None and given < least) or (most is not None and given > most):
        bounds = {"above": above, "of at least": least, "of at most": most}
        asked = " and ".join(
            f"{words} {bound:g}" for words, bound in bounds.items() if bound is not None
        )
        raise ConfigError(
            f"{name}={given!r} is invalid: use a {'' if infinite else 'finite '}number {asked}".rstrip()
        )


def check_choice(
    name: str,
    given: object,
    known: Sequence[str],
    more: str = "",
) -> None:
    """Raise :class:`ConfigError` unless ``given``, the value of the argument ``name``, is among ``known``; the message
    appends ``more``, a text that describes further valid values.
    """
    if given not in known:
        hint = did_you_mean(given, known)
        raise ConfigError(f"{name}={given!r} is unknown: {hint}use one of {', '.join(known)}{more}")


def check_names(name: str, given: Any, like: str) -> None:
    """Raise :class:`ConfigError` unless ``given`` is a list of names; ``like`` is an example for the message."""
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    if not listed or not all(isinstance(each, str) and each for each in given):
        raise ConfigError(f"{name}={given!r} is invalid: pass a list of names, such as {like}")


def check_switch(name: str, given: object) -> None:
    """Raise :class:`ConfigError` unless ``given``, the value of the argument ``name``, is ``True`` or ``False``."""
    if not isinstance(given, bool):
        raise ConfigError(f"{name}={given!r} is not a switch: use True or False")


def check_path(name: str, given: object) -> None:
    """Raise :class:`ConfigError` unless ``given``, the value of the argument ``name``, is a path."""
    if not isinstance(given, str | os.PathLike) or not str(given).strip():
        raise ConfigError(f"{name}={given!r} is invalid: use the path of a file or directory")


_AXES = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
_FORMS = (
    "{}",
    "{}_size",
    "{}_degree",
    "{}_parallel",
    "{}_parallel_size",
    "{}_parallel_degree",
    "{}_parallelism",
    "{}_model_parallel",
    "{}_model_parallel_size",
)
_SHARDED = (
    "dp",
    "dp_size",
    "data_parallel_size",
    "data_parallel",
    "dp_degree",
    "fsdp",
    "fsdp_size",
    "fsdp2",
    "zero",
)
_REPLICATED = ("ddp", "ddp_size", "replicas", "num_replicas")
_MEANT: dict[str, tuple[str, ...]] = {
    **{
        form.format(word): (f"{axis}_size", axis)
        for axis, name in _AXES.items()
        for word in (axis, name)
        for form in _FORMS
    },
    **dict.fromkeys(("mp", "mp_size", "model_parallel_size"), ("tp_size", "tp")),
    **dict.fromkeys(_SHARDED, ("dp_shard_size", "dp_shard")),
    **dict.fromkeys(_REPLICATED, ("dp_replicate_size", "dp_replicate")),
    **dict.fromkeys(
        ("ulysses_size", "sp_degree", "ring_size", "sequence_parallel_size"), ("cp_size", "cp")
    ),
    **dict.fromkeys(
        ("micro_batches", "num_micro_batches", "num_microbatches"),
        ("num_microbatches", "microbatches"),
    ),
    **dict.fromkeys(
        ("schedule", "pp_schedule", "pipeline_parallel_schedule"), ("pipeline_schedule", "schedule")
    ),
    **dict.fromkeys(
        ("seq_length", "seq_len", "max_seq_length", "block_size", "context_length"),
        ("sequence_length",),
    ),
    **dict.fromkeys(
        ("gradient_checkpointing", "activation_checkpointing", "recomputation"), ("recompute",)
    ),
    **dict.fromkeys(("lora_r", "lora_rank"), ("rank", "r")),
    **dict.fromkeys(("optim", "optimizer_name"), ("optimizer",)),
    **dict.fromkeys(("lr",), ("learning_rate", "lr")),
    # The launcher, not hfscale, sets the number of processes.
    **dict.fromkeys(
        ("gpu", "gpus", "num_gpus", "n_gpus", "ngpus", "nproc", "nproc_per_node"), ("gpus",)
    ),
    **dict.fromkeys(
        ("num_processes", "world_size", "devices", "device", "nodes", "nnodes"), ("gpus",)
    ),
}
"""Name of an option in other tools -> hfscale's names; the first of these that is valid in the call is suggested."""
_SUFFIXES = (".json", ".yaml", ".yml", ".safetensors", ".bin", ".pt", ".gguf")


def written_like_a_path(text: str) -> bool:
    """Return whether a text cannot be a Hub id, which is ``name`` or ``owner/name``."""
    odd = (
        text.startswith((".", "~", "/"))
        or "\\" in text
        or text.endswith("/")
        or text.count("/") > 1
    )
    return odd or os.path.isabs(text) or text.endswith(_SUFFIXES)


def meant(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the ``known`` name most similar to ``name`` (dashes count as underscores), or ``None`` if no name is
    similar. Names that are not in the table of synonyms need a similarity of ``cutoff`` or more, between 0 and 1.
    """
    plain = {each.lstrip("-").replace("-", "_"): each for each in known}
    asked = name.lstrip("-").replace("-", "_").lower()
    if asked in plain:
        return plain[asked]
    if asked in _MEANT:
        return next((plain[each] for each in _MEANT[asked] if each in plain), None)
    close = difflib.get_close_matches(asked, plain, 1, cutoff)
    return plain[close[0]] if close else None


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """Return ``did you mean 'x'? `` for the ``known`` name most similar to ``name``, or an empty text."""
    close = meant(name, known) if isinstance(name, str) else None
    return f"did you mean {close!r}? " if close else ""
