"""Compute the activation bytes per token of a layer from the shapes in a plan, without running the layer.

A LLaMA layer has a formula (after Korthikanti et al. 2022, section 4, with all terms counted anew), in which one unit
is ``hidden_size`` values per token. ``k`` is the number of key/value heads per query head, ``f`` the intermediate size
over the hidden size, ``t`` the number of tensor-parallel ranks. If all weights train, in one dtype, the layer keeps::

    two norms            of each norm: its input, the normed input, its output                          6
    attention            queries and result, keys and values                                            2 + 2k
    MLP                  gate, its activation, up, their product                                        4f
    with t > 1           6 + (2 + 2k + 4f) / t;  with sequence parallelism, everything / t, and in addition
                         2 (1 - 1/t) for the gathered inputs of attention and MLP (not with sequence_regather)

A frozen norm does not keep its normed input. A frozen projection without an adapter does not keep its input. A low-rank
adapter keeps its ``r`` values and its input; unless it is fused, it keeps a copy of the input if its weights have
another dtype. In 16 bits, a norm keeps its input in 32 bits.

With ``recompute="elementwise"``, everything except matrix products and attention is recomputed. Then a layer keeps its
input, queries and result, keys and values, the result of the attention block (which gives the second norm's input when
it is added to the first input), gate and up: 3 + 1 + 2k + 2f for ``t = 1``. Outputs of norms and inputs of adapters are
kept only if they were gathered from other ranks.

Under autocast over 32-bit weights, attention and MLP compute in 16 bits, but hidden states, norms and their outputs
stay in 32 bits. So every projection that reads a norm's output keeps its own 16-bit copy, and so does every adapter;
fused adapters share a copy. If parameters are cast, by FSDP2 or by ``"bf16_params"``, everything has 16 bits.

Other layers are measured (:class:`.situation.MeasuredLayers`), or else estimated from above, in values per token: for
every matrix, twice the number of its rows and columns, plus the smaller of both numbers; for experts, twice the rows
and columns of each expert that a token is sent to; for every vector, four times its length. Dropout on
adapters' inputs is not included in this estimate.

SDPA and flash attention keep no scores. Eager attention keeps one score per head and token of the sequence in 32 bits,
and a second one in the layer's dtype if that differs. It also keeps keys and values once per query head.

If context-parallel ranks exchange heads, each rank that reads a key head keeps it, and the attention result is kept
twice: for the rank's heads, and for its own tokens. Modules that run on whole sequences keep activations of all tokens.
"""

from collections import Counter
from math import prod

from ..._compat.peft import LORA_A
from ...plan import ParameterPlan, Plan
from ...plan.feature_plans import heads_with_scores, is_fused
from .llama_bytes import ATTENTION, MLP, Llama, score_bytes
from .situation import LayerBytes, Situation, Types, own_parameters

_ROLES = {f"self_attn.{name}.weight": name for name in (*ATTENTION, "q_norm", "k_norm")}
_ROLES |= {f"mlp.{name}.weight": name for name in MLP}
_ROLES |= {f"{name}.weight": name for name in ("input_layernorm", "post_attention_layernorm")}
_BIASES = {name.removesuffix("weight") + "bias" for name in _ROLES if "proj" in name}


def types_of(plan: Plan, mixed: str = "no") -> Types:
    """Return the bytes per value in which a model computes with ``mixed`` precision: inside attention and MLP blocks,
    between blocks, and in its adapters.
    """
    size = next(
        (p.dtype.itemsize for p in plan.owned() if p.name.startswith(plan.layers[:1])), widest(plan)
    )
    if mixed == "bf16_params" or (mixed != "no" and plan.layout.data_world > 1):
        return Types(2, 2)
    if mixed != "no" and size == 4:  # autocast leaves 64-bit weights alone, and computes in 16
        return Types(2, 2, autocasts=size)
    return Types(
        size, max((plan.by_name[a.name].dtype.itemsize for a in plan.adapters), default=size)
    )


def widest(plan: Plan) -> int:
    """Return the bytes per value of the widest floating-point dtype among the plan's parameters."""
    return max((p.dtype.itemsize for p in plan.owned() if p.dtype.is_floating_point), default=4)


def sequence_ranks(plan: Plan) -> int:
    """Return the number of tensor ranks that shard the hidden states between blocks: 1 without sequence parallelism."""
    return plan.layout.tp if plan.sequence_regions else 1


def layer_bytes(
    plan: Plan, layer: str, situation: Situation, types: Types, *, first: bool = False
) -> LayerBytes:
    """Compute the activation bytes per token of ``layer``, exactly for a LLaMA layer, otherwise from above. ``first``
    says that no parameter before the layer trains, so its input needs no gradient.
    """
    hidden = stream_width(plan, layer)
    sequence = sequence_ranks(plan)
    stream = types.as_kept(types.stream) * hidden / sequence
    roles = _llama_roles(plan, layer)
    if roles is None:
        # Only layers with attention and MLP blocks are sharded.
        cut = sum(block.name.startswith(f"{layer}.") for block in plan.blocks) > 1
        ranks = plan.layout.tp if cut else 1
        scores = score_bytes(types) * situation.length * heads_with_scores(plan) / ranks
        return LayerBytes(
            _at_most(plan, layer, situation, types) + scores, stream, False, passing=stream
        )
    llama = Llama(plan, roles, hidden, sequence, situation, types)
    blocks, again = llama.blocks()
    as_input = stream if types.kept is None and llama.keeps_input(first) else 0.0
    return LayerBytes(
        llama.norms(first) + blocks, stream, True, again, as_input, llama.piece(), llama.passing()
    )


def is_known(plan: Plan, layer: str) -> bool:
    """Return whether the activation bytes of ``layer`` are computed by the formula for LLaMA layers."""
    return _llama_roles(plan, layer) is not None


def stream_width(plan: Plan, layer: str) -> int:
    """Return the width of the hidden states, which is assumed to be the number that is most often the rows or the
    columns of the layer's matrices.
    """
    matrices = (planned.shape[-2:] for planned in plan.of_layers[layer] if len(planned.shape) >= 2)
    counts = Counter(size for sides in matrices for size in set(sides))
    return max(counts, key=lambda size: (counts[size], -size), default=0)


def _llama_roles(plan: Plan, layer: str) -> dict[str, ParameterPlan] | None:
    """Return the parameters of a layer by the short names of LLaMA's modules (``q_proj``, ``input_layernorm``);
    ``None`` if the layer has parameters that a LLaMA layer does not have, or lacks some.
    """
    owned = {p.name.removeprefix(f"{layer}."): p for p in own_parameters(plan, layer)}
    roles = {_ROLES[name]: planned for name, planned in owned.items() if name in _ROLES}
    missing = set(_ROLES.values()) - roles.keys() - {"q_norm", "k_norm"}
    return None if missing or owned.keys() - _ROLES.keys() - _BIASES else roles


def _at_most(plan: Plan, layer: str, situation: Situation, types: Types) -> float:
    """Return an upper estimate, from the shapes of the parameters, of the activation bytes per token that a layer of
    any kind keeps.
    """
    count = next((e.count for e in plan.mixtures if e.name.startswith(f"{layer}.")), 1)
    often = min(situation.routes or count, count)
    experts = tuple(f"{e.name}." for e in plan.mixtures)
    tensor = plan.layout.tp if plan.layout.slices_tokens else 1
    values = 2.0 * stream_width(plan, layer) * types.stream / types.size
    wide = 0.0
    for planned in own_parameters(plan, layer):
        local = planned.model_shape(situation.ranks)
        inside = planned.name.startswith(experts)
        if len(local) >= 3 and inside:
            values += often * 2 * sum(local[-2:]) / tensor
        elif len(local) == 2:
            # Count the smaller of rows and columns once more, because either may be the output.
            values += (often / count if inside else 1) * (2 * sum(local) + min(local))
        elif len(local) == 1 and planned.name.endswith("weight"):
            wide += 4 * local[0]  # norms compute in 32 bits
    return (
        types.as_kept(types.size) * values
        + types.as_kept(max(4, types.size)) * wide
        + types.adapters * _of_adapters(plan, layer, situation, types)
    )


def _of_adapters(plan: Plan, layer: str, situation: Situation, types: Types) -> int:
    """Return how many values per token a layer's low-rank adapters keep: as many as their rank, and a copy of the input
    if it is cast to another dtype.
    """
    kept = 0
    for adapter in plan.adapters:
        if adapter.kept_in == LORA_A and adapter.name.startswith(f"{layer}."):
            kept += prod(adapter.shape) // max(adapter.shape)
            if types.adapters != types.size and not is_fused(plan, adapter.base):
                kept += plan.by_name[adapter.base].model_shape(situation.ranks)[-1]
    return kept
