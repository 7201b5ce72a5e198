"""Make the config of a tiny copy (*clone*) of a model: the same classes and the same options, but small sizes.

``hfscale verify`` and the family sweep train clones in a layout and in one process. Blueprints (which projections are
sharded, and how) are proved on clones.
"""

import copy
from collections.abc import Mapping
from contextlib import suppress
from inspect import signature
from math import prod
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from .fields import HEAD_FIELDS, LENGTHS, field, text_config
from .module_kinds import EXPERT_FIELDS

HEADS = 4
HEAD_DIM = 8
LAYERS = 2
VOCABULARY = 67
EXPERTS = 4
HIDDEN = HEADS * HEAD_DIM

# Size in the clone -> the config fields that get this size. Fields not listed here keep their values.
_BECOMES: dict[int, str] = {
    VOCABULARY: "vocab_size decoder_vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    HIDDEN: """hidden_size n_embd d_model emb_dim embedding_size attention_hidden_size word_embed_proj_dim embedding_dim
        lru_width input_embedding_size output_embedding_size dim pooler_hidden_size projection_size out_hidden_size
        text_hidden_size adapter_in_dim""",
    48: """intermediate_size ffn_dim n_inner d_ff dim_ff dff decoder_ffn_dim encoder_ffn_dim d_inner ffn_hidden_size
        intermediate_size_mlp dense_intermediate_size feed_forward_size ff_dim mlp_dim hidden_dim""",
    24: """moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size
        shared_experts_intermediate_size moe_shared_expert_intermediate_size""",
    2: "num_experts_per_tok moe_topk moe_k num_experts_per_token",
    HEADS: """num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads
        attention_heads num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads
        linear_num_heads qk_rope_head_dim qk_nope_head_dim rotary_dim""",
    HEAD_DIM: """head_dim kv_channels dim_head v_head_dim attention_head_dim swa_head_dim d_head qk_head_dim d_kv
        mamba_chunk_size mamba_n_heads mamba_d_head mamba_num_heads mamba_head_dim
        linear_head_dim linear_key_head_dim linear_value_head_dim""",
    16: """mamba_d_state ssm_state_size q_lora_rank kv_lora_rank o_lora_rank loop_gate_rank
        rel_extent""",
    2
    * HIDDEN: "max_position_embeddings n_positions n_ctx model_max_length max_seq_len mamba_d_ssm",
    1: "n_group topk_group num_expert_group mamba_n_groups",
    0: "num_nextn_predict_layers",
}
_SMALL = {name: size for size, names in _BECOMES.items() for name in names.split()}
_SMALL |= dict.fromkeys(EXPERT_FIELDS, EXPERTS)
_CHOSEN = _BECOMES[2].split()
_EMBEDDED = "word_embed_proj_dim"
_SHARED = "num_kv_shared_layers"
_LOOP_START = "loop_layer_index_start"
_LOOP_END = "loop_layer_index_end"
_RESIDUAL_BLOCK = "n_layers_per_attn_res_block"
_LAYER_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_blocks",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
)
_ROPE = ("rope_parameters", "rope_scaling")
_KEY_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "swa_num_key_value_heads",
    "n_kv_heads",
    "n_head_kv",
    "kv_heads",
)
DROPOUT_WORDS = ("dropout", "pdrop", "drop_rate", "drop_path", "layerdrop", "jitter")
_NAMED = {*_SMALL, *_LAYER_COUNTS, *_KEY_HEADS}
# Backbones have lists with one entry per stage, and may count their stages as layers.
_STAGES = 8
PER_LAYER = (
    "layer_types",
    "mlp_layer_types",
    "no_rope_layers",
    "attention_layers",
    "layers_block_type",
    "mixer_types",
)
"""Fields with one entry per layer. A clone gets as many different entries as it has layers."""


def tiny_clone(
    config: PreTrainedConfig, *, layers: int = LAYERS, **changes: Any
) -> PreTrainedConfig:
    """Return a tiny config of the same class, with ``layers`` layers and without dropout. Then set the fields in
    ``changes``; the fields of a nested config are given as a dict.
    """
    whole = _fields(config)
    left_out = {"transformers_version", "model_type"}
    if "stage_names" in whole:  # a backbone: its stage names follow from its number of layers
        left_out |= {"out_features", "out_indices", "stage_names"}
    whole = {key: value for key, value in whole.items() if key not in left_out}
    made = type(config)(**merged(_shrink_config(whole, layers, type(config)), changes))
    # Token classification heads use a dropout of 0.1 if the config has no value.
    if getattr(made, "classifier_dropout", None) is None:
        made.classifier_dropout = 0.0
    return made


def _fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Return a config's fields with the values of its attributes. ``to_dict`` may differ: Dory's config returns other
    numbers of layers for files.
    """
    fields = config.to_dict()
    for name, written in fields.items():
        own = vars(config).get(name, written)
        if type(own) is type(written) and type(own) in (int, list):
            fields[name] = copy.deepcopy(own)
    return fields


def layers_of_every_kind(config: Any) -> int:
    """Return the number of layers that a clone needs in order to have every kind of layer that the config lists."""
    text = text_config(config)
    listed = (field(text, name) for name in ("layer_types", "layers_block_type"))
    kinds = max((len(set(kind)) for kind in listed if isinstance(kind, (list, tuple))), default=1)
    return max(LAYERS, kinds + shares_keys(config))


def shares_keys(config: Any) -> bool:
    """Return whether some layers read the keys and values of other layers."""
    return bool(field(text_config(config), _SHARED))


def first_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """Return the config of the first ``layers`` layers; all other sizes are unchanged."""
    shortened = copy.deepcopy(config)
    for part in {
        id(part): part for part in (shortened, shortened.get_text_config(decoder=True))
    }.values():
        count = getattr(part, "num_hidden_layers", None)
        # The last layers of the model are those that read other layers' keys and values.
        if type(count) is int and type(getattr(part, _SHARED, None)) is int:
            setattr(
                part,
                _SHARED,
                max(0, min(count, layers) - (count - getattr(part, _SHARED))),
            )
        left = layers
        for name, size in _sections_of(vars(part), count).items():
            setattr(part, name, min(size, left))
            left -= min(size, left)
        for name, value in list(vars(part).items()):
            if name in _LAYER_COUNTS and type(value) is int:
                setattr(part, name, min(value, layers))
            elif (
                isinstance(value, (list, tuple))
                and (name in PER_LAYER or len(value) == count)
                and value
            ):
                setattr(part, name, value[:layers])
    return shortened


def merged(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return ``fields`` updated by ``changes``; nested configs are updated field by field."""
    result = dict(fields)
    for name, value in changes.items():
        inside = (
            isinstance(value, dict)
            and isinstance(result.get(name), dict)
            and "model_type" in result[name]
        )
        result[name] = merged(result[name], value) if inside else value
    return result


def _derived(
    kind: type[PreTrainedConfig], whole: dict[str, Any], small: dict[str, Any]
) -> list[str]:
    """Return the attributes in ``small`` that must be omitted, since the class computes a small value for them from
    other fields.
    """
    fields = {*signature(kind.__init__).parameters, *kind.attribute_map}
    candidates = [
        name for name in small if name in _SMALL and name not in fields and type(whole[name]) is int
    ]
    if not candidates:
        return []
    try:
        made = kind(
            **{
                name: value
                for name, value in small.items()
                if name not in (*candidates, "model_type")
            }
        )
    except Exception:  # stock code raises various errors for missing fields
        return []
    own = {name: getattr(made, name) for name in candidates if hasattr(made, name)}
    return [name for name, value in own.items() if value != whole[name] or value <= small[name]]


def _shrink(
    fields: dict[str, Any], layers: int, kind: type[PreTrainedConfig] | None = None
) -> dict[str, Any]:
    """Return all fields of a config with small sizes. The config's class ``kind`` maps some names to common names."""
    whole = dict(fields)
    known = _aliases(kind, fields)
    kept = _kept_layers(fields, known, layers)
    # Backbones have lists of heads, one number per stage, which keep their values.
    heads = next(
        (fields[name] for name in HEAD_FIELDS if fields.get(name) and type(fields[name]) is int),
        None,
    )
    kinds = fields.get("layer_types")
    hidden = fields.get("hidden_size")
    width = fields.get("head_dim") or (hidden if isinstance(hidden, int) else 0) // (heads or 1)
    for name, value in list(fields.items()):
        if isinstance(value, dict) and "model_type" in value:
            fields[name] = _shrink_config(
                value, layers, _class_inside(kind, name, value["model_type"])
            )
        elif isinstance(value, dict) and name in _ROPE and isinstance(width, int) and width:
            fields[name] = {key: _small_sections(key, item, width) for key, item in value.items()}
        elif isinstance(value, (list, tuple)):
            fields[name] = _small_list(name, value, layers, heads, kept)
        else:
            fields[name] = _small_value(known.get(name, name), value, layers, heads)
    fields.update(_related(whole, fields, layers, kept[0]))
    if isinstance(fields.get("per_layer_config"), dict):
        fields["per_layer_config"] = _follow(
            fields["per_layer_config"], kinds, fields.get("layer_types"), layers
        )
    return fields


def _related(
    whole: dict[str, Any], small: dict[str, Any], layers: int, count: int
) -> dict[str, int]:
    """Return the fields of a clone that depend on other fields in the same way as in the original config ``whole``,
    which has ``count`` layers.
    """
    sizes = {**_sections(whole, layers, count), **_repeated(whole, layers)}
    if type(whole.get(_EMBEDDED)) is int and whole[_EMBEDDED] != whole.get("hidden_size"):
        # OPT projects embeddings of another width to hidden states, and back
        sizes[_EMBEDDED] = HIDDEN // 2
    inner: list[Any] = [
        whole.get(name) for name in ("expand", "hidden_size", "num_heads", "head_dim")
    ]
    # Mamba-2 requires expand * hidden_size == num_heads * head_dim.
    if all(type(number) is int for number in inner) and prod(inner[:2]) == prod(inner[2:]):
        sizes["num_heads"] = small["expand"] * HIDDEN // small["head_dim"]
    if type(whole.get(_SHARED)) is int:
        kinds = whole.get("layer_types")
        different = len(set(kinds)) if isinstance(kinds, (list, tuple)) else 1
        # If all layers share keys and values, the layers read those of another model. Otherwise at least one layer of
        # each kind keeps its own keys and values.
        sizes[_SHARED] = (
            layers if whole[_SHARED] >= count else min(whole[_SHARED], max(0, layers - different))
        )
    return sizes


def _sections_of(fields: Mapping[str, Any], count: Any) -> dict[str, int]:
    """Return the fields whose numbers of layers add up to ``count``, by name; empty if there are no such fields."""
    parts = {
        name: size
        for name, size in fields.items()
        if name.endswith("_layers") and name not in _LAYER_COUNTS and type(size) is int
    }
    return parts if len(parts) > 1 and sum(parts.values()) == count else {}


def _sections(whole: dict[str, Any], layers: int, count: int) -> dict[str, int]:
    """Divide a clone's ``layers`` among the same sections as the original's ``count`` layers, for models in which some
    layers run first, some several times, and some last.
    """
    parts = _sections_of(whole, count)
    if not parts:
        return {}
    rounds, left = divmod(layers, len(parts))
    largest = sorted(parts, key=lambda name: parts[name], reverse=True)[:left]
    return {name: rounds + (name in largest) for name in parts}


def _repeated(whole: dict[str, Any], layers: int) -> dict[str, int]:
    """Return the config fields with which a clone repeats the layers between its first and its last layer, for models
    that run some layers several times, like Inkling 2; empty for other models.
    """
    if type(whole.get(_LOOP_START)) is not int:
        return {}
    return {
        _RESIDUAL_BLOCK: 1,  # the start and the end of the loop must be multiples of this
        _LOOP_START: 1,
        _LOOP_END: max(2, layers - 1),
    }


def _shrink_config(
    fields: dict[str, Any], layers: int, kind: type[PreTrainedConfig] | None
) -> dict[str, Any]:
    """Return the fields of a config with small sizes, without the fields that its class ``kind`` computes."""
    whole = dict(fields)
    small = _shrink(fields, layers, kind)
    left_out = _derived(kind, whole, small) if kind is not None else []
    return {name: value for name, value in small.items() if name not in left_out}


def _small_sections(name: str, value: Any, width: int) -> Any:
    """Return rotary sections for small heads: the number of frequencies of each kind of position (time, height, width).
    Other values are returned unchanged.
    """
    if not name.endswith("_section") or not isinstance(value, (list, tuple)):
        return value
    total = sum(value) * HEAD_DIM // width
    share = total // len(value)
    return [
        total - share * (len(value) - 1),
        *[share] * (len(value) - 1),
    ]


def _aliases(kind: type[PreTrainedConfig] | None, fields: dict[str, Any]) -> dict[str, str]:
    """Return a dict from a config class's own field names to the common names in transformers (``num_hidden_layers``,
    for example), by the class's ``attribute_map``.
    """
    aliases = kind.attribute_map.items() if kind is not None else ()
    known = {own: name for name, own in aliases if own not in _NAMED and name in _NAMED}
    few = [
        own
        for own, name in known.items()
        if name in _LAYER_COUNTS and (fields.get(own) or 0) <= _STAGES
    ]
    return {own: name for own, name in known.items() if own not in few}


def _class_inside(
    kind: type[PreTrainedConfig] | None, name: str, model_type: str
) -> type[PreTrainedConfig] | None:
    """Return the class of the nested config in field ``name``."""
    own: Any = kind.sub_configs.get(name) if kind is not None else None
    if own in (None, AutoConfig):
        with suppress(KeyError):
            own = CONFIG_MAPPING[model_type]
    return None if own is AutoConfig else own


def _kept_layers(
    fields: dict[str, Any], known: dict[str, str], layers: int
) -> tuple[int, list[int]]:
    """Return the original's number of layers, and for each layer of the clone the index of the layer that it copies."""
    counts = (fields[name] for name in fields if known.get(name, name) in _LAYER_COUNTS)
    count = next((count for count in counts if type(count) is int), 0)
    kinds = fields.get("layer_types")
    if not isinstance(kinds, (list, tuple)) or len(kinds) != count:
        return count, list(range(min(layers, count)))
    return count, [list(kinds).index(kind) for kind in _sample(list(kinds), layers)]


def _small_list(
    name: str,
    value: list[Any] | tuple[Any, ...],
    layers: int,
    heads: int | None,
    kept: tuple[int, list[int]],
) -> Any:
    if name == "num_attention_heads_per_layer" and isinstance(value, list):
        return [HEADS] * layers
    if name in PER_LAYER and len(value) > layers:
        return _sample(list(value), layers)
    if name.endswith("_token_id"):
        return [min(token, VOCABULARY - 1) for token in value]
    if name in ("attn_layer_indices", "cross_attention_layers") and value:
        return [layers - 1]
    if list(value) == list(range(kept[0])):  # the list holds the numbers of all layers
        return list(range(layers))
    if len(value) == kept[0] > _STAGES:  # one entry for each layer
        return [_small_value(name, value[index], layers, heads) for index in kept[1]]
    return value


def _small_value(name: str, value: Any, layers: int, heads: int | None) -> Any:
    """Return the small value of a field that is not a list. ``heads`` is the original number of heads."""
    if isinstance(value, float):
        return 0.0 if any(word in name for word in DROPOUT_WORDS) else value
    if type(value) is not int:
        return _SMALL[name] if name == "head_dim" and value is None else value
    if name.endswith("_token_id"):
        return min(value, VOCABULARY - 1) if value >= 0 else value
    if name in _KEY_HEADS:
        return HEADS if value == heads else min(value, HEADS // 2)
    if name in _LAYER_COUNTS:
        return layers
    if name in _CHOSEN:  # an MoE layer with one expert per token keeps one
        return min(value, _SMALL[name])
    small = _SMALL.get(name, value)
    return min(value, small) if name in LENGTHS else small


def _follow(
    per_layer: dict[Any, dict[str, Any]], before: Any, after: Any, layers: int
) -> dict[int, dict[str, Any]]:
    """Return the per-layer fields of the clone's layers. A layer of a kind in ``after`` gets the fields of the first
    layer of this kind in ``before``, the original's list of kinds.
    """
    known = {int(index): _shrink(dict(own), layers) for index, own in per_layer.items()}
    if not before or not after:
        return {index: own for index, own in known.items() if index < layers}
    firsts = (
        (index, list(before).index(kind)) for index, kind in enumerate(after) if kind in before
    )
    return {index: known[first] for index, first in firsts if first in known}


def _sample(kinds: list[Any], layers: int) -> list[Any]:
    """Return ``layers`` entries of a per-layer list, with as many different kinds as possible."""
    return [*dict.fromkeys(kinds), *kinds][:layers]
