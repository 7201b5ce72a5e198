"""Read weights that have torchtitan's names for Llama 3, under transformers' names and in transformers' order of rows.

torchtitan rotates neighbouring entries of a head together; transformers rotates the first half of a head against the
second. So rows of queries and keys are ordered differently: entry ``2 i + half`` of a head in torchtitan is entry
``half * d / 2 + i`` in transformers.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...distributed.files.reader import Box, TensorOnDisk
from ...errors import CheckpointError

_TABLE = "tok_embeddings.weight"
_NAMES = {
    _TABLE: "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",  # in older versions
    "lm_head.weight": "lm_head.weight",
}
_IN_LAYERS = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_ROTATED = ("self_attn.q_proj", "self_attn.k_proj")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight")
_TOOL = (
    "convert it once with torchtitan's script (convert_to_hf), or save it with "
    "checkpoint.last_save_in_hf"
)


class HalvesApart(TensorOnDisk):
    """Read rows of ``source [heads * d, h]`` in transformers' order: the halves of each head one after the other."""

    def __init__(self, source: TensorOnDisk, head_dim: int) -> None:
        self._source = source
        self._head_dim = head_dim
        self.shape = source.shape
        self.dtype = source.dtype

    def read(self, spans: Box) -> Tensor:
        """Return a copy of the box ``spans``; all rows of its heads are read."""
        (start, stop), *rest = spans
        size = self._head_dim
        first = start // size * size
        last = -(-stop // size) * size
        rows = self._source.read(((first, last), *rest))
        heads = rows.unflatten(0, (-1, size // 2, 2)).transpose(1, 2).flatten(0, 2)
        return heads[start - first : stop - first].contiguous()


def is_torchtitans(names: Mapping[str, Any]) -> bool:
    """Return whether the names of weights are torchtitan's."""
    return _TABLE in names


def as_transformers(tensors: Mapping[str, TensorOnDisk], config: Any) -> dict[str, TensorOnDisk]:
    """Return the tensors by transformers' names, in transformers' order of rows.

    Args:
        config: the model's config; ``None`` if only the names are needed.

    Raises:
        CheckpointError: a name does not belong to a Llama 3 model.
    """
    found = {}
    for key, tensor in tensors.items():
        name = _name(key)
        if name is None:
            raise CheckpointError(
                f"weights with torchtitan's names must be those of a Llama 3 model, got {key}: {_TOOL}"
            )
        if config is not None and any(part in name for part in _ROTATED):
            text = config.get_text_config()
            size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
            tensor = HalvesApart(tensor, size)
        found[name] = tensor
    return found


def _name(key: str) -> str | None:
    if key in _NAMES:
        return _NAMES[key]
    match = _LAYER.fullmatch(key)
    if match is None:
        return None
    inside = _IN_LAYERS.get(match[2].replace("attention.qkv_linear.", "attention."))
    return None if inside is None else f"model.layers.{match[1]}.{inside}.weight"
