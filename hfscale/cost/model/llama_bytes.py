"""Compute the activation bytes per token of a LLaMA layer by a formula, which :mod:`.layer_bytes` explains."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..._compat.peft import LORA_A
from ...plan import ParameterPlan, Plan
from ...plan.context_plan import Exchange, exchange_of
from ...plan.feature_plans import (
    FEW,
    RecomputePlan,
    heads_with_scores,
    is_fused,
    recomputed,
)
from .situation import Situation, Types

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
_HEAD_SIZE = 64  # assumed; it affects one value per head, among thousands per token


@dataclass(frozen=True)
class Llama:
    """Compute the activation bytes per token that one rank keeps of a LLaMA layer for its backward pass."""

    plan: Plan
    roles: dict[str, ParameterPlan]
    hidden: int
    sequence: int  # tensor-parallel ranks that shard hidden states between blocks
    situation: Situation
    types: Types

    @cached_property
    def scores(self) -> float:
        """Attention scores per token on this rank; 0 if the attention kernel keeps no scores, or they are
        recomputed.
        """
        part = self._out("q_proj") / self.roles["q_proj"].shape[0]
        return (
            self.situation.length
            * part
            * (heads_with_scores(self.plan) * (not self.again.attention))
        )

    @cached_property
    def ranks_of_adapters(self) -> Counter[str]:
        """The rank of the low-rank adapters on each weight, by name; several adapters on a weight are added up."""
        ranks = Counter[str]()
        for adapter in self.plan.adapters:
            if adapter.kept_in == LORA_A:
                ranks[adapter.base] += adapter.shape[0]
        return ranks

    def keeps_input(self, first: bool) -> bool:
        """Return whether the first norm keeps the layer's input itself, not a copy in 32 bits. ``first`` says that no
        parameter before the layer trains.
        """
        return self.again.elementwise or (
            self.types.stream >= 4 and (not first or self._trains("input_layernorm"))
        )

    def norms(self, first: bool) -> float:
        """Return the bytes per token that the layer's two norms keep: their inputs, and the normed inputs if their
        weights train. ``first`` says that no parameter before the layer trains.
        """
        # The layer's input, and the first block's result, which has the block's dtype.
        if self.again.elementwise:
            kept = self._kept(self.hidden, self.types.stream) + self._kept(
                self.hidden, self.types.size
            )
            return kept / self.sequence
        total = 0.0
        for number, name in enumerate(("input_layernorm", "post_attention_layernorm")):
            trains = self._trains(name)
            wide = max(4, self.types.size)
            needed = trains or number > 0 or not first
            normed = self._kept(self.hidden, self.types.stream) * trains
            total += (self._kept(self.hidden, wide) + wide) * needed + normed
        return total / self.sequence

    def blocks(self) -> tuple[float, float]:
        """Return two numbers of bytes per token: those that attention and MLP keep for the backward pass, and the most
        that exist only while one of them is recomputed.
        """
        attention = self._attention()
        mlp = self._mlp()
        if self.again.elementwise:
            return attention + mlp, self._made_at_once()
        total = 0.0
        again = 0.0
        blocks = ("o_proj", attention, ATTENTION[:3]), ("down_proj", mlp, MLP[:2])
        for output, kept, readers in blocks:
            if self._is_alone(output):
                given = self._kept(self.hidden, self.types.stream)
                shared = 0.0 if self.types.autocasts else min(given, self._read_stream(readers))
                total += given
                again = max(again, kept - shared)
            else:
                total += kept
        return total, again

    def _made_at_once(self) -> float:
        """Return the most bytes per token that exist at once while elementwise operations are recomputed: the output of
        the MLP's activation function, and its product with the output of ``up_proj``.
        """
        if self.again.tile:  # the MLP's input, and one tile of the MLP
            return (
                self._kept(self.hidden, self.types.size)
                + self._tile * 4 * self._out("gate_proj") * self.types.size
            )
        trains, adapted = self._adapted(("down_proj",))
        wide = self.types.size if self._fused(("down_proj",)) else self.types.adapters
        product = wide * bool(adapted) or self.types.size * trains
        return self._out("gate_proj") * (self.types.size + product)

    def piece(self) -> float:
        """Return the most bytes per token of kept activations that one operation of the backward pass reads: the
        product in the MLP, or attention.
        """
        size = self.types.size
        sizes = [self._kept(self.hidden, self.types.stream)]
        if not self._is_alone("down_proj"):
            sizes.append(2 * self._kept(self._out("gate_proj"), size))
        if not self.again.attention and not self._is_alone("o_proj"):
            queries = self._out("q_proj")
            keys = self._out("k_proj") * self.exchange.replicas
            sizes.append(2 * self._kept(queries, size) + 2 * self._kept(keys, size))
            sizes.append(self._kept(self.scores, size) + self._kept(queries, size))
        return max(sizes)

    def passing(self) -> float:
        """Return the bytes per token of the gradients that exist at once in the layer's backward pass: of the layer's
        output, and of the two factors of the product in the MLP (of one tile, if the MLP runs in tiles).
        """
        part = self._tile
        stream = self.hidden * self.types.stream / self.sequence
        return (2 - part) * stream + part * 2 * self._out("gate_proj") * self.types.size

    @property
    def _tile(self) -> float:
        """Return the fraction of a microbatch's tokens that the MLP computes at once; below 1 if it runs in tiles."""
        return min(1.0, self.again.tile / self.situation.tokens) if self.again.tile else 1.0

    @cached_property
    def exchange(self) -> Exchange:
        """Return how attention exchanges keys and values between context-parallel ranks."""
        return exchange_of(self.plan)

    @cached_property
    def again(self) -> RecomputePlan:
        """Return which layers and operations the backward pass recomputes."""
        return recomputed(self.plan)

    def _is_alone(self, output: str) -> bool:
        """Return whether the block (attention or MLP) that ends with the projection ``output`` is recomputed as a
        module of its own, not with the full layer.
        """
        return self.roles[output].name.removesuffix(f".{output}.weight") in self.again.modules

    def _adapted(self, readers: tuple[str, ...]) -> tuple[bool, list[int]]:
        """Return whether any of the projections ``readers`` trains, and the ranks of the low-rank adapters on them."""
        names = [self.roles[name].name for name in readers]
        adapted = [self.ranks_of_adapters[name] for name in names if name in self.ranks_of_adapters]
        return any(map(self._trains, readers)), adapted

    def _fused(self, readers: tuple[str, ...]) -> bool:
        """Return whether the adapters on the projections ``readers`` are all fused: fused adapters keep the
        projection's input, but no cast copies of it.
        """
        return all(is_fused(self.plan, self.roles[name].name) for name in readers)

    def _attention(self) -> float:
        size = self.types.size
        lean = self.again.elementwise
        queries = self._out("q_proj")
        # Eager attention repeats keys and values.
        repeats = self.scores and not lean
        keys = queries if repeats else self._out("k_proj") * self.exchange.replicas
        total = self._kept(queries, size) + 2 * self._kept(keys, size)
        total += self._kept(self.scores, size if lean else score_bytes(self.types))
        # SDPA keeps its result, and a logarithm per head; otherwise only the output projection keeps its input.
        fused = not self.scores and (lean or not self.again.attention)
        total += max(4, size) * self._heads(queries) * fused
        if lean or fused:
            total += self._kept(queries, size) * (1 + (lean and self.exchange.moves_heads))
        total += self._read(queries, ("o_proj",), kept=fused and not self.exchange.moves_heads)
        for name in () if lean else ("q_norm", "k_norm"):
            if name in self.roles:
                width = self._out(f"{name[0]}_proj")
                total += self._kept(width, max(4, size))
                total += self._kept(width, size) * self._trains(name)
        return total + self._read_stream(ATTENTION[:3])

    def _mlp(self) -> float:
        inner = self._out("gate_proj")
        products = self._kept(inner, self.types.size)
        if not self.again.elementwise:
            return 3 * products + self._read(inner, ("down_proj",)) + self._read_stream(MLP[:2])
        if self.again.tile:  # the MLP keeps only its input, if this was gathered from other ranks
            return self._gathered(MLP[:2])
        return 2 * products + self._read(inner, ("down_proj",)) + self._read_stream(MLP[:2])

    def _kept(self, values: float, size: float) -> float:
        """Return the bytes that a kept tensor takes with ``values`` values per token of ``size`` bytes each; if
        activations are kept in 8 bits, only small tensors keep ``size`` bytes.
        """
        return values * (
            size if values * FEW <= self.hidden / self.sequence else self.types.as_kept(size)
        )

    def _heads(self, queries: int) -> float:
        return self.exchange.heads or queries / _HEAD_SIZE

    def _out(self, name: str) -> int:
        return self.roles[name].model_shape(self.situation.ranks)[0]

    def _trains(self, name: str) -> bool:
        return self.roles[name].name in self.situation.trained

    def _gathered(self, readers: tuple[str, ...]) -> float:
        """Return the bytes per token that the projections ``readers`` keep of the norm's output, if this was gathered
        from other ranks and everything except products and attention is recomputed.
        """
        trains, adapted = self._adapted(readers)
        if self.sequence == 1 or self.plan.layout.sequence_regather:
            return 0.0
        return self._kept(self.hidden, self.types.stream) * (trains or bool(adapted))

    def _read_stream(self, readers: tuple[str, ...]) -> float:
        """Return the bytes per token of the norm's output that the projections ``readers`` keep; if the backward pass
        gathers it again (``sequence_regather``), they keep only this rank's shard.
        """
        trains, adapted = self._adapted(readers)
        if self.again.elementwise:
            return self._gathered(readers) + self._factors(adapted)
        if self.sequence > 1 and self.plan.layout.sequence_regather:
            # Dropout may come before the cast.
            size = self.types.stream if adapted else self.types.size
            own = self._kept(self.hidden, size) / self.sequence * (trains or bool(adapted))
            return own + self._factors(adapted)
        if not self.types.autocasts or (self._fused(readers) and not trains):
            return self._read(self.hidden, readers)
        return sum(self._read(self.hidden, (name,)) for name in readers)

    def _read(self, width: int, readers: tuple[str, ...], kept: bool = False) -> float:
        """Return the bytes per token that the projections ``readers`` and their adapters keep of an input of ``width``
        values. With ``kept``, another module keeps the input already, and only copies and adapters count.
        """
        trains, adapted = self._adapted(readers)
        if self.again.elementwise:  # inputs are computed again
            return self._factors(adapted)
        size = self.types.size
        wide = self.types.adapters
        casts = not self._fused(readers) and (wide != size or bool(self.types.autocasts))
        own = self._kept(width, size) * (trains or bool(adapted and not casts))
        copies = self._kept(width, wide) * len(adapted) * casts
        return own * (not kept) + copies + self._factors(adapted)

    def _factors(self, ranks: Sequence[int]) -> float:
        """Return the bytes per token that low-rank adapters of these ``ranks`` keep between their two factors."""
        return sum(self._kept(rank, self.types.adapters) for rank in ranks)


def score_bytes(types: Types) -> int:
    """Return the bytes that eager attention keeps per score: 4, because its softmax computes in 32 bits, and those of a
    second copy if the model has another dtype.
    """
    return 4 + (types.size if types.size != 4 else 0)
