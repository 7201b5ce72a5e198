"""Compute the activation bytes per token of a layer from the shapes of a plan; nothing runs.

LLaMA's layer has a formula (Korthikanti et al. 2022, section 4, recounted) in units of one value per token and
hidden unit, with ``k`` key/value heads per head, ``f`` intermediate over hidden size, ``t`` tensor ranks; all trained,
in one type::

    between the blocks   each of two norms: its input, the normed input, its output                     6
    attention            queries and result, keys and values                                            2 + 2k
    MLP                  gate, its activation, up, their product                                        4f
    cut over tp          6 + (2 + 2k + 4f) / t;  with the sequence cut too, all of it / t, and
                         2 (1 - 1/t) for the gathered inputs of both blocks, unless they are gathered again

A frozen norm does not keep its normed input, and a frozen projection without an adapter does not keep its input. A
low-rank adapter keeps its ``r`` values, and a copy of its input where its factors have another type. In 16 bits a norm
keeps its input in 32.

Where all but products and attention is computed again (``recompute="elementwise"``), it keeps its input, queries and
result, keys and values, what the first block returns (the second norm's input is the sum), gate and up: 3 + 1 + 2k + 2f
before it is cut over tensor ranks; of the norms' outputs, and of what adapters read, nothing but what is gathered.

Under autocast over weights of 32 bits, blocks compute in 16, and what is between them (the stream, norms and what they
return) stays in 32. So every projection that reads a norm's output keeps its own copy in 16 bits, and so does every
adapter.

Any other layer is measured (:class:`.situation.MeasuredLayers`) or else estimated from above: twice the rows and
columns of every matrix, and the shorter of the two once more; of experts, twice both for each that a token is sent to;
four times every vector. Dropout in front of adapters is not in such an estimate.

SDPA and flash attention keep no scores. Eager attention keeps one for each head and token of the sequence, in 32 bits
and, where the layer computes in another type, in that as well; and keys and values once for each head of queries.

Context ranks that share out heads keep key heads once more for each rank that reads them, and the result of attention
twice: of some heads, and of their own tokens. What they run on whole sequences they keep of all tokens.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import prod

from ..._compat.peft import LORA_A
from ...plan.feature_plans import FEW, ContextPlan, heads_with_scores, recomputed
from ...plan.parameter import ParameterPlan
from ...plan.plan import Plan
from ...plan.sequence_split import choose
from .situation import LayerBytes, Situation, own_parameters

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_HEAD_SIZE = 64  # a guess, for one number per head and token beside some thousands


@dataclass(frozen=True)
class Types:
    """Hold the bytes per value of each tensor in a forward pass."""

    size: int  # within blocks
    adapters: int  # of adapters' factors, as they are multiplied
    autocasts: int = 0  # between blocks, where autocast alone computes in another type within; 0: the same
    kept: float | None = None  # that a layer keeps, of whatever type, where it keeps them in 8 bits

    @property
    def stream(self) -> int:
        """Bytes of one value of the hidden states between blocks."""
        return self.autocasts or self.size

    def as_kept(self, size: float) -> float:
        """Return the bytes at which a layer keeps a value of ``size`` bytes."""
        return size if self.kept is None else self.kept


def types_of(plan: Plan, mixed: bool) -> Types:
    """Return the sizes of the types that the plan's model and its adapters compute in."""
    size = next((p.dtype.itemsize for p in plan.owned() if p.name.startswith(plan.layers[:1])), widest(plan))
    if mixed and plan.layout.data_world > 1:
        return Types(2, 2)
    if mixed and size == 4:  # autocast leaves 64 bits alone, and 16 are what it computes in
        return Types(2, 2, autocasts=size)
    return Types(size, max((plan.by_name[a.name].dtype.itemsize for a in plan.adapters), default=size))


def widest(plan: Plan) -> int:
    """Return the bytes of the plan's widest dtype."""
    return max((p.dtype.itemsize for p in plan.owned() if p.dtype.is_floating_point), default=4)


def sequence_ranks(plan: Plan) -> int:
    """Return the number of tensor ranks that shard the hidden states between blocks."""
    return plan.layout.tp if plan.sequence_regions else 1


def layer_bytes(plan: Plan, layer: str, situation: Situation, types: Types, *, first: bool = False) -> LayerBytes:
    """Return the activation bytes per token of ``layer``; ``first``: whether nothing before it trains."""
    hidden, sequence = stream_width(plan, layer), sequence_ranks(plan)
    stream = types.as_kept(types.stream) * hidden / sequence
    roles = _llama_roles(plan, layer)
    if roles is None:
        cut = sum(block.name.startswith(f"{layer}.") for block in plan.blocks) > 1  # and not attention or MLP alone
        ranks = plan.layout.tp if cut else 1
        scores = _score_bytes(types) * situation.length * heads_with_scores(plan) / ranks
        return LayerBytes(_at_most(plan, layer, situation, types) + scores, stream, False)
    found = _Llama(plan, roles, hidden, sequence, situation, types)
    blocks, again = found.blocks()
    as_input = stream if types.kept is None and found.keeps_input(first) else 0.0
    return LayerBytes(found.norms(first) + blocks, stream, True, again, as_input, found.piece())


def is_known(plan: Plan, layer: str) -> bool:
    """Return whether ``layer`` has a formula: it is LLaMA's."""
    return _llama_roles(plan, layer) is not None


def stream_width(plan: Plan, layer: str) -> int:
    """Return the width of the hidden states: the most frequent side length of a layer's matrices."""
    counts: dict[int, int] = {}
    for planned in plan.of_layers[layer]:
        if len(planned.shape) >= 2:
            for size in set(planned.shape[-2:]):
                counts[size] = counts.get(size, 0) + 1
    return max(counts, key=lambda size: (counts[size], -size), default=0)


@dataclass(frozen=True)
class _Llama:
    plan: Plan
    roles: dict[str, ParameterPlan]
    hidden: int
    sequence: int  # tensor ranks that cut what is between the blocks
    situation: Situation
    types: Types

    @cached_property
    def scores(self) -> float:
        """Scores per token, if attention keeps them."""
        part = self._out("q_proj") / self.roles["q_proj"].shape[0]
        return self.situation.length * part * (heads_with_scores(self.plan) * (not self.attention_again))

    @cached_property
    def ranks_of_adapters(self) -> Counter[str]:
        found = Counter[str]()
        for adapter in self.plan.adapters:
            if adapter.kept_in == LORA_A:
                found[adapter.base] += adapter.shape[0]
        return found

    def keeps_input(self, first: bool) -> bool:
        """Return whether the first norm keeps the layer's input unchanged, without a copy in 32 bits."""
        if self.elementwise:
            return True
        return self.types.stream >= 4 and (not first or self._trains("input_layernorm"))

    def norms(self, first: bool) -> float:
        """Return the bytes that both norms keep, their inputs and normed inputs, per token of the full sequence."""
        if self.elementwise:  # the layer's input, and what the first block returns, which is in its type
            kept = self._kept(self.hidden, self.types.stream) + self._kept(self.hidden, self.types.size)
            return kept / self.sequence
        total = 0.0
        for number, name in enumerate(("input_layernorm", "post_attention_layernorm")):
            trains, wide = self._trains(name), max(4, self.types.size)
            needed = trains or number > 0 or not first
            normed = self._kept(self.hidden, self.types.stream) * trains
            total += (self._kept(self.hidden, wide) + wide) * needed + normed
        return total / self.sequence

    def blocks(self) -> tuple[float, float]:
        """Return the bytes that the blocks keep, and the most that one recomputed by itself keeps meanwhile."""
        total, again = 0.0, 0.0
        if self.elementwise:
            return self._needed(), self._made_at_once()
        blocks = ("o_proj", self._attention(), _ATTENTION[:3]), ("down_proj", self._mlp(), _MLP[:2])
        for output, kept, readers in blocks:
            if self._is_alone(output):
                given = self._kept(self.hidden, self.types.stream)
                shared = 0.0 if self.types.autocasts else min(given, self._read_stream(readers))
                total, again = total + given, max(again, kept - shared)
            else:
                total += kept
        return total, again

    def _needed(self) -> float:
        """Return the bytes that the blocks keep where all but products and attention is computed again."""
        size, inner = self.types.size, self._out("gate_proj")
        queries, keys = self._out("q_proj"), self._out("k_proj")
        total = 2 * self._kept(queries, size) + 2 * self._kept(keys * replicas(self.plan), size)
        total += self._kept(self.scores, size) + 2 * self._kept(inner, size) * (not self._tile)
        total += max(4, size) * self._heads(queries) * (not self.scores)
        if shares_heads(self.plan):
            total += self._kept(queries, size)
        adapters = ("o_proj",) if self._tile else ("o_proj", *_MLP)
        for readers in (_ATTENTION[:3], _MLP[:2]):
            trains, adapted = self._adapted(readers)
            if self.sequence > 1 and not self.plan.layout.sequence_regather:
                total += self._kept(self.hidden, self.types.stream) * (trains or bool(adapted))
        return total + sum(
            self._kept(rank, self.types.adapters) for rank in self._adapted((*_ATTENTION[:3], *adapters))[1]
        )

    def _made_at_once(self) -> float:
        """Return the most bytes computed again at once: an activation, and its product with what is up."""
        if self._tile:  # of the MLP its input, and one tile
            part = min(1.0, self._tile / self.situation.tokens)
            return self._kept(self.hidden, self.types.size) + part * 4 * self._out("gate_proj") * self.types.size
        trains, adapted = self._adapted(("down_proj",))
        product = self.types.adapters * bool(adapted) or self.types.size * trains
        return self._out("gate_proj") * (self.types.size + product)

    def piece(self) -> float:
        """Return the bytes per token read by the operation that reads most: the product in the MLP, or attention."""
        size, found = self.types.size, [self._kept(self.hidden, self.types.stream)]
        if not self._is_alone("down_proj"):
            found.append(2 * self._kept(self._out("gate_proj"), size))
        if not self.attention_again and not self._is_alone("o_proj"):
            queries, keys = self._out("q_proj"), self._out("k_proj") * replicas(self.plan)
            found.append(2 * self._kept(queries, size) + 2 * self._kept(keys, size))
            found.append(self._kept(self.scores, size) + self._kept(queries, size))
        return max(found)

    @property
    def _tile(self) -> int:
        """Return the tokens of a tile of norms and MLPs; 0: they run whole."""
        return recomputed(self.plan).tile

    @property
    def elementwise(self) -> bool:
        """Return whether all but products and attention is computed again."""
        return recomputed(self.plan).elementwise

    @property
    def attention_again(self) -> bool:
        """Return whether the core attention, without its projections, is recomputed."""
        return recomputed(self.plan).attention

    def _is_alone(self, output: str) -> bool:
        """Return whether the block of an output projection is recomputed by itself."""
        return self.roles[output].name.removesuffix(f".{output}.weight") in recomputed(self.plan).modules

    def _adapted(self, readers: tuple[str, ...]) -> tuple[bool, list[int]]:
        """Return whether any of these projections trains, and the ranks of their adapters."""
        names = [self.roles[name].name for name in readers]
        adapted = [self.ranks_of_adapters[name] for name in names if name in self.ranks_of_adapters]
        return any(map(self._trains, readers)), adapted

    def _attention(self) -> float:
        size = self.types.size
        queries, keys = self._out("q_proj"), self._out("k_proj")
        read = queries if self.scores else keys * replicas(self.plan)  # eager attention repeats keys and values
        total = self._kept(queries, size) + 2 * self._kept(read, size)
        total += self._kept(self.scores, _score_bytes(self.types))
        total += max(4, size) * self._heads(queries) * (not self.scores and not self.attention_again)
        for name in ("q_norm", "k_norm"):
            if name in self.roles:
                width = self._out(f"{name[0]}_proj")
                total += self._kept(width, max(4, size)) + self._kept(width, size) * self._trains(name)
        if self.scores or self.attention_again:  # nothing but what the output projection keeps
            total += self._read(queries, ("o_proj",))
        else:  # SDPA keeps its result anyway, and an adapter's copy of it comes on top
            total += self._kept(queries, size) + self._read(queries, ("o_proj",), kept=not shares_heads(self.plan))
        return total + self._read_stream(_ATTENTION[:3])

    def _mlp(self) -> float:
        inner = self._out("gate_proj")
        total = 3 * self._kept(inner, self.types.size) + self._read(inner, ("down_proj",))
        return total + self._read_stream(_MLP[:2])

    def _kept(self, values: float, size: float) -> float:
        """Return the bytes of ``values`` values per token; small tensors are kept as they are."""
        return values * (size if values * FEW <= self.hidden / self.sequence else self.types.as_kept(size))

    def _heads(self, queries: int) -> float:
        context = self.plan.feature(ContextPlan)
        return queries / _HEAD_SIZE if context is None or not context.heads else context.heads

    def _out(self, name: str) -> int:
        return self.roles[name].model_shape(self.situation.ranks)[0]

    def _trains(self, name: str) -> bool:
        return self.roles[name].name in self.situation.trained

    def _read_stream(self, readers: tuple[str, ...]) -> float:
        """Return the bytes that projections keep of a norm's output: only this rank's shard if it is gathered again."""
        if self.sequence > 1 and self.plan.layout.sequence_regather:
            trains, adapted = self._adapted(readers)
            size = self.types.stream if adapted else self.types.size  # dropout may come before the cast
            own = self._kept(self.hidden, size) / self.sequence * (trains or bool(adapted))
            return own + sum(self._kept(rank, self.types.adapters) for rank in adapted)
        if not self.types.autocasts:
            return self._read(self.hidden, readers)
        return sum(self._read(self.hidden, (name,)) for name in readers)

    def _read(self, width: int, readers: tuple[str, ...], kept: bool = False) -> float:
        """Return the bytes that projections keep of ``width`` input values; ``kept``: another module keeps these."""
        (trains, adapted), size, wide = self._adapted(readers), self.types.size, self.types.adapters
        casts = wide != size or bool(self.types.autocasts)
        own = self._kept(width, size) * (trains or bool(adapted and not casts))
        copies = self._kept(width, wide) * len(adapted) * casts
        return own * (not kept) + copies + sum(self._kept(rank, wide) for rank in adapted)


def _score_bytes(types: Types) -> int:
    """Return the bytes per score of eager attention, whose softmax is in 32 bits."""
    return 4 + (types.size if types.size != 4 else 0)


def _llama_roles(plan: Plan, layer: str) -> dict[str, ParameterPlan] | None:
    """Return the parameters of a LLaMA layer by name; ``None`` for any other layer."""
    owned = own_parameters(plan, layer)
    expected = {f"{layer}.self_attn.{name}.weight": name for name in (*_ATTENTION, "q_norm", "k_norm")}
    expected |= {f"{layer}.mlp.{name}.weight": name for name in _MLP}
    expected |= {f"{layer}.{name}.weight": name for name in ("input_layernorm", "post_attention_layernorm")}
    biases = {name.removesuffix("weight") + "bias" for name, role in expected.items() if "proj" in role}
    found = {expected[p.name]: p for p in owned if p.name in expected}
    known = all(p.name in expected or p.name in biases for p in owned)
    return found if known and set(expected.values()) - set(found) <= {"q_norm", "k_norm"} else None


def _at_most(plan: Plan, layer: str, situation: Situation, types: Types) -> float:
    """Return an upper estimate of what a layer of any kind keeps."""
    count = next((e.count for e in plan.mixtures if e.name.startswith(f"{layer}.")), 1)
    often = min(situation.routes or count, count)
    experts = tuple(f"{e.name}." for e in plan.mixtures)
    tensor = plan.layout.tp if plan.layout.slices_tokens else 1
    values, wide = 2.0 * stream_width(plan, layer) * types.stream / types.size, 0.0
    for planned in own_parameters(plan, layer):
        local, inside = planned.model_shape(situation.ranks), planned.name.startswith(experts)
        if len(local) >= 3 and inside:
            values += often * 2 * sum(local[-2:]) / tensor
        elif len(local) == 2:
            values += (often / count if inside else 1) * (2 * sum(local) + min(local))  # whichever is the output
        elif len(local) == 1 and planned.name.endswith("weight"):
            wide += 4 * local[0]  # norms compute in 32 bits
    of_adapters = types.adapters * _of_adapters(plan, layer, situation.ranks, types)
    return types.as_kept(types.size) * values + types.as_kept(max(4, types.size)) * wide + of_adapters


def _of_adapters(plan: Plan, layer: str, ranks: dict[str, int], types: Types) -> int:
    """Return the values that adapters keep: those between their factors, and copies of inputs in another dtype."""
    low_rank = [a for a in plan.adapters if a.kept_in == LORA_A and a.name.startswith(f"{layer}.")]
    kept = sum(prod(adapter.shape) // max(adapter.shape) for adapter in low_rank)
    copied = low_rank if types.adapters != types.size else ()
    return kept + sum(plan.by_name[adapter.base].model_shape(ranks)[-1] for adapter in copied)


def cp_buffer_bytes(plan: Plan, kv: float, q: float, tokens: int, own: int) -> float:
    """Return the peak bytes of other ranks' keys and values that one layer's attention buffers under context
    parallelism, of ``s`` tokens of which ``own`` are this rank's, with ``kv`` bytes of a token's keys and values and
    ``q`` of its queries::

        gather       2 kv s        all keys and values, and the gradients that this rank adds to them
        ring         4 kv own      a block and the next one under way, and the same of their gradients
        heads        2 q own       what is sent of queries, and what comes for it
        heads_ring   as the ring, with key heads replicated where there are fewer of them than ranks that share them out

    What collectives copy in order to send it comes on top: as much again at most, over gloo.
    """
    context = plan.feature(ContextPlan)
    if context is None:
        return 0.0
    method = method_of(context, plan.layout.cp)
    if method == "heads":
        return 2 * q * own
    return 2 * kv * tokens if method == "gather" else 4 * kv * replicas(plan) * own


def method_of(context: ContextPlan, size: int) -> str:
    """Return the context-parallel method of a layer's attention."""
    if not context.heads:
        return "gather" if context.method == "auto" else context.method
    return choose(context.method, context.heads, context.key_heads, size)


def replicas(plan: Plan) -> float:
    """Return how many ranks hold each key head when there are more ranks than key heads."""
    context = plan.feature(ContextPlan)
    size = plan.layout.cp
    if context is None or not context.key_heads or not shares_heads(plan):
        return 1.0
    together = size if method_of(context, size) == "heads" else context.together
    return max(1.0, together / context.key_heads)


def shares_heads(plan: Plan) -> bool:
    """Return whether context ranks exchange heads (Ulysses) instead of passing keys."""
    context = plan.feature(ContextPlan)
    return context is not None and method_of(context, plan.layout.cp) in ("heads", "heads_ring")
