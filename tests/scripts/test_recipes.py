"""One script for every recipe and layout: what is trained, and over what, never depends on how it is cut."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from common.adapting import adapter_of, quantization_of
from common.processes import is_main
from common.read_recipe import load_recipe
from common.recipe import FinetuneRecipe, PretrainRecipe, RecipeError
from finetune import finetune
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from hfscale.testing import RankPool

Pools = Callable[[int], RankPool]

SCRIPTS = Path(__file__).parents[2] / "scripts"
RECIPES = SCRIPTS / "recipes"

LORA = {"method": "lora", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
EXPERTS = {"target_modules": ["q_proj", "v_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"adapter": LORA, "merge": True},
    "qlora": {"adapter": LORA, "quantization": NF4, "merge": "float32"},
    "adamw_8bit": {"training": {"optimizer": "adamw_8bit"}},
}
# The first is what the others must equal; only the mixture has experts to spread.
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "single": {},
        "tp2": {"tp_size": 2},
        "pp2": {"pp_size": 2, "num_microbatches": 2},
        "shard2": {"dp_shard_size": 2},
    },
    "qwen3_moe": {"single": {}, "ep2": {"ep_size": 2}, "ep2-tp2": {"ep_size": 2, "tp_size": 2}},
}
# Blocks of 64 values are cut by no layout here; 8-bit states turn rounding into steps of their own size.
TOLERANCE = {"full": 1e-5, "lora": 1e-5, "qlora": 2e-5, "adamw_8bit": 1e-4}
STEPS = 3
_CASES = [
    pytest.param(method, family, id=f"{method}-{family}", marks=() if fast else pytest.mark.slow)
    for family in LAYOUTS
    for method in METHODS
    for fast in [(method, family) in {("qlora", "llama"), ("lora", "qwen3_moe")}]
]
_FAST_LAYOUTS = ("tp2", "ep2")


def small(family: str) -> Any:
    """Rows, and what ranks hold of them, are whole blocks of 4-bit weights."""
    sizes: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320}
    sizes |= {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 0, "max_position_embeddings": 64}
    if family == "llama":
        return LlamaConfig(**sizes, intermediate_size=256)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "intermediate_size": 128}
    return Qwen3MoeConfig(**sizes, **experts, head_dim=32, norm_topk_prob=True)


@pytest.fixture
def base(saved_tokenizer: Path, tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Makes a checkpoint with random weights and a tokenizer, and says what a recipe needs to start from it."""
    (tmp_path / "text").mkdir()
    for index in range(12):
        words = [f"word{(index * 7 + place * place) % 23}" for place in range(60)]
        (tmp_path / "text" / f"{index}.txt").write_text(" ".join(words))

    def make(family: str) -> dict[str, Any]:
        directory = tmp_path / family
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(small(family), dtype=torch.float32).save_pretrained(directory)
        for file in saved_tokenizer.iterdir():
            (directory / file.name).write_bytes(file.read_bytes())
        return {"base": str(directory), "source": str(tmp_path / "text"), "runs": str(tmp_path / "runs")}

    return make


def run(start: dict[str, Any], name: str, method: str, layout: dict[str, Any], limit: float | None = None) -> None:
    """The run of a recipe, on this rank."""
    os.makedirs(start["runs"], exist_ok=True)
    recipe = recipe_for(start, str(Path(start["runs"]) / name), METHODS[method], layout)
    finetune(recipe, limit)


def recipe_for(start: dict[str, Any], name: str, method: dict[str, Any], layout: dict[str, Any]) -> FinetuneRecipe:
    changes = copy.deepcopy(method)
    if "adapter" in changes and "qwen3_moe" in start["base"]:
        changes["adapter"] |= EXPERTS
    training = {"steps": STEPS, "batch_size": 4, "learning_rate": 5e-3, "log_every": 1, "evaluate_every": STEPS}
    changes["training"] = {**training, **changes.get("training", {})}
    data = {"source": start["source"], "sequence_length": 32, "validation_fraction": 0.3, "validation_sequences": 6}
    values = {"name": name, "base": start["base"], "parallel": layout, "data": data, **changes}
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(FinetuneRecipe), values))  # type: ignore[return-value]


def losses(start: dict[str, Any], name: str) -> list[float]:
    lines = (Path(start["runs"]) / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [
        record[kind]
        for kind in ("loss", "validation_loss", "merged_validation_loss")
        for record in records
        if kind in record
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("method", "family"), _CASES)
def test_losses_agree(
    pools: Pools, base: Any, method: str, family: str, request: pytest.FixtureRequest
) -> None:
    start = base(family)
    names = list(LAYOUTS[family])
    if not request.node.get_closest_marker("slow"):
        names = ["single", *(name for name in names if name in _FAST_LAYOUTS)]
    if "quantization" in METHODS[method] and family == "qwen3_moe":
        start_of = dict(start)
    for name in names:
        layout = LAYOUTS[family][name]
        if layout:
            pools(2).run(run, start, name, method, layout)
        else:
            run(start, name, method, layout)
    expected = losses(start, "single")
    assert len(expected) == STEPS + 2 + ("merge" in METHODS[method])
    assert expected[STEPS + 1] < expected[STEPS]
    for name in names[1:]:
        assert losses(start, name) == pytest.approx(expected, rel=TOLERANCE[method]), name
