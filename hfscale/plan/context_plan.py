"""Plan the sharding of sequences over context-parallel ranks, and compute what attention exchanges between them."""

from dataclasses import dataclass, replace

from .contents import Feature, PlanContents
from .feature_plans import counted
from .sequence_split import choose


@dataclass(frozen=True)
class ContextPlan(Feature):
    """Plan the sharding of sequences over context ranks."""

    method: str  # one of :data:`hfscale.names.CP_METHODS`
    # Whether rows may have padding; false for families that count positions, or chunks, from the end of padding
    pads: bool
    # token mixers other than attention by transformers' interface; every context rank runs them on full sequences
    whole: tuple[str, ...] = ()
    reads_masks: tuple[
        str, ...
    ] = ()  # the modules of ``whole`` that are attention in a family's own code, which needs masks as tensors
    # whether the model makes biases for ``whole`` from the attention_mask of all tokens
    whole_mask: bool = False
    # token mixers that each rank runs on its own tokens, sending their states to the rank with the next tokens
    handing: tuple[str, ...] = ()
    # for ``heads_ring``, size of the groups of ranks that exchange tokens for heads; 1 for other methods
    together: int = 1
    # name of a multimodal model's text model, at whose input sequences are sharded; empty: batches are sharded
    text: str = ""
    heads: int = 0  # query heads on one tensor rank; 0 if the config has no such field
    key_heads: int = 0  # key/value heads on one tensor rank; 0 if the config has no such field

    def describe(self, plan: PlanContents) -> list[str]:
        mixers = (
            f"; states handed from rank to rank: {counted(self.handing)}" if self.handing else ""
        )
        if self.whole:
            mixers += (
                f"; run on whole sequences by each, in code of their own: {counted(self.whole)}"
            )
        padding = "" if self.pads else "; rows without padding only"
        inside = f"; cut where {self.text} begins, which each makes whole" if self.text else ""
        return [
            f"sequences: each of {plan.layout.cp} ranks has an early and a late piece of every sequence, and "
            f"attention reads the others' ({self.method}){inside}{mixers}{padding}"
        ]

    @property
    def run_whole(self) -> tuple[str, ...]:
        return self.whole


@dataclass(frozen=True)
class Exchange:
    """Describe how context-parallel ranks exchange keys and values in a layer's attention."""

    method: str = "gather"  # one of :data:`hfscale.names.CP_METHODS`, except ``auto``
    heads: int = 0  # query heads on one tensor rank; 0 if unknown
    replicas: float = (
        1.0  # number of ranks that hold each key head, if there are more ranks than key heads
    )
    between: bool = False  # whether sequences are sharded at all

    @property
    def moves_heads(self) -> bool:
        """Return whether ranks exchange heads for tokens (Ulysses) instead of passing keys."""
        return self.between and self.method in ("heads", "heads_ring")

    def held(self, keys_values: float, queries: float, tokens: int, own: int) -> float:
        """Return the peak bytes of buffers for other ranks' keys and values while a layer's attention runs.

        ``keys_values`` and ``queries`` are bytes per token. A microbatch has ``tokens`` tokens, of which ``own`` are on
        this rank::

            gather       2 kv tokens   all keys and values, and the gradients that this rank adds to them
            ring         4 kv own      a block and the next one in transfer, and the gradients of both
            heads        2 q own       queries that are sent, and queries that are received
            heads_ring   like ring, with key heads replicated if there are fewer than ranks that exchange heads

        Copies that collectives make in order to send are not included: over gloo, at most the same number of bytes.
        """
        if not self.between:
            return 0.0
        if self.method == "heads":
            return 2 * queries * own
        if self.method == "gather":
            return 2 * keys_values * tokens
        return 4 * keys_values * self.replicas * own


NO_EXCHANGE = Exchange()  # every rank has full sequences


def exchange_of(plan: PlanContents) -> Exchange:
    """Return how attention exchanges keys and values under a plan."""
    planned = plan.feature(ContextPlan)
    if planned is None:
        return NO_EXCHANGE
    return exchange_over(
        plan.layout.cp, planned.method, planned.heads, planned.key_heads, planned.together
    )


def exchange_over(
    size: int, method: str, heads: int, key_heads: int, together: int = 1
) -> Exchange:
    """Return how ``size`` context-parallel ranks exchange keys and values by ``method``.

    ``heads`` and ``key_heads`` are the numbers of heads on one tensor rank. Under ``heads_ring``, groups of
    ``together`` ranks exchange heads.
    """
    if size == 1:
        return NO_EXCHANGE
    if heads:
        method = choose(method, heads, key_heads, size)
    elif method == "auto":
        method = "gather"
    found = Exchange(method, heads, between=True)
    if not key_heads or not found.moves_heads:
        return found
    sharing = size if method == "heads" else together
    return replace(found, replicas=max(1.0, sharing / key_heads))
