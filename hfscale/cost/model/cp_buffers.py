"""Compute the peak bytes of other ranks' keys and values that context parallelism buffers in one layer's attention.

With ``kv`` bytes of keys and values of a token and ``q`` of its queries, on one tensor rank, ``s`` tokens of all
context ranks and ``s/n`` on each, at the most, which is in the backward pass::

    gather       2 kv s        all keys and values, and the gradients that this rank adds to them
    ring         4 kv s/n      a block and the next one under way, and the same of their gradients
    heads        2 q s/n       what is sent of queries, and what comes for it
    heads_ring   as the ring, with key heads replicated where there are fewer of them than ranks that share them out

What collectives copy in order to send it comes on top: as much again at most, over gloo.
"""

from ...plan.feature_plans import ContextPlan
from ...plan.plan import Plan
from ...plan.sequence_split import choose


def cp_buffer_bytes(plan: Plan, kv: float, q: float, tokens: int, own: int) -> float:
    """Return the buffer bytes of the largest layer, for ``tokens`` of which ``own`` are this rank's; see above."""
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
