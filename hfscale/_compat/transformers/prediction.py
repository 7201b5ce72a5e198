"""Multi-token-prediction layers (DeepSeek-AI 2024, V3, section 2.2), which transformers' models leave out.

In hfscale they are a child of the model, ``mtp``, with a layer per depth (left); checkpoints have two forms (right)::

    mtp.layers.0.mtp_block.*    model.layers.61.*                    mtp.layers.0.*
    mtp.layers.0.enorm.*        model.layers.61.enorm.*              mtp.pre_fc_norm_embedding.*
    mtp.layers.0.hnorm.*        model.layers.61.hnorm.*              mtp.pre_fc_norm_hidden.*
    mtp.layers.0.eh_proj.*      model.layers.61.eh_proj.*            mtp.fc.*
    mtp.layers.0.post_norm.*    model.layers.61.shared_head.norm.*   mtp.norm.*
"""

import inspect
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import rename_source_key
from transformers.initialization import no_init_weights
from transformers.modeling_layers import MtpLayer, MtpModel
from transformers.modeling_utils import local_torch_dtype

from ...errors import ConfigError
from ..replaced import attribute_replaced
from .added_layers import AddedLayers, StoredNames
from .caches import CACHES

_NAME = "mtp"
_Host: Any = MtpModel
_NO_CACHE = dict.fromkeys(CACHES & inspect.signature(MtpLayer.forward).parameters.keys())
_BY_NUMBER = {"mtp_block": "", "enorm": "enorm.", "hnorm": "hnorm.", "eh_proj": "eh_proj."}
_BY_NUMBER |= {"post_norm": "shared_head.norm."}
_APART = {"mtp_block": "layers.0.", "eh_proj": "fc.", "post_norm": "norm."}
_APART |= {"enorm": "pre_fc_norm_embedding.", "hnorm": "pre_fc_norm_hidden."}
_PART = re.compile(rf"(?:.*\.)?layers\.(\d+)\.({'|'.join(_APART)})\.(.+)")
_COPY = re.compile(r".*\.(embed_tokens|shared_head|shared_head\.head)\.weight")


class PredictionLayer(MtpLayer):
    """Predict one token further ahead than the preceding layer. The input ``[b, s, 2 * hidden_size]`` concatenates
    token embeddings and the preceding layer's output.
    """

    rope: dict[str, str]  # arguments of the rotary embedding other than positions

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
        """Return hidden states ``[b, s, h]``; further arguments are those of the model's own layers."""
        given = {
            "attention_mask": None,
            "position_ids": None,
            "position_embeddings": None,
            **kwargs,
        }
        embeds, previous = hidden_states.chunk(2, -1)
        return super().forward(embeds, previous, **{**given, **_NO_CACHE})


class _StoredNames(StoredNames):
    def __init__(self, prefixes: dict[str, str], renamings: Any) -> None:
        super().__init__(prefixes)
        self._renamings = renamings

    def read(self, model: Any, keys: Iterable[str]) -> dict[str, str | None]:
        """Map the checkpoint keys of the prediction layers to names in the model, or to ``None`` for copies of the
        embedding and the head. The keys are those of numbered layers after the model's own, or have a prefix of their
        own (``mtp``).
        """
        first = model.config.get_text_config().num_hidden_layers
        count = prediction_depths(model.config)
        numbers = "|".join(str(first + depth) for depth in range(count))
        names: dict[str, str | None] = {}
        for key in filter(re.compile(rf"(.*\.)?(layers\.({numbers})|mtp)\..*").fullmatch, keys):
            part = _PART.fullmatch(rename_source_key(key, self._renamings, [])[0])
            if copy := _COPY.fullmatch(key):
                module = (
                    model.get_input_embeddings()
                    if copy[1] == "embed_tokens"
                    else model.get_output_embeddings()
                )
                owner = next(
                    name
                    for name, parameter in model.named_parameters()
                    if parameter is module.weight
                )
                self.copies.setdefault(model.all_tied_weights_keys.get(owner, owner), []).append(
                    key
                )
                names[key] = None
            elif part is not None and int(part[1]) < count:
                prefix = f"{_NAME}.layers.{part[1]}.{part[2]}."
                self.prefixes[prefix] = key.removesuffix(part[3])
                names[key] = prefix + part[3]
        return names


def prediction_depths(config: Any) -> int:
    """Return the number of multi-token-prediction layers in a config: the first predicts the token after the next one,
    and each further layer one token further ahead. Raise :class:`ConfigError` for configs without such layers.
    """
    depths = getattr(config.get_text_config(), "num_mtp_layers", None)
    try:
        if not depths:
            raise ValueError(
                "the config must have a num_nextn_predict_layers above 0 that this version of transformers reads"
            )
        if not hasattr(_Host, "get_weight_conversions"):
            raise ValueError(
                "this version of transformers cannot convert the names of the stored tensors of "
                "multi-token-prediction layers"
            )
        if hasattr(config.get_mtp_config(), "chain_hidden_post_norm"):
            raise ValueError(
                "the model's multi-token-prediction layers share a norm that follows them (chain_hidden_post_norm), "
                "which hfscale does not support"
            )
    except ValueError as error:
        raise ConfigError(
            f"mtp_loss_weight does not fit {config.model_type!r}: {error}: leave mtp_loss_weight out (saves then copy "
            "the multi-token-prediction layers unchanged)"
        ) from error
    return int(depths)


def _add(model: Any) -> None:
    """Add multi-token-prediction layers on the meta device to a new stock model."""
    depths = prediction_depths(model.config)
    decoder = model.get_decoder()
    lookup = model.get_input_embeddings()
    with torch.device("meta"), local_torch_dtype(model.dtype), no_init_weights():
        host = _Host(model, depths)
    with attribute_replaced(model, "_weight_conversions", []):
        renamings = host.get_weight_conversions(model)
    added: Any = nn.Module()
    added.layers, (tokens, width) = host.layers, lookup.weight.shape
    for depth, layer in enumerate(host.layers):
        layer.__class__ = PredictionLayer
        layer.rope = (
            {"layer_type": host.config.layer_types[depth]} if host.has_per_layer_rope else {}
        )
    added.embed_tokens = nn.Embedding(tokens, width, lookup.padding_idx, device="meta")
    added.embed_tokens.weight = lookup.weight
    model.add_module(_NAME, added)
    names = {id(module): name for name, module in model.named_modules()}
    model.all_tied_weights_keys[f"{PREDICTION.lookup}.weight"] = f"{names[id(lookup)]}.weight"
    apart = any("mtp" in pattern for pattern in model._keys_to_ignore_on_load_unexpected or ())
    prefixes = {}
    for depth, part in ((depth, part) for depth in range(depths) for part in _APART):
        numbered = f"{names[id(decoder.layers)]}.{len(decoder.layers) + depth}.{_BY_NUMBER[part]}"
        prefixes[f"{_NAME}.layers.{depth}.{part}."] = f"mtp.{_APART[part]}" if apart else numbered
    model._hfscale_added = PREDICTION, _StoredNames(prefixes, renamings)


PREDICTION = AddedLayers(
    name=_NAME,
    words="multi-token-prediction layers",
    option="mtp_loss_weight",
    decoder="mtp_block",
    add=_add,
)
