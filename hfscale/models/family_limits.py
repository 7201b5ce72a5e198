"""List families that cannot have something that others have, and why."""

SEQUENCE_UNFIT: dict[str, str] = {
    **dict.fromkeys(
        ("albert", "ctrl"), "its attention counts tokens before its projections have gathered them"
    ),
    "axk1": "its mixture gives its output the shape of the whole sequence",
    "deberta-v2": "its relative positions are learned outside of its layers",
    **dict.fromkeys(
        ("gemma3n", "gemma3n_text", "gemma4", "gemma4_text"),
        "its layers add inputs of their own for every token",
    ),
    "openai-gpt": "it gives what its layers return the shape of the whole sequence",
}
"""Families whose hidden states cannot be cut along the sequence; they run tensor-parallel without."""

READ_BY_CACHE = ("pi0",)
"""Families whose layers pass states to another model's layers in a cache, instead of returning them.

Backward passes come to such layers by keys and values. FSDP2 gathers weights again where a gradient of what a layer
returned arrives, so data ranks keep those of these families from the forward pass on.
"""

UNWRITABLE: dict[str, str] = {
    "hrm_text": "checkpoints that hold several projections as one, which this version cannot write"
}
"""Families whose checkpoints several ranks cannot write together; one process can train and save them."""
