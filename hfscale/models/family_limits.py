"""List families that do not support a feature that other families support, each with the reason."""

SEQUENCE_UNFIT: dict[str, str] = {
    **dict.fromkeys(
        ("albert", "ctrl"), "its attention counts tokens before its projections have gathered them"
    ),
    "axk1": "its MoE layer reshapes its output to the full sequence",
    "deberta-v2": "its relative positions are learned outside of its layers",
    **dict.fromkeys(
        ("gemma3n", "gemma3n_text", "gemma4", "gemma4_text"),
        "its layers add inputs of their own for every token",
    ),
    "openai-gpt": "it reshapes the output of its layers to the full sequence",
}
"""Families whose hidden states cannot be sharded along the sequence. They support tensor parallelism without sequence
parallelism."""

READ_BY_CACHE = ("pi0",)
"""Families whose layers pass keys and values to another model's layers in a cache, instead of returning hidden states.

Gradients therefore reach such layers through keys and values. FSDP2 gathers weights again only when a gradient of a
layer's output arrives, so for these families data ranks keep the gathered weights after the forward pass.
"""

UNWRITABLE: dict[str, str] = {
    "hrm_text": "checkpoints that hold several projections as one, which this version cannot write"
}
"""Families whose checkpoints several ranks cannot write together, with the reason. One process can train and save
them.
"""

READ_BY_MIXERS = {
    "falcon_mamba": ("x_proj", "dt_proj", "out_proj"),
    "jamba": ("dt_proj",),
    "mamba": ("x_proj", "dt_proj", "out_proj"),
    **dict.fromkeys(
        ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"), ("out_proj",)
    ),
}
"""Family -> projections whose weights a state-space mixer reads without calling the projection: ``dt_proj`` always, and
the others in kernels that fuse a mixer's operators on GPUs.
"""

NEVER_CALLED = ("dt_proj",)
"""Projections of :data:`READ_BY_MIXERS` that are called on no device."""
