"""Define the user's options for recomputation, offloading and compression: :class:`MemoryConfig`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError, check_count, check_names, check_switch, did_you_mean
from .declared import Spelled

RECOMPUTE = ("none", "full", "selective", "elementwise")  # names that ``recompute`` accepts

_WORTH_A_COPY = 1 << 20  # default of the smallest offloaded tensor, in bytes
_WORTH_A_CODE = 1 << 16  # default of the smallest compressed tensor, in bytes
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
    """Options of activation checkpointing, offloading to the CPU, and activations in 8 bits. All are off by default.

    Attributes:
        recompute: activation checkpointing (Chen et al. 2016).

            - ``"none"``: nothing is recomputed.
            - ``"full"``: every layer is recomputed from its input.
            - ``"selective"``: scores, softmax, dropout and weighted sum of attention are recomputed from queries, keys
              and values (Korthikanti et al. 2022). This saves much memory with ``"eager"`` attention, which keeps
              scores, and hardly any with flash attention and SDPA, which do not.
            - ``"elementwise"``: norms, activation functions, rotary embeddings, casts, dropout and copies are
              recomputed in every layer, from the inputs of matrix products and attention, which are kept. Matrix
              products, attention and communication do not run twice.
            - a number ``n``: every ``n``-th layer is recomputed, beginning with the first.
            - names: modules in the layers, by the ends of their names, like ``["mlp", "input_layernorm"]``.
            - a budget, like ``"8GiB"``: as few layers as needed to keep this rank's activations below the budget.
              Layers with the least FLOPs per saved byte come first. The budget holds for :attr:`tokens` or, by default,
              for the largest microbatch of the first step.
        recompute_keep: operators whose results are kept even in recomputed layers, by torch's names, like
            ``["aten.mm", "aten.addmm"]``; an overload may be added, like ``"aten.mm.default"``.
        tile_tokens: tokens of a tile: norms and MLPs run tile by tile, forward and backward, so that only their inputs
            are in memory for all tokens (Bekman et al. 2025, ALST). Needs ``recompute="full"``, or ``"elementwise"``.
            ``"full"`` then also recomputes elementwise operators in the layer that is being recomputed.
        tokens: tokens in a microbatch of one data-parallel rank, all sequences together, for which the budget of
            :attr:`recompute` holds.
        offload_activations: keep activations that are saved for the backward pass on the CPU: ``True``, or the size of
            the smallest tensor that is offloaded, like ``"1MiB"``, the default of ``True``. Of recomputed layers, the
            input is offloaded.
        compress_activations: keep activations that are saved for the backward pass in 8 bits, with a scale for each
            block of 256 (bitsandbytes' kernels): ``True``, or the size of the smallest tensor that is compressed, like
            ``"64KiB"``, the default of ``True``. Gradients are affected by rounding; the forward pass is not.
        offload_parameters: keep this rank's shards of parameters and gradients on the CPU, and update them there
            (FSDP2's ``CPUOffloadPolicy``); layers are gathered to the device one by one. Needs data ranks.
        offload_optimizer: keep the optimizer's state on the CPU and step there, while the next weights and gradients
            are copied (Ren et al. 2021, ZeRO-Offload). Only for optimizers made by :func:`hfscale.create_optimizer`.

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
                f"recompute_keep={list(kept)} needs layers that are recomputed in full, but recompute={given!r} "
                "recomputes none: use recompute='full', a number of layers or a budget like '8GiB', or leave "
                "recompute_keep out"
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
                f"tokens={self.tokens} needs a memory budget in recompute, but recompute={given!r} is not a budget: "
                "leave tokens out, or use a budget like recompute='8GiB'"
            )

    def _check_recompute(self) -> None:
        given = self.recompute
        if isinstance(given, str):
            if byte_count(given) == 0:
                raise ConfigError(
                    f"recompute={given!r} is a budget of 0 bytes, which leaves no memory for activations: use 'full', "
                    "or a larger budget like '8GiB'"
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
                    f"recompute must have at least one name, got []: pass names, like {like}, or 'none'"
                )
            object.__setattr__(self, "recompute", tuple(given))
        else:
            raise ConfigError(f"recompute={given!r} is unknown: {_HOW}")

    @property
    def least_offloaded(self) -> int | None:
        """Bytes of the smallest activation that is offloaded; ``None``: activations are not offloaded."""
        return _least(self.offload_activations, _WORTH_A_COPY)

    @property
    def least_compressed(self) -> int | None:
        """Bytes of the smallest activation that is kept in 8 bits; ``None``: activations are not compressed."""
        return _least(self.compress_activations, _WORTH_A_CODE)

    @property
    def budget(self) -> int | None:
        """Bytes of activations that the layers of a rank may keep; ``None`` if :attr:`recompute` is not a budget."""
        return byte_count(self.recompute) or None if isinstance(self.recompute, str) else None


def _least(given: bool | str, default: int) -> int | None:
    return byte_count(given) if isinstance(given, str) else default if given else None


def byte_count(text: str) -> int | None:
    """Return the number of bytes of a size like ``8GiB``, ``500 MB`` or ``1.5g``; ``None`` if ``text`` is not a
    size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        return None
    return int(float(match[1]) * _UNITS[match[2]])
