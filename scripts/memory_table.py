"""Write the tables of docs/memory.md: which lever goes with which axis, and with which other, or why not, as plans and
options say.

python scripts/memory_table.py [--check]

Whether a cell that works is equal to the run without the lever is the tests': tests/features/memory,
tests/features/precision, tests/optim/test_rounding.py, tests/parallel/data/test_compress.py.
"""

import argparse
from pathlib import Path
from typing import Any

from peft import LoraConfig
from transformers import BitsAndBytesConfig, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

import hfscale
from hfscale import ConfigError, MemoryConfig, ParallelConfig, PlanError
from hfscale.config.options import Options

PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
BEGIN = "<!-- written by scripts/memory_table.py -->"
END = "<!-- end -->"
LEVERS: dict[str, dict[str, Any]] = {
    'recompute="full"': {"memory": {"recompute": "full"}},
    'recompute="selective"': {"memory": {"recompute": "selective"}},
    'recompute="elementwise"': {"memory": {"recompute": "elementwise"}},
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
BESIDE: dict[str, dict[str, Any]] = {
    **LEVERS,
    "LoRA": {"peft_config": LoraConfig(target_modules="all-linear")},
    "4-bit base": {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)},
    "mixture of experts": {"mixture": True},
}
"""What levers go with, or not."""
CHOICES = ("recompute", "mixed_precision")
"""Of these there is one at a time."""
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
    """Why they do not go together; empty where they do."""
    asked = {
        name: value
        for name, value in lever.items()
        if name in ("peft_config", "quantization_config")
    }
    try:
        compression = {
            name: value for name, value in lever.items() if name == "gradient_compression"
        }
        layout = ParallelConfig(**axes, **compression)
        memory = MemoryConfig(**lever.get("memory", {}))
        precision = lever.get("mixed_precision", "no")
        Options(precision, memory=memory).check_fits(layout)
        config = _config("ep_size" in axes or "mixture" in lever)
        hfscale.plan(config, layout, memory=memory, mixed_precision=precision, **asked)
    except PlanError as error:
        return str(error).splitlines()[1].removeprefix("  - ")
    except ConfigError as error:
        return str(error)
    return ""


def together(
    one: dict[str, Any], other: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Both levers, and the axes that they need; ``None`` where they are one choice."""
    memory = one.get("memory", {}), other.get("memory", {})
    if set(one) & set(other) & {*CHOICES, "gradient_compression"} or set(memory[0]) & set(
        memory[1]
    ) & {*CHOICES}:
        return None
    both = {**one, **other, "memory": {**memory[0], **memory[1]}}
    axes = {"dp_replicate_size": 2} if "gradient_compression" in both else {}
    return both, axes | ({"dp_shard_size": 2} if "offload_parameters" in both["memory"] else {})


def _config(mixture: bool) -> PreTrainedConfig:
    if mixture:
        return Qwen3MoeConfig(
            **_SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
        )
    return LlamaConfig(**_SMALL)


def tables() -> str:
    """In Markdown: a mark where a lever works, else the number of the reason below."""
    reasons: list[str] = []

    def cell(why: str) -> str:
        if why and why not in reasons:
            reasons.append(why)
        return f"[{reasons.index(why) + 1}]" if why else "yes"

    lines = [f"| | {' | '.join(AXES)} |", "|---" * (len(AXES) + 1) + "|"]
    for name, lever in LEVERS.items():
        lines.append(
            f"| `{name}` | {' | '.join(cell(reason(lever, axes)) for axes in AXES.values())} |"
        )
    names = list(BESIDE)
    lines += ["", f"| | {' | '.join(map(_quoted, LEVERS))} |", "|---" * (len(LEVERS) + 1) + "|"]
    for name, other in BESIDE.items():
        cells = []
        for number, lever in enumerate(LEVERS.values()):
            both = together(lever, other) if number < names.index(name) else None
            cells.append(
                ""
                if number >= names.index(name)
                else "one choice"
                if both is None
                else cell(reason(*both))
            )
        lines.append(f"| {_quoted(name)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {why}" for number, why in enumerate(reasons, 1))])


def _quoted(name: str) -> str:
    return f"`{name}`" if name in LEVERS else name


def page(text: str) -> str:
    """The page with the table in it."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.partition(END)[2]}"


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
