"""Read weights by torchtitan's names for Llama 3, as transformers names and orders them.

torchtitan rotates neighbouring entries of a head, transformers one half against the other, so that rows of queries and
keys come in another order: entry ``2 i + half`` of a head there is entry ``half * d / 2 + i`` here.
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
    "output.weight": "lm_head.weight",  # of older versions
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
    """Read rows of ``source [heads * d, h]`` with both halves of each head side by side."""

    def __init__(self, source: TensorOnDisk, head_dim: int) -> None:
        self._source = source
        self._head_dim = head_dim
        self.shape = source.shape
        self.dtype = source.dtype

    def read(self, spans: Box) -> Tensor:
        """Return a copy of the box ``spans``; whole heads are read."""
        (start, stop), *rest = spans
        size = self._head_dim
        first = start // size * size
        last = -(-stop // size) * size
        rows = self._source.read(((first, last), *rest))
        heads = rows.unflatten(0, (-1, size // 2, 2)).transpose(1, 2).flatten(0, 2)
        return heads[start - first : stop - first].contiguous()


def is_torchtitans(names: Mapping[str, Any]) -> bool:
    """Return whether weights have torchtitan's names."""
    return _TABLE in names


def as_transformers(tensors: Mapping[str, TensorOnDisk], config: Any) -> dict[str, TensorOnDisk]:
    """Return the tensors by transformers' names, in its order of rows.

    Args:
        config: of the model; ``None`` if only names are asked for.

    Raises:
        CheckpointError: a name is not that of a Llama 3.
    """
    found = {}
    for key, tensor in tensors.items():
        name = _name(key)
        if name is None:
            raise CheckpointError(
                f"weights by torchtitan's names must be a Llama 3's, got {key}: {_TOOL}"
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
