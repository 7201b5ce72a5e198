"""What the tables of docs/migrating.md tell users to write is there: arguments, keys of recipes, and their values."""

import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import peft
import pytest
from accelerate import GradScalerKwargs
from transformers import BitsAndBytesConfig, TrainingArguments

import hfscale
from hfscale.recipes.schema import FinetuneRecipe, PretrainRecipe

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
CELLS = [
    line.split(" | ", 1)[1].rstrip(" |") for line in PAGE.splitlines() if line.startswith("| ")
]
CONFIGS = (
    hfscale.ParallelConfig,
    hfscale.MemoryConfig,
    hfscale.RoutingConfig,
    hfscale.Float8Config,
)
OTHERS = (peft.LoraConfig, GradScalerKwargs, TrainingArguments, BitsAndBytesConfig)


def arguments() -> set[str]:
    named = {
        each.name for kind in (*CONFIGS, *OTHERS) for each in fields(kind) if is_dataclass(kind)
    }
    calls = (hfscale.from_pretrained, hfscale.load_optimizer)
    named |= {name for call in calls for name in inspect.signature(call).parameters}
    return named | {"dtype", "config", "gguf_file"}  # of transformers' from_pretrained


def keys() -> set[str]:
    made = set()
    for recipe in (FinetuneRecipe, PretrainRecipe):
        for name, kind in get_type_hints(recipe).items():
            made |= (
                {f"{name}.{each.name}" for each in fields(kind)} if is_dataclass(kind) else {name}
            )
    parts: dict[str, Any] = {"parallel": hfscale.ParallelConfig, "adapter": peft.LoraConfig}
    made |= {f"{section}.{each.name}" for section, kind in parts.items() for each in fields(kind)}
    quantized = inspect.signature(BitsAndBytesConfig.__init__).parameters
    return made | {"adapter.method"} | {f"quantization.{name}" for name in quantized}


@pytest.mark.filterwarnings("ignore")
def test_the_right_column_has_fields_of_hfscale() -> None:
    named = {
        name
        for cell in CELLS
        for code in re.findall(r"`([^`]+)`", cell)
        for name in re.findall(r"(\w+)=", code)
    }
    assert len(named) > 30
    assert named - arguments() == set()
    dotted = {key for cell in CELLS for key in re.findall(r"`([a-z]+\.\w+)[:`]", cell)}
    dotted = {key for key in dotted if not key.startswith("hfscale.")}
    assert len(dotted) > 30
    assert dotted - keys() == set()
    alone = {key for cell in CELLS for key in re.findall(r"`([a-z]+): ?[^`]*`", cell)} | {
        "base",
        "name",
    }
    assert alone - keys() == set()


def test_values_are_accepted() -> None:
    for cell in CELLS:
        for code in re.findall(r"`([^`]+)`", cell):
            if (
                found := re.fullmatch(
                    r'(recompute|cp_method|gradient_compression)=(".*"|\[.*\]|\d+)', code
                )
            ) is None:
                continue
            value = eval(found[2])
            more = {"dp_replicate_size": 2} if found[1] == "gradient_compression" else {}
            kind: Any = hfscale.MemoryConfig if found[1] == "recompute" else hfscale.ParallelConfig
            assert getattr(kind(**{found[1]: value}, **more), found[1])
