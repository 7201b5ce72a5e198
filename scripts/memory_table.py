"""Write the table of docs/memory.md: which lever goes with which axis, or why not, as plans and options say.

python scripts/memory_table.py [--check]

Whether a cell that works is equal to the run without the lever is the tests': tests/memory, tests/precision,
tests/optimizers/test_rounding.py, tests/parallel/data/test_compress.py.
"""

import argparse
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

import hfscale
from hfscale import ConfigError, MemoryConfig, ParallelConfig, PlanError
from hfscale.options import Options

PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
BEGIN, END = "<!-- written by scripts/memory_table.py -->", "<!-- end -->"
LEVERS: dict[str, dict[str, Any]] = {
    'recompute="full"': {"memory": {"recompute": "full"}},
    'recompute="selective"': {"memory": {"recompute": "selective"}},
    'recompute=["mlp"]': {"memory": {"recompute": ["mlp"]}},
    'recompute="8GiB"': {"memory": {"recompute": "8GiB"}},
    "offload_activations": {"memory": {"offload_activations": True}},
    "compress_activations": {"memory": {"compress_activations": True}},
    "offload_parameters": {"memory": {"offload_parameters": True}},
    "offload_optimizer": {"memory": {"offload_optimizer": True}},
    'mixed_precision="bf16"': {"mixed_precision": "bf16"},
    'mixed_precision="fp16"': {"mixed_precision": "fp16"},
    'mixed_precision="fp8"': {"mixed_precision": "fp8"},
    "gradient_compression": {"gradient_compression": "powersgd"},
}
AXES: dict[str, dict[str, Any]] = {
    "tp": {"tp_size": 2},
    "sequence": {"tp_size": 2, "sequence_parallel": True},
    "regather": {"tp_size": 2, "sequence_parallel": True, "sequence_regather": True},
    "pp, 1f1b": {"pp_size": 2},
    "pp, zbv": {"pp_size": 2, "pipeline_schedule": "zbv"},
    "pp, pipedream": {"pp_size": 2, "pipeline_schedule": "pipedream"},
    "dp_shard": {"dp_shard_size": 2},
    "dp_replicate": {"dp_replicate_size": 2},
    "ep": {"ep_size": 2},
    "cp": {"cp_size": 2},
}
_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "intermediate_size": 32,
}


def reason(lever: dict[str, Any], axes: dict[str, Any]) -> str:
    """Why the two do not go together; empty where they do."""
    try:
        compression = {name: value for name, value in lever.items() if name == "gradient_compression"}
        layout = ParallelConfig(**axes, **compression)
        memory = MemoryConfig(**lever.get("memory", {}))
        precision = lever.get("mixed_precision", "no")
        Options(precision, memory=memory).check_fits(layout)
        hfscale.plan(_config(axes), layout, memory=memory, mixed_precision=precision)
    except PlanError as error:
        return str(error).splitlines()[1].removeprefix("  - ")
    except ConfigError as error:
        return str(error)
    return ""


def _config(axes: dict[str, Any]) -> PreTrainedConfig:
    if "ep_size" in axes:
        return Qwen3MoeConfig(**_SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8)
    return LlamaConfig(**_SMALL)


def table() -> str:
    """In Markdown: a mark where a lever works, else the number of the reason below."""
    reasons: list[str] = []
    lines = [f"| | {' | '.join(AXES)} |", "|---" * (len(AXES) + 1) + "|"]
    for name, lever in LEVERS.items():
        cells = []
        for axes in AXES.values():
            why = reason(lever, axes)
            if why and why not in reasons:
                reasons.append(why)
            cells.append(f"[{reasons.index(why) + 1}]" if why else "yes")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {why}" for number, why in enumerate(reasons, 1))])


def page(text: str) -> str:
    """The page with the table in it."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Write it, or check that it is written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    written = PAGE.read_text()
    if parser.parse_args().check:
        raise SystemExit(page(written) != written)
    PAGE.write_text(page(written))


if __name__ == "__main__":
    main()
