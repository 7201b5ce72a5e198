"""Decoders: generative families."""

from ..blueprint import Block, Blueprint

DECODERS: dict[str, Blueprint] = {
    "gpt2": Blueprint(
        layers="h",
        blocks={
            "attn": Block(
                column=("c_attn",),
                row=("c_proj",),
                parts={"c_attn": 3},
                local_attributes=("split_size",),
                dropout=("attn_pdrop",),
            ),
            "mlp": Block(column=("c_fc",), row=("c_proj",)),
        },
    ),
}
