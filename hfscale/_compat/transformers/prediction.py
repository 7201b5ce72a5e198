"""Multi-token-prediction layers: built by transformers' own class, and their names in checkpoints.

Transformers leaves them out of the model (DeepSeek-AI 2024, V3, section 2.2) and loads them for assisted decoding only.
Here they are a child of the model, ``mtp``, with a layer for each depth. In a checkpoint they have one of two forms::

    mtp.layers.0.mtp_block.*    model.layers.61.*                    mtp.layers.0.*
    mtp.layers.0.enorm.*        model.layers.61.enorm.*              mtp.pre_fc_norm_embedding.*
    mtp.layers.0.hnorm.*        model.layers.61.hnorm.*              mtp.pre_fc_norm_hidden.*
    mtp.layers.0.eh_proj.*      model.layers.61.eh_proj.*            mtp.fc.*
    mtp.layers.0.post_norm.*    model.layers.61.shared_head.norm.*   mtp.norm.*
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.core_model_loading import rename_source_key
from transformers.initialization import no_init_weights
from transformers.modeling_layers import MtpLayer, MtpModel
from transformers.modeling_utils import local_torch_dtype

from ...errors import ConfigError
from ..replaced import attribute_replaced
from ..torch import own_modules

PREDICTION = "mtp"
"""The name of the layers in a model."""
PREDICTION_LOOKUP = f"{PREDICTION}.embed_tokens"
"""The model's embedding, once more: it may be on another pipeline stage than these layers."""

_BY_NUMBER = {part: f"{part}." for part in ("enorm", "hnorm", "eh_proj")}
_BY_NUMBER |= {"mtp_block": "", "post_norm": "shared_head.norm."}
_APART = {"mtp_block": "layers.0.", "eh_proj": "fc.", "post_norm": "norm."}
_APART |= {"enorm": "pre_fc_norm_embedding.", "hnorm": "pre_fc_norm_hidden."}
_PART = re.compile(rf"(?:.*\.)?layers\.(\d+)\.({'|'.join(_APART)})\.(.+)")
_COPY = re.compile(r".*\.(embed_tokens|shared_head|shared_head\.head)\.weight")
_T = TypeVar("_T")


class PredictionLayer(MtpLayer):
    """Predict the next token but ``n`` from ``[b, s, 2 h]``: embeddings beside the hidden states one depth before."""

    rope: dict[str, str]

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
        """Return hidden states ``[b, s, h]``; other arguments are those of the model's own layers."""
        given = {"attention_mask": None, "position_ids": None, "position_embeddings": None, **kwargs}
        embeds, previous = hidden_states.chunk(2, -1)
        return super().forward(embeds, previous, **{**given, "past_key_values": None})


@dataclass
class StoredNames:
    """Hold what tensors are called in a checkpoint.

    Attributes:
        prefixes: of the layers' tensors in the model -> in the checkpoint.
        copies: a tensor of the model -> its other names in the checkpoint, as ``layers.61.shared_head.head.weight``.
    """

    prefixes: dict[str, str]
    copies: dict[str, list[str]] = field(default_factory=dict)

    def of(self, tensors: Mapping[str, _T]) -> dict[str, _T]:
        """Return tensors by their names in the checkpoint."""
        found: dict[str, _T] = {}
        for name, tensor in tensors.items():
            ours = next((prefix for prefix in self.prefixes if name.startswith(prefix)), "")
            stored = self.prefixes.get(ours, "") + name.removeprefix(ours)
            found |= dict.fromkeys([stored, *self.copies.get(name, ())], tensor)
        return found


def prediction_depths(config: Any) -> int:
    """Return how many tokens ahead, besides the next one, a config's layers predict; refuse configs without any."""
    depths = getattr(config.get_text_config(), "num_mtp_layers", None)
    try:
        if not depths:
            raise ValueError("its config has no num_nextn_predict_layers above 0 that transformers knows")
        if hasattr(config.get_mtp_config(), "chain_hidden_post_norm"):
            raise ValueError("its layers share a norm behind them")
    except ValueError as error:
        raise ConfigError(
            f"mtp_loss_weight does not fit {config.model_type!r}: {error}: leave it out, and saves carry such layers "
            "along as they are"
        ) from error
    return int(depths)


def attach_prediction(model: Any) -> None:
    """Add multi-token-prediction layers on the meta device to a new stock model."""
    depths, decoder, lookup = prediction_depths(model.config), model.get_decoder(), model.get_input_embeddings()
    with torch.device("meta"), local_torch_dtype(model.dtype), no_init_weights():
        host: Any = MtpModel(model, depths)
    added = nn.Module()
    added.layers = host.layers
    for depth, layer in enumerate(host.layers):
        layer.__class__ = PredictionLayer
        layer.rope = {"layer_type": host.config.layer_types[depth]} if host.has_per_layer_rope else {}
    tokens, width = lookup.weight.shape
    added.embed_tokens = nn.Embedding(tokens, width, lookup.padding_idx, device="meta")
    added.embed_tokens.weight = lookup.weight
    model.add_module(PREDICTION, added)
    names = {id(module): name for name, module in model.named_modules()}
    model.all_tied_weights_keys[f"{PREDICTION_LOOKUP}.weight"] = f"{names[id(lookup)]}.weight"
    layers, patterns = names[id(decoder.layers)], " ".join(model._keys_to_ignore_on_load_unexpected or ())
    prefixes = {}
    for depth, part in ((depth, part) for depth in range(depths) for part in _APART):
        number = len(decoder.layers) + depth
        stored = f"{PREDICTION}.{_APART[part]}" if "mtp" in patterns else f"{layers}.{number}.{_BY_NUMBER[part]}"
        prefixes[f"{PREDICTION}.layers.{depth}.{part}."] = stored
    model._hfscale_stored_names = StoredNames(prefixes)


def stored_names(model: Any) -> StoredNames:
    """Return what tensors of a model are called in its checkpoint."""
    found: StoredNames = vars(model).get("_hfscale_stored_names") or StoredNames({})
    return found


def read_stored_names(model: Any, keys: Iterable[str]) -> dict[str, str | None]:
    """Return the names that a checkpoint's multi-token-prediction tensors have in the model, and remember the others.

    Transformers' own conversions come after this: those of experts, for example.

    Returns:
        stored key -> the name, ``None`` for a copy of the embedding or the head.
    """
    config, names = model.config.get_text_config(), stored_names(model)
    first, count = config.num_hidden_layers, prediction_depths(model.config)
    with torch.device("meta"), no_init_weights(), attribute_replaced(model, "_weight_conversions", []):
        renamings: Any = MtpModel(model, count).get_weight_conversions(model)
    numbers = "|".join(str(first + depth) for depth in range(count))
    own = re.compile(rf"(.*\.)?(layers\.({numbers})|mtp)\..*")
    found: dict[str, str | None] = {}
    for key in filter(own.fullmatch, keys):
        part = _PART.fullmatch(rename_source_key(key, renamings, [])[0])
        if copy := _COPY.fullmatch(key):
            module = model.get_input_embeddings() if copy[1] == "embed_tokens" else model.get_output_embeddings()
            owner = next(name for name, parameter in model.named_parameters() if parameter is module.weight)
            names.copies.setdefault(model.all_tied_weights_keys.get(owner, owner), []).append(key)
            found[key] = None
        elif part is not None and int(part[1]) < count:
            prefix = f"{PREDICTION}.layers.{part[1]}.{part[2]}."
            names.prefixes[prefix] = key.removesuffix(part[3])
            found[key] = prefix + part[3]
    return found


@contextmanager
def without_prediction(model: Any) -> Iterator[None]:
    """Take the added layers out of a model inside the ``with`` block, so that it is what its class builds."""
    children = own_modules(model)
    added = children.pop(PREDICTION, None) if stored_names(model).prefixes else None
    try:
        yield
    finally:
        if added is not None:
            children[PREDICTION] = added
