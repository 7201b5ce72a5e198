"""hfscale's own table of families, where Hugging Face has no tensor-parallel plan or one that cannot be used.

A new family is an entry here; ``scripts/family_sweep.py`` proves it.
"""

from .blueprint import Block, Blueprint

FAMILIES: dict[str, Blueprint] = {
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
