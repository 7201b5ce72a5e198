"""Turn a dense checkpoint into a mixture of experts that computes the same, ready to be trained further.

    python scripts/upcycle.py runs/demo-llama-stdlib-base/checkpoint runs/upcycled --num-experts 8 --top-k 2

One process, no GPU, and never more than a few tensors in memory. ``make demo-upcycle`` trains the result beside the
dense model.
"""

import argparse
import sys
from pathlib import Path

from transformers import AutoConfig

import hfscale
from hfscale import HFScaleError


def main() -> None:
    arguments = _parse()
    try:
        written = hfscale.upcycle(
            arguments.model,
            arguments.directory,
            num_experts=arguments.num_experts,
            top_k=arguments.top_k,
            every=arguments.every,
            noise=arguments.noise,
            reinitialize=arguments.reinitialize,
            seed=arguments.seed,
            max_shard_size=arguments.max_shard_size,
        )
    except HFScaleError as error:
        sys.exit(f"error: {error}")
    config = AutoConfig.from_pretrained(written)
    size = sum(file.stat().st_size for file in written.glob("*.safetensors"))
    print(
        f"{written}: {config.architectures[0]}, {arguments.num_experts} experts of which each token takes "
        f"{arguments.top_k}, {size / 2**20:,.0f} MiB"
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Turn a dense checkpoint into a mixture of experts: every expert starts as a copy of the MLP.",
        epilog="llama and mistral become mixtral, qwen2 becomes qwen2_moe, qwen3 qwen3_moe, olmo2 flex_olmo, and "
        "granite granitemoe.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "model", help="the dense model: a directory with safetensors files, or a Hub id"
    )
    parser.add_argument(
        "directory", type=Path, help="where the mixture goes; weights that are there are replaced"
    )
    parser.add_argument("--num-experts", type=int, default=8, help="experts in each mixture")
    parser.add_argument(
        "--top-k", type=int, default=2, help="how many of them each token is sent to"
    )
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        help="every how many layers one becomes a mixture (qwen only)",
    )
    parser.add_argument(
        "--noise",
        type=float,
        default=0.0,
        help="noise on expert weights, relative to their standard deviation",
    )
    parser.add_argument(
        "--reinitialize",
        type=float,
        default=0.0,
        help="share of each expert's hidden channels that are drawn anew (Drop-Upcycling)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the router, the noise and the channels"
    )
    parser.add_argument("--max-shard-size", default="5GB", help="the most in one file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
