"""Read the sizes of a decoder on which the time of a step depends, such as its width, from a config of transformers or
from a plan.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ...errors import ConfigError
from ...models.fields import counts, text_config
from ...models.module_kinds import EXPERT_FIELDS, experts_per_token
from ...plan import Plan
from .layer_bytes import stream_width


@dataclass(frozen=True)
class ModelShape:
    """Describe the sizes of a decoder, such as layers and widths; all layers are assumed to be of the same kind."""

    layers: int
    hidden: int  # width of the hidden states
    queries: int  # width of all query heads together
    keys: int  # width of all key heads together, and of all value heads
    ffn: int  # width inside the MLP, or inside one expert
    vocabulary: int  # entries of the embedding and of the head
    gated: bool = True  # whether the MLP has a gate projection
    tied: bool = False  # whether head and embedding share a weight
    experts: int = 0  # experts of a mixture; 0 for a plain MLP
    routed: int = 0  # experts per token
    shared: int = 0  # width of a shared MLP that every token passes

    @property
    def attention_weights(self) -> int:
        """Number of entries of the attention projections of one layer."""
        return self.hidden * (2 * self.queries + 2 * self.keys)

    @property
    def mlp_width(self) -> int:
        """Number of intermediate units that a token uses in one layer, summed over the experts that it is sent to."""
        return self.ffn * max(self.routed, 1) + self.shared if self.experts else self.ffn

    @property
    def active_weights(self) -> int:
        """Number of entries of the matrices of one layer that a token is multiplied with."""
        return self._dense(self.mlp_width)

    @property
    def expert_weights(self) -> int:
        """Number of entries of the matrices of all experts in one layer."""
        return self._matrices * self.hidden * self.ffn * self.experts

    @property
    def layer_weights(self) -> int:
        """Number of entries of all matrices in one layer."""
        return self._dense(self.shared if self.experts else self.ffn) + self.expert_weights

    def held(self, tp: int) -> float:
        """Return the number of matrix entries of one layer, without experts, on one of ``tp`` tensor-parallel ranks."""
        return (self.layer_weights - self.expert_weights) / tp

    @property
    def table_weights(self) -> int:
        """Number of entries of the token embedding, or of the head."""
        return self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        """Number of entries of all matrices of the decoder; a tied head counts once with the embedding."""
        return self.layers * self.layer_weights + (1 if self.tied else 2) * self.table_weights

    @property
    def _matrices(self) -> int:
        return 3 if self.gated else 2

    def _dense(self, width: int) -> int:
        """Return the number of entries, in one layer, of the attention projections, of an MLP with ``width``
        intermediate units, and of the router.
        """
        return (
            self.attention_weights
            + self._matrices * self.hidden * width
            + self.hidden * self.experts
        )


def shape_of(config: Any) -> ModelShape:
    """Return the sizes of the decoder that a config of transformers describes."""
    text = text_config(config)
    # Families name these fields differently, but seldom mean different things.
    layers = _first(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    hidden = _first(text, "hidden_size", "n_embd", "d_model")
    heads = _first(text, "num_attention_heads", "n_head", "n_heads")
    if not (layers and hidden):
        raise ConfigError(
            f"{type(config).__name__} has no number of layers or no hidden size, which time estimates need: use "
            "hfscale.memory_estimate, which needs neither"
        )
    head = _first(text, "head_dim") or hidden // max(heads, 1)
    experts = _first(text, *EXPERT_FIELDS)
    widths = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    return ModelShape(
        layers=layers,
        hidden=hidden,
        queries=head * heads,
        keys=head * (_first(text, "num_key_value_heads") or heads),
        ffn=_first(
            text,
            *(("moe_intermediate_size",) if experts else ()),
            *widths,
        )
        or 4 * hidden,
        vocabulary=_first(text, "vocab_size"),
        gated=bool(getattr(text, "rms_norm_eps", None)),
        tied=bool(getattr(text, "tie_word_embeddings", False)),
        experts=experts,
        routed=experts_per_token(text) or 1 if experts else 0,
        shared=_first(text, "shared_expert_intermediate_size") if experts else 0,
    )


def _first(config: Any, *names: str) -> int:
    """Return the value of the first field in ``names`` that a config has; the minimum if it has one value per layer; 0
    if it has none of the fields.
    """
    return min(counts(config, names), default=0)


def shape_of_plan(plan: Plan, config: Any = None) -> ModelShape:
    """Return the sizes of a plan's decoder, with widths that give the mean number of weights per layer. A ``config`` is
    needed only for the exact widths of query and key heads.
    """
    if not plan.layers:
        raise ConfigError(
            f"a {plan.family!r} model has no list of layers that hfscale knows, so its times cannot be estimated: use "
            "hfscale.memory_estimate instead"
        )
    shape = shape_of(config) if config is not None else _guessed(plan)
    names = [name for name, _, _ in _matrices(plan)]
    gated = any(name.endswith((".w3.weight", ".wi_1.weight")) for name in names)
    gated = gated or any("gate" in name.removeprefix(plan.layers[0]) for name in names)
    shape = replace(shape, layers=len(plan.layers), gated=gated)
    if plan.mixtures and not shape.experts:  # the config names them by a field of its own
        shape = replace(shape, experts=plan.mixtures[0].count, routed=shape.routed or 1)
    # Entries per unit of width.
    rows = shape.hidden * (3 if shape.gated else 2) * len(plan.layers)
    matrices = list(_matrices(plan, shape.experts))
    dense = sum(entries for _, entries, spread in matrices if not spread)
    spread = sum(entries for _, entries, spread in matrices if spread)
    if dense < len(plan.layers) * shape.attention_weights:  # layers without attention
        shape = replace(shape, queries=0, keys=0)
    rest = dense - len(plan.layers) * (shape.attention_weights + shape.hidden * shape.experts)
    if spread:
        return replace(
            shape,
            ffn=max(1, round(spread / rows / shape.experts)),
            shared=max(0, round(rest / rows)),
        )
    return replace(
        shape,
        ffn=max(1, round(rest / rows)),
        experts=0,
        routed=0,
    )


def _matrices(plan: Plan, experts: int = 0) -> Iterator[tuple[str, int, bool]]:
    """Yield, for each matrix in the layers, its name, its number of entries, and whether it is a weight of experts."""
    adapters = {adapter.name for adapter in plan.adapters}
    mixtures = tuple(f"{mixture.name}." for mixture in plan.mixtures)
    layers = tuple(f"{layer}." for layer in plan.layers)
    for planned in plan.owned():
        if (
            len(planned.shape) > 1
            and planned.name.startswith(layers)
            and planned.name not in adapters
        ):
            stacked = len(planned.shape) > 2 and planned.shape[0] == experts
            yield (
                planned.name,
                prod(planned.shape),
                stacked or (bool(mixtures) and planned.name.startswith(mixtures)),
            )


def _guessed(plan: Plan) -> ModelShape:
    hidden = stream_width(plan, plan.layers[0])
    head = plan.by_name.get(f"{plan.head}.weight")
    by_end = {
        planned.name.rpartition(".weight")[0].rpartition(".")[2]: planned
        for planned in plan.owned()
    }
    queries, keys = (by_end.get(name) for name in ("q_proj", "k_proj"))
    width = queries.shape[0] if queries is not None else hidden
    mixture = plan.mixtures[0].count if plan.mixtures else 0
    return ModelShape(
        layers=len(plan.layers),
        hidden=hidden,
        queries=width,
        keys=keys.shape[0] if keys is not None else width,
        ffn=4 * hidden,
        vocabulary=head.shape[0] if head is not None else 0,
        tied=head is not None and head.tied_to is not None,
        experts=mixture,
        routed=min(2, mixture),
    )
