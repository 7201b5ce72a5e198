"""The numbers of a decoder that its time depends on, from a config of transformers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError
from ...models.expert_modules import EXPERT_FIELDS, experts_per_token
from ...models.fields import counts


@dataclass(frozen=True)
class ModelShape:
    """A decoder with layers of one kind.

    Attributes:
        layers: how many.
        hidden: width of the stream between the blocks.
        queries: width of all query heads together.
        keys: width of all key heads together; values have as much.
        ffn: width inside of the MLP, of one expert where there are experts.
        vocabulary: entries of the embedding and of the head.
        gated: whether the MLP has a gate beside its first projection.
        tied: whether head and embedding are one weight.
        experts: of a mixture; 0 for a plain MLP.
        routed: experts that a token is sent to.
        shared: width of an MLP beside the experts that every token passes.
    """

    layers: int
    hidden: int
    queries: int
    keys: int
    ffn: int
    vocabulary: int
    gated: bool = True
    tied: bool = False
    experts: int = 0
    routed: int = 0
    shared: int = 0

    @property
    def attention_weights(self) -> int:
        """Entries of the projections of one layer's attention."""
        return self.hidden * (2 * self.queries + 2 * self.keys)

    @property
    def mlp_width(self) -> int:
        """Width inside of the MLP that one token meets."""
        return self.ffn * max(self.routed, 1) + self.shared if self.experts else self.ffn

    @property
    def active_weights(self) -> int:
        """Entries of matrices that one token meets in one layer."""
        router = self.hidden * self.experts
        return self.attention_weights + self._matrices * self.hidden * self.mlp_width + router

    @property
    def expert_weights(self) -> int:
        """Entries of matrices of one layer's experts."""
        return self._matrices * self.hidden * self.ffn * self.experts

    @property
    def layer_weights(self) -> int:
        """Entries of matrices of one layer."""
        width = self.shared if self.experts else self.ffn
        dense = self.attention_weights + self._matrices * self.hidden * width + self.hidden * self.experts
        return dense + self.expert_weights

    def held(self, tp: int) -> float:
        """Entries of one layer on one of ``tp`` tensor ranks, without its experts."""
        return (self.layer_weights - self.expert_weights) / tp

    @property
    def table_weights(self) -> int:
        """Entries of the embedding, and of the head."""
        return self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        """All of them."""
        return self.layers * self.layer_weights + (1 if self.tied else 2) * self.table_weights

    @property
    def _matrices(self) -> int:
        return 3 if self.gated else 2


# Of a config, the first of these names that it has. Families differ in names, seldom in what they mean.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "ffn": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "expert_ffn": ("moe_intermediate_size",),
    "experts": EXPERT_FIELDS,
}


def shape_of(config: Any, gated: bool | None = None) -> ModelShape:
    """The shape of the decoder that a config of transformers describes.

    Args:
        gated: whether its MLP has a gate, where a plan knows; by default what its activation is used with.

    Raises:
        ConfigError: the config names no layers or no width.
    """
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    layers, hidden, heads = (_first(text, *_NAMES[key]) for key in ("layers", "hidden", "heads"))
    if not (layers and hidden):
        raise ConfigError(
            f"a {type(config).__name__} names no layers or width that times could be estimated from: "
            "use hfscale.memory_estimate, which needs none of them"
        )
    head = _first(text, "head_dim") or hidden // max(heads, 1)
    experts = _first(text, *_NAMES["experts"])
    return ModelShape(
        layers=layers,
        hidden=hidden,
        queries=head * heads,
        keys=head * (_first(text, "num_key_value_heads") or heads),
        ffn=_first(text, *_NAMES["expert_ffn"] if experts else (), *_NAMES["ffn"]) or 4 * hidden,
        vocabulary=_first(text, "vocab_size"),
        gated=bool(getattr(text, "rms_norm_eps", None)) if gated is None else gated,
        tied=bool(getattr(text, "tie_word_embeddings", False)),
        experts=experts,
        routed=experts_per_token(text) or 1 if experts else 0,
        shared=_first(text, "shared_expert_intermediate_size") if experts else 0,
    )


def _first(config: Any, *names: str) -> int:
    """The first of these numbers that a config has, of layers that differ the smallest; 0 where it has none."""
    return min(counts(config, names), default=0)
