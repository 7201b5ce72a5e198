"""Read tensors of GGUF files under transformers' names, and in transformers' order of rows.

llama.cpp stores some tensors differently, by architecture: rows of queries and keys are ordered by the pairs that are
rotated together, projections of experts are separate, and norms have one added. A rule per architecture maps
a box (a slice in every dim) of a tensor to the boxes of the file from which it is read. :data:`BY_SLICES` lists the
architectures that can be read by such rules; for others, transformers reads all weights at once.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..._compat.transformers.gguf import names_in_gguf
from ...distributed.files.pieces import Piece, TensorInPieces
from ...distributed.files.reader import Box, TensorOnDisk
from .gguf_file import GgufFile
from .titan_names import HalvesApart

_log = logging.getLogger(__name__)
_WEIGHT = ".weight"
_EXPERTS = "_exps.weight"
_FACTORS = "rope_freqs.weight"  # factors of Llama 3.1's rotary embeddings

_Rule = Callable[[str, TensorOnDisk, Any], TensorOnDisk]
"""Return the tensor that transformers has in place of a tensor in the file, given its name in the file, the tensor, and
the model's config.
"""


class _InFloat32(TensorOnDisk):
    """Read ``source`` in float32, and add ``added`` to each value."""

    def __init__(self, source: TensorOnDisk, added: float = 0.0) -> None:
        self._source = source
        self._added = added
        self.shape = source.shape
        self.dtype = torch.float32

    def read(self, spans: Box) -> Tensor:
        """Return a copy of the box ``spans``, one ``(start, stop)`` per dim."""
        values = self._source.read(spans).float()
        return values + self._added if self._added else values


def _as_it_is(name: str, tensor: TensorOnDisk, config: Any) -> TensorOnDisk:
    return tensor


def _by_pairs(name: str, tensor: TensorOnDisk, config: Any) -> TensorOnDisk:
    """Undo llama.cpp's order of rows, in which neighbouring rows are rotated together."""
    heads = 0
    if ".attn_q." in name:
        heads = config.num_attention_heads
    elif ".attn_k." in name:
        heads = config.num_key_value_heads
    return HalvesApart(tensor, tensor.shape[0] // heads) if heads else tensor


def _one_added(name: str, tensor: TensorOnDisk, config: Any) -> TensorOnDisk:
    return _InFloat32(tensor, -1.0) if name.endswith("norm.weight") else tensor


def _with_shared_expert(name: str, tensor: TensorOnDisk, config: Any) -> TensorOnDisk:
    is_gate = "ffn_gate_inp_shexp" in name and len(tensor.shape) == 1
    return tensor.viewed((1, *tensor.shape)) if is_gate else tensor


BY_SLICES: dict[str, _Rule] = {
    "llama": _by_pairs,  # Mistral's too
    "qwen2": _as_it_is,
    "qwen3": _as_it_is,
    "qwen2moe": _with_shared_expert,
    "qwen3moe": _as_it_is,
    "gemma2": _one_added,
    "gemma3": _one_added,
    "phi3": _as_it_is,
    "starcoder2": _as_it_is,
    "stablelm": _as_it_is,
    "command-r": _as_it_is,
}
"""llama.cpp's name of an architecture -> the rule that makes transformers' tensors of the file's tensors."""


def as_transformers(file: GgufFile, model: Any) -> dict[str, TensorOnDisk]:
    """Return the tensors of a file, in float32, by their names in a full ``model``, whose architecture must be in
    :data:`BY_SLICES`; tensors that transformers does not read are left out.
    """
    names = names_in_gguf(model, file.architecture)
    rule = BY_SLICES[file.architecture]
    config = model.config.get_text_config()
    found: dict[str, list[TensorOnDisk]] = {}
    others = []
    for key, tensor in sorted(file.slices().items()):
        name = names.get(key.removesuffix(_WEIGHT) if key.endswith(_EXPERTS) else key)
        if name is None:
            others.append(key)
            continue
        made = rule(key, tensor, config)
        plain = made if made.dtype == torch.float32 else _InFloat32(made)
        found.setdefault(name, []).append(plain)
    _warn_of_rotary(file, config, _FACTORS in others)
    if left := [key for key in others if key != _FACTORS]:
        _log.warning(
            "%s: %d tensors of this file are left out, because transformers does not read them (%s, for example)",
            file.path,
            len(left),
            left[0],
        )
    return {name: _joined(name, parts) for name, parts in found.items()}


def _warn_of_rotary(file: GgufFile, config: Any, factors: bool) -> None:
    """Warn if the file scales rotary embeddings, by ``factors`` or by its fields, but the config does not."""
    told = getattr(config, "rope_parameters", None) or {}
    # one mapping per kind of layer
    inner = [each for each in told.values() if isinstance(each, Mapping)]
    kinds = {each.get("rope_type", "default") for each in (inner or [told])}
    if (file.scaling != "none" or factors) and kinds == {"default"}:
        _log.warning(
            "%s scales rotary embeddings (%s), but the config that transformers makes of the file does not: pass the "
            "model's own config as config=",
            file.path,
            _FACTORS if factors else file.scaling,
        )


def _joined(name: str, parts: list[TensorOnDisk]) -> TensorOnDisk:
    """Return one tensor ``[experts, 2 * rows, columns]`` of gate and up projections, whose names sort in this order."""
    if len(parts) == 1:
        return parts[0]
    pieces = []
    rows = 0
    for part in parts:
        pieces.append(Piece((0, rows, 0), part))
        rows += part.shape[1]
    shape = (parts[0].shape[0], rows, parts[0].shape[2])
    return TensorInPieces(name, shape, torch.float32, pieces)
