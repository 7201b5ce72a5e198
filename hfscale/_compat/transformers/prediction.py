"""Multi-token-prediction layers (DeepSeek-AI 2024, V3, section 2.2), which transformers leaves out of its models.

Here they are a child of the model, ``mtp``, with a layer for each depth. In a checkpoint they have one of two forms::

    mtp.layers.0.mtp_block.*    model.layers.61.*                    mtp.layers.0.*
    mtp.layers.0.enorm.*        model.layers.61.enorm.*              mtp.pre_fc_norm_embedding.*
    mtp.layers.0.hnorm.*        model.layers.61.hnorm.*              mtp.pre_fc_norm_hidden.*
    mtp.layers.0.eh_proj.*      model.layers.61.eh_proj.*            mtp.fc.*
    mtp.layers.0.post_norm.*    model.layers.61.shared_head.norm.*   mtp.norm.*
"""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
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
from .caches import CACHES

PREDICTION = "mtp"  # the name of the layers in a model
PREDICTION_LOOKUP = f"{PREDICTION}.embed_tokens"
"""The model's embedding, once more: it may be on another pipeline stage than these layers."""

_Host: Any = MtpModel
_NO_CACHE = dict.fromkeys(CACHES & inspect.signature(MtpLayer.forward).parameters.keys())
_BY_NUMBER = {"mtp_block": "", "enorm": "enorm.", "hnorm": "hnorm.", "eh_proj": "eh_proj."}
_BY_NUMBER |= {"post_norm": "shared_head.norm."}
_APART = {"mtp_block": "layers.0.", "eh_proj": "fc.", "post_norm": "norm."}
_APART |= {"enorm": "pre_fc_norm_embedding.", "hnorm": "pre_fc_norm_hidden."}
_PART = re.compile(rf"(?:.*\.)?layers\.(\d+)\.({'|'.join(_APART)})\.(.+)")
_COPY = re.compile(r".*\.(embed_tokens|shared_head|shared_head\.head)\.weight")
_T = TypeVar("_T")


class PredictionLayer(MtpLayer):
    """Predict a token further ahead from ``[b, s, 2 h]``: embeddings beside the hidden states one depth before."""

    rope: dict[str, str]  # arguments of the rotary embedding, besides positions

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
        """Return hidden states ``[b, s, h]``; other arguments are those of the model's own layers."""
        given = {
            "attention_mask": None,
            "position_ids": None,
            "position_embeddings": None,
            **kwargs,
        }
        embeds, previous = hidden_states.chunk(2, -1)
        return super().forward(embeds, previous, **{**given, **_NO_CACHE})


class StoredNames:
    """Name the layers' tensors as a checkpoint does: ``prefixes`` maps those in the model to those in the checkpoint,
    and ``copies`` a tensor of the model to its other names there, as ``layers.61.shared_head.head.weight``.
    """

    def __init__(self, prefixes: dict[str, str], renamings: Any = ()) -> None:
        self.prefixes, self.copies, self._renamings = prefixes, dict[str, list[str]](), renamings

    def stored_keys(self, tensors: Mapping[str, _T]) -> dict[str, _T]:
        """Return tensors by their names in the checkpoint."""
        stored: dict[str, _T] = {}
        for name, tensor in tensors.items():
            ours = next((prefix for prefix in self.prefixes if name.startswith(prefix)), "")
            stored[self.prefixes.get(ours, "") + name.removeprefix(ours)] = tensor
            stored |= dict.fromkeys(self.copies.get(name, ()), tensor)
        return stored

    def read(
        self,
        model: Any,
        keys: Iterable[str],
    ) -> dict[str, str | None]:
        """Return stored key -> name in the model of a checkpoint's tensors of these layers, before the conversions of
        experts and the like, or ``None`` for a copy of another tensor; remember the checkpoint's prefixes.
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
                prefix = f"{PREDICTION}.layers.{part[1]}.{part[2]}."
                self.prefixes[prefix] = key.removesuffix(part[3])
                names[key] = prefix + part[3]
        return names


def prediction_depths(config: Any) -> int:
    """Return how many tokens ahead, besides the next one, a config's layers predict; refuse configs without any."""
    depths = getattr(config.get_text_config(), "num_mtp_layers", None)
    try:
        if not depths:
            raise ValueError(
                "its config has no num_nextn_predict_layers above 0 that transformers knows"
            )
        if not hasattr(_Host, "get_weight_conversions"):
            raise ValueError(
                "this version of transformers does not name the stored tensors of such layers"
            )
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
    model.add_module(PREDICTION, added)
    names = {id(module): name for name, module in model.named_modules()}
    model.all_tied_weights_keys[f"{PREDICTION_LOOKUP}.weight"] = f"{names[id(lookup)]}.weight"
    apart = any("mtp" in pattern for pattern in model._keys_to_ignore_on_load_unexpected or ())
    prefixes = {}
    for depth, part in ((depth, part) for depth in range(depths) for part in _APART):
        numbered = f"{names[id(decoder.layers)]}.{len(decoder.layers) + depth}.{_BY_NUMBER[part]}"
        prefixes[f"{PREDICTION}.layers.{depth}.{part}."] = (
            f"mtp.{_APART[part]}" if apart else numbered
        )
    model._hfscale_stored_names = StoredNames(prefixes, renamings)


def stored_names(model: Any) -> StoredNames:
    """Return what tensors of a model are called in its checkpoint."""
    return vars(model).get("_hfscale_stored_names") or StoredNames({})


def refuse_adapters_of_prediction(keys: Iterable[str], what: str) -> None:
    """Refuse adapters of these layers where the model that transformers builds is all there is."""
    if any(f".{PREDICTION}.layers." in key for key in keys):
        raise ConfigError(
            f"{what} is of multi-token-prediction layers too, which transformers leaves out: load both with "
            "hfscale.from_pretrained(base, peft_config=adapter, mtp_loss_weight=...), and call hfscale.merge_and_unload"
        )


@contextmanager
def without_prediction(model: Any) -> Iterator[None]:
    """Take the added layers out of a model inside the ``with`` block, so that it is what its class builds."""
    added = own_modules(model).pop(PREDICTION, None) if stored_names(model).prefixes else None
    try:
        yield
    finally:
        if added is not None:
            model.add_module(PREDICTION, added)
