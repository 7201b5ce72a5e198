"""What a step is asked to do: sizes of the axes, of the batch, and what is computed twice."""

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Job:
    """One step of one layout, as far as its time depends on it.

    Attributes:
        sequence: tokens of a sequence.
        batch: sequences of one microbatch.
        microbatches: of one batch rank in a step.
        tp: tensor ranks.
        pp: pipeline ranks.
        dp: ranks with distinct batches.
        cp: context ranks: each has a part of every sequence.
        ep: expert ranks.
        expert_tp: ranks over which each of the experts that are spread is cut; 1 for whole ones.
        shards: data ranks that share the optimizer's state and weights; 1 where each has all of it.
        gathers: whether weights are gathered for every microbatch, in both passes (ZeRO-3).
        virtual: stages of one pipeline rank.
        sequence_parallel: whether norms and residuals are cut over the tensor ranks.
        exchanged: values that a layer's collectives send and receive for each of the stream's, over all of its passes:
            8 for two gathers and two scatters in each direction, 10 where the backward pass gathers inputs again.
        recompute: fraction of the layers that the backward pass computes again.
        attention_again: whether it computes attention between its projections again in all layers.
        causal: whether attention leaves out what comes later.
        trained: fraction of the weights that train; the others have no gradient of their own.
        value_bytes: bytes of a value of the stream between the blocks.
        gradient_bytes: bytes of a gradient as ranks exchange it.
        gathered_bytes: bytes of a weight as data ranks gather it.
        unpacked: bytes moved for every weight of a quantized base, to have it in 16 bits in both passes.
        offloaded: bytes that go to the host or come from it beside a step's passes: activations, or shards.
        handed: bytes that do so when the passes have ended: gradients for an optimizer on the host, and its weights.
        steps_on_host: whether the optimizer steps in the host's memory.
        ranks_per_node: how many share a node.
    """

    sequence: int
    batch: int
    microbatches: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 1
    shards: int = 1
    gathers: bool = False
    virtual: int = 1
    sequence_parallel: bool = False
    exchanged: float = 8
    recompute: float = 0.0
    attention_again: bool = False
    causal: bool = True
    trained: float = 1.0
    value_bytes: float = 2
    gradient_bytes: float = 4
    gathered_bytes: float = 2
    unpacked: float = 0.0
    offloaded: float = 0.0
    handed: float = 0.0
    steps_on_host: bool = False
    ranks_per_node: int = 8

    @property
    def tokens(self) -> float:
        """Of a microbatch, on one context rank."""
        return self.sequence * self.batch / self.cp

    @property
    def expert_ranks(self) -> int:
        """Ranks over which the experts of a layer are spread or cut."""
        return self.ep * self.expert_tp if self.ep > 1 else self.tp

    @property
    def expert_batches(self) -> int:
        """Distinct batches whose tokens meet in one group of experts."""
        return max(1, self.expert_ranks // self.tp)

    @property
    def expert_shards(self) -> int:
        """Data ranks that share out an expert's weights."""
        return max(1, self.shards // self.expert_batches)

    @property
    def expert_replicas(self) -> int:
        """Replicas of those."""
        return max(1, self.dp * self.cp // self.expert_batches // self.expert_shards)

    @property
    def slices_tokens(self) -> bool:
        """Whether tensor ranks each send a share of a batch to whole experts."""
        return self.ep > 1 and self.tp > 1 and self.expert_tp == 1

    @property
    def ranks(self) -> int:
        """Of the run."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def nodes(self) -> int:
        """Nodes that they are on."""
        return ceil(self.ranks / self.ranks_per_node)

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, over all ranks."""
        return self.sequence * self.batch * self.microbatches * self.dp
