"""The user's choices for recomputation, offloading and compression: :class:`MemoryConfig`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError, check_count, check_names, check_switch, did_you_mean
from .declared import Spelled

RECOMPUTE = ("none", "full", "selective", "elementwise")  # named ways to recompute

_WORTH_A_COPY = 1 << 20
_WORTH_A_CODE = 1 << 16
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_HOW = (
    f"use one of {', '.join(RECOMPUTE)}, a number n for every n-th layer, names of modules like ['mlp'], or a budget "
    "like '8GiB'"
)


@dataclass(frozen=True)
class MemoryConfig(Spelled):
    """Activation checkpointing, offloading to the CPU, and activations in 8 bits.

    Every default leaves the model as it is.

    Attributes:
        recompute: activation checkpointing (Chen et al. 2016).

            - ``"none"``: nothing.
            - ``"full"``: every layer; only its input is kept.
            - ``"selective"``: scores, softmax, dropout and weighted sum of attention; queries, keys and values are kept
              (Korthikanti et al. 2022). It saves much where scores are kept (``"eager"``), and next to nothing under
              flash attention and SDPA, which keep none.
            - ``"elementwise"``: norms, activations, rotary embeddings, casts, dropout and copies, in every layer, from
              what its products and attention read, which is kept. No product and no exchange between ranks runs twice.
            - a number ``n``: every ``n``-th layer, beginning with the first.
            - names: modules in the layers, by the ends of their names, as ``["mlp", "input_layernorm"]``.
            - a budget, as ``"8GiB"``: as few layers as needed to keep this rank's activations below it, those with the
              least FLOPs per byte saved first. It holds for :attr:`tokens`, or else for the largest microbatch of the
              first step.
        recompute_keep: operators whose results are kept even in recomputed layers, as ``["aten.mm", "aten.addmm"]``: by
            torch's names, with or without the overload.
        tile_tokens: tokens of a tile: norms and MLPs run tile by tile, forward and backward, and only their inputs are
            there whole (Bekman et al. 2025, ALST). With ``recompute="full"`` or ``"elementwise"``, which then holds of
            the one layer that is computed again too.
        tokens: tokens of one microbatch of one batch rank, over all of its sequences, for which a budget holds.
        offload_activations: keep activations saved for the backward pass on the CPU: ``True``, or the size of the
            smallest tensor that is worth a copy, as ``"1MiB"``, the default of ``True``. For layers that are
            recomputed, this is their input.
        compress_activations: keep activations saved for the backward pass in 8 bits, by blocks of 256 with a scale each
            (bitsandbytes' kernels): ``True``, or the size of the smallest tensor that is worth it, as ``"64KiB"``,
            the default of ``True``. Gradients are rounded; the forward pass is not.
        offload_parameters: keep this rank's shards of parameters and gradients on the CPU, and update them there
            (FSDP2's ``CPUOffloadPolicy``); layers are gathered to the device one by one. Needs data ranks.
        offload_optimizer: keep the optimizer's state on the CPU and step there, while the next weights and gradients
            are copied (Ren et al. 2021, ZeRO-Offload): for optimizers made by :func:`hfscale.create_optimizer`; others
            are refused.

    Raises:
        ConfigError: a value is unknown or impossible.
    """

    recompute: str | int | Sequence[str] = "none"
    recompute_keep: Sequence[str] = ()
    tile_tokens: int | None = None
    tokens: int | None = None
    offload_activations: bool | str = False
    compress_activations: bool | str = False
    offload_parameters: bool = False
    offload_optimizer: bool = False

    def __post_init__(self) -> None:
        self._check_recompute()
        for name in ("offload_optimizer", "offload_parameters"):
            check_switch(name, getattr(self, name))
        for name in ("offload_activations", "compress_activations"):
            size = getattr(self, name)
            if not isinstance(size, bool) and (not isinstance(size, str) or not byte_count(size)):
                raise ConfigError(
                    f"{name}={size!r} is invalid: use True, False, or a size like '1MiB'"
                )
        check_names("recompute_keep", self.recompute_keep, '["aten.mm"]')
        given = self.recompute
        kept = tuple(self.recompute_keep)
        object.__setattr__(self, "recompute_keep", kept)
        if kept and not (isinstance(given, int) or given == "full" or self.budget is not None):
            raise ConfigError(
                f"recompute_keep={list(kept)} needs layers that are recomputed in full, and recompute={given!r} "
                "recomputes none: use recompute='full', a number or a budget with it"
            )
        if self.tile_tokens is not None:
            check_count("tile_tokens", self.tile_tokens)
            if given not in ("full", "elementwise"):
                raise ConfigError(
                    f"tile_tokens={self.tile_tokens} needs recompute='full' or 'elementwise', got recompute={given!r}: "
                    "use one of these, or leave tile_tokens out"
                )
        if self.tokens is not None:
            check_count("tokens", self.tokens)
        if self.tokens is not None and self.budget is None:
            raise ConfigError(
                f"tokens={self.tokens} needs a memory budget, and recompute={given!r} is not one: leave it out"
            )

    def _check_recompute(self) -> None:
        given = self.recompute
        if isinstance(given, str):
            if byte_count(given) == 0:
                raise ConfigError(
                    f"recompute={given!r} leaves no memory for activations: use 'full', or a larger budget like '8GiB'"
                )
            if given not in RECOMPUTE and self.budget is None:
                raise ConfigError(
                    f"recompute={given!r} is unknown: {did_you_mean(given, RECOMPUTE)}{_HOW}"
                )
        elif isinstance(given, int) and not isinstance(given, bool):
            check_count("recompute", given)
        elif isinstance(given, Sequence):
            like = '["mlp", "input_layernorm"]'
            check_names("recompute", given, like)
            if not given:
                raise ConfigError(
                    f"recompute must have at least one name, got []: pass names, as {like}, or 'none'"
                )
            object.__setattr__(self, "recompute", tuple(given))
        else:
            raise ConfigError(f"recompute={given!r} is unknown: {_HOW}")

    @property
    def least_offloaded(self) -> int | None:
        """Bytes of the smallest activation that is offloaded; ``None``: none are."""
        return _least(self.offload_activations, _WORTH_A_COPY)

    @property
    def least_compressed(self) -> int | None:
        """Bytes of the smallest activation that is kept in 8 bits; ``None``: none are."""
        return _least(self.compress_activations, _WORTH_A_CODE)

    @property
    def budget(self) -> int | None:
        """Bytes of activations that layers may keep; ``None`` if :attr:`recompute` is no budget."""
        return byte_count(self.recompute) or None if isinstance(self.recompute, str) else None


def _least(given: bool | str, default: int) -> int | None:
    return byte_count(given) if isinstance(given, str) else default if given else None


def byte_count(text: str) -> int | None:
    """Parse a size in bytes, like ``8GiB``, ``500 MB`` or ``1.5g``; ``None`` if ``text`` is no size."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        return None
    return int(float(match[1]) * _UNITS[match[2]])
