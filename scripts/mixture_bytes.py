"""Count what a layer of a mixture keeps of a token, beside Megatron's formula for fused code.

    python scripts/mixture_bytes.py [--tokens 4096]

The first layers of models in full size take a step on the meta device in bfloat16, with equally many tokens for every
expert; saved-tensor hooks count. The formula is that of Korthikanti et al. 2022 without dropout (two norms: their
inputs and outputs; queries, keys, values and attention's result), and for each expert of a token what is sent to it,
both projections into it, their product, and what it returns: in units of 2 bytes
``4 h + 2 q + 2 k + r (2 h + 3 f)`` with ``r`` experts a token.
"""

import argparse
from typing import Any

import torch
from transformers import LlamaConfig, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

import hfscale
from hfscale.cost.model.model_shape import shape_of
from hfscale.cost.tools.model_summary import summarize

MODELS: dict[str, PreTrainedConfig] = {
    "Llama 8B": LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=4096,
    ),
    "Mixtral 8x7B": MixtralConfig(num_hidden_layers=4, vocab_size=4096),
    "Qwen3-MoE 30B-A3B": Qwen3MoeConfig(
        hidden_size=2048, moe_intermediate_size=768, intermediate_size=6144, num_hidden_layers=4,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        vocab_size=4096,
    ),
}  # fmt: skip


def rows(tokens: int) -> list[tuple[str, float, float, float, float]]:
    """Model, and KiB of a token and layer: kept, kept under elementwise recomputation, by the formula, and without
    what is computed again: outputs of norms, what is sent to experts, products.
    """
    found = []
    for name, config in MODELS.items():
        given: dict[str, Any] = {"dtype": torch.bfloat16, "sequence": tokens}
        kept = summarize(config, **given).kept
        shape = shape_of(config)
        experts = max(1, shape.routed)
        sent = experts * (2 * shape.hidden if shape.experts else 0)
        formula = (
            4 * shape.hidden + 2 * shape.queries + 2 * shape.keys + sent + 3 * experts * shape.ffn
        )
        again = 2 * shape.hidden + experts * (shape.hidden * bool(shape.experts) + shape.ffn)
        whole, lean = (kept["alone", way].cut for way in ("none", "elementwise"))
        found.append(
            (name, whole / 1024, lean / 1024, 2 * formula / 1024, 2 * (formula - again) / 1024)
        )
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    print(f"hfscale {hfscale.__version__}, KiB of a token and layer in bfloat16")
    print(
        "| | none | elementwise | formula | elementwise / formula | formula, of what it keeps |\n"
        + "|---" * 6
        + "|"
    )
    for name, kept, lean, formula, needed in rows(parser.parse_args().tokens):
        print(
            f"| {name} | {kept:.1f} | {lean:.1f} | {formula:.1f} | {lean / formula:.2f} | {needed:.1f} |"
        )


if __name__ == "__main__":
    main()
