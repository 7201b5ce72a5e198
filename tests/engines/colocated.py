"""Train by GRPO with vLLM in the processes that train, in one layout after the other. Runs in vLLM's environment.

    torchrun --nproc-per-node 2 -m tests.engines.colocated DIRECTORY

Writes what each run logged to ``DIRECTORY/logs.json``, by the run's name.
"""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaConfig
from trl.generation import vllm_generation

from ..integrations.trl.script import Case, length_reward, run, save_rows, tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 67,
    "num_attention_heads": 4,
}
SIZES |= {"num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96}
SIZES |= {"eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0}
ARGUMENTS: dict[str, Any] = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 64}
ARGUMENTS |= {
    "num_generations": 4,
    "max_completion_length": 6,
    "optim": "sgd",
    "learning_rate": 0.5,
}
LORA = LoraConfig(
    r=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False
)
RUNS: dict[str, tuple[dict[str, int], Any]] = {
    "tp2": ({"tp_size": 2}, None),
    "pp2": ({"pp_size": 2}, None),
    "dp_shard2": ({"dp_shard_size": 2}, None),
    "lora tp2": ({"tp_size": 2}, LORA),
    "lora pp2": ({"pp_size": 2}, LORA),
}


def write(path: Path) -> None:
    """Write a tiny model and prompts."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), dtype=torch.float32).save_pretrained(
        path
    )
    tokenizer(path)
    save_rows(path, "prompt", 24, 1)


def main(path: Path) -> None:
    """Run them all, with one engine in each process."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        write(path)
    dist.barrier()
    stock = vllm_generation.LLM

    @cache
    def engine(**kwargs: Any) -> Any:
        return stock(**kwargs, dtype="float32", enforce_eager=True)

    logs = {}
    with patch.object(vllm_generation, "LLM", engine):
        for name, (layout, lora) in RUNS.items():
            case = Case(
                "GRPOTrainer", "prompt", ARGUMENTS, lora, more={"reward_funcs": length_reward}
            )
            logs[name] = run(case, str(path), str(path / "out"), layout)
    if dist.get_rank() == 0:
        (path / "logs.json").write_text(json.dumps(logs))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
