"""Random models, layouts and levers: estimates that must agree with plans, and searches that must not contradict them.

    python scripts/planner_fuzz.py [--draws 200] [--seed 7]

Of every draw that a plan takes: an estimate's bytes are those of ``hfscale.memory_estimate`` for every stage, its terms
add up and none is negative, and twice the tensor ranks hold no more weights. Nothing is trained.
"""

import argparse
import random
import sys
from typing import Any

import torch
from peft import LoraConfig
from transformers import GPT2Config, LlamaConfig, MixtralConfig, Qwen3Config

import hfscale
from hfscale import ConfigError, MemoryConfig, ParallelConfig, PlanError
from hfscale.cost.tools.measure_layers import measured_layers
from hfscale.cost.tools.memory_report import memory_of_ranks
from hfscale.cost.tools.simulated_rank import run_spec

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "vocab_size": 1024,
}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4}
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=8),
    "gpt2": GPT2Config(n_embd=256, n_layer=8, n_head=8, vocab_size=1024),
}


def draw(random: random.Random) -> tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A family, sizes of a layout, what a plan is told besides, and what an estimate is."""
    family = random.choice(list(FAMILIES))
    tp = random.choice([1, 2, 4])
    sizes = {
        "tp_size": tp,
        "pp_size": random.choice([1, 1, 2, 4]),
        "dp_shard_size": random.choice([1, 2, 4]),
    }
    sizes |= {
        "dp_replicate_size": random.choice([1, 1, 2]),
        "sequence_parallel": tp > 1 and random.random() < 0.6,
    }
    if family == "mixtral" and random.random() < 0.5:
        sizes["ep_size"] = random.choice([2, 4])
    memory = MemoryConfig(
        recompute=random.choice(["none", "full"]), offload_optimizer=random.random() < 0.2
    )
    plan: dict[str, Any] = {
        "dtype": random.choice([torch.float32, torch.bfloat16]),
        "memory": memory,
    }
    if random.random() < 0.3:
        plan["peft_config"] = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    step = {
        "num_microbatches": random.choice([4, 8]),
        "optimizer": random.choice(["adamw_torch", "adamw_8bit"]),
    }
    return family, sizes, plan, step


def wrong(
    family: str, sizes: dict[str, Any], plan: dict[str, Any], step: dict[str, Any]
) -> list[str]:
    """What contradicts what.

    Raises:
        ConfigError, PlanError: the layout does not fit the model.
    """
    config = FAMILIES[family]
    found = []
    one = hfscale.estimate(config, ParallelConfig(**sizes), sequence_length=128, **step, **plan)
    planned = hfscale.plan(config, ParallelConfig(**sizes), **plan)
    given: dict[str, Any] = {**step, "tokens": 128}
    seen = measured_layers(planned, run_spec(config, **plan), 128)
    held = memory_of_ranks(planned, **given, routes=2 if planned.mixtures else None, measured=seen)
    if [stage.memory for stage in one.stages] != list(held):
        found.append("bytes are not the plan's")
    if abs(sum(one.time.terms.values()) - one.seconds) > 1e-9 or min(one.time.terms.values()) < 0:
        found.append("terms do not add up, or are negative")
    try:
        wider = ParallelConfig(**{**sizes, "tp_size": 2 * sizes["tp_size"]})
        more = hfscale.estimate(config, wider, sequence_length=128, **step, **plan)
    except (ConfigError, PlanError):
        return found
    if more.fullest.memory.weights > one.fullest.memory.weights:
        found.append("twice the tensor ranks hold more weights")
    return found


def main() -> int:
    """Draw, and say what is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    source = random.Random(arguments.seed)
    planned = 0
    failed = 0
    for _ in range(arguments.draws):
        case = draw(source)
        try:
            problems = wrong(*case)
        except (ConfigError, PlanError):
            continue
        planned += 1
        failed += bool(problems)
        if problems:
            print(*case, problems, sep="\n  ")
    print(f"{arguments.draws} draws, {planned} that a plan takes, {failed} wrong")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
