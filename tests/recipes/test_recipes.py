"""One script for every recipe and layout: what is trained, and over what, never depends on how it is cut."""

import copy
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from peft import IA3Config, LoHaConfig
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from hfscale.cli import main
from hfscale.cli.cmd_train import memory_limit_flags
from hfscale.recipes.read import load_recipe
from hfscale.recipes.run import adapter_of, carry_out as finetune, quantization_of
from hfscale.recipes.schema import FinetuneRecipe, PretrainRecipe, RecipeError
from hfscale.testing import RankPool

Pools = Callable[[int], RankPool]

SCRIPTS = Path(__file__).parents[2] / "scripts"
RECIPES = SCRIPTS / "recipes"

LORA = {"method": "lora", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
EXPERTS = {
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj"],
}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"adapter": LORA, "merge": True},
    "qlora": {"adapter": LORA, "quantization": NF4, "merge": "float32"},
    "adamw_8bit": {"training": {"optimizer": "adamw_8bit"}},
    "bf16_params": {"training": {"mixed_precision": "bf16_params"}},
    "fp8": {
        "training": {"mixed_precision": "fp8"},
        "float8": {"recipe": "tensorwise", "leave_out": ["down_proj"]},
    },
}
# The first is what the others must equal; only the mixture has experts to spread.
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "single": {},
        "tp2": {"tp_size": 2},
        "pp2": {"pp_size": 2, "num_microbatches": 2},
        "shard2": {"dp_shard_size": 2},
        "cp2": {"cp_size": 2},
    },
    "qwen3_moe": {"single": {}, "ep2": {"ep_size": 2}, "ep2-tp2": {"ep_size": 2, "tp_size": 2}},
}
# Blocks of 64 values are cut by no layout here; 8-bit states turn rounding into steps of their own size.
TOLERANCE = {
    "full": 1e-5,
    "lora": 1e-5,
    "qlora": 2e-5,
    "adamw_8bit": 1e-4,
    "bf16_params": 1e-2,
    "fp8": 1e-2,
}
STEPS = 3
_FAST = {
    ("qlora", "llama"): ["single", "tp2", "cp2"],
    ("lora", "qwen3_moe"): ["single", "ep2"],
    ("fp8", "llama"): ["single", "shard2"],
}
_CASES = [
    pytest.param(*case, layouts, id=f"{'-'.join(case)}-fast") for case, layouts in _FAST.items()
] + [
    pytest.param(method, family, list(layouts), id=f"{method}-{family}", marks=pytest.mark.slow)
    for family, layouts in LAYOUTS.items()
    for method in METHODS
]


def small(family: str) -> Any:
    """Rows, and what ranks hold of them, are whole blocks of 4-bit weights."""
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 320,
    }
    sizes |= {
        "num_key_value_heads": 2,
        "bos_token_id": 1,
        "eos_token_id": 0,
        "max_position_embeddings": 64,
    }
    if family == "llama":
        return LlamaConfig(**sizes, intermediate_size=256)
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "intermediate_size": 128,
    }
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
        AutoModelForCausalLM.from_config(small(family), dtype=torch.float32).save_pretrained(
            directory
        )
        for file in saved_tokenizer.iterdir():
            (directory / file.name).write_bytes(file.read_bytes())
        return {
            "base": str(directory),
            "source": str(tmp_path / "text"),
            "runs": str(tmp_path / "runs"),
        }

    return make


def run(
    start: dict[str, Any],
    name: str,
    method: str,
    layout: dict[str, Any],
    limit: float | None = None,
) -> None:
    """The run of a recipe, on this rank."""
    os.makedirs(start["runs"], exist_ok=True)
    recipe = recipe_for(start, str(Path(start["runs"]) / name), METHODS[method], layout)
    finetune(recipe, limit)


def recipe_for(
    start: dict[str, Any], name: str, method: dict[str, Any], layout: dict[str, Any]
) -> FinetuneRecipe:
    changes = copy.deepcopy(method)
    if "adapter" in changes and "qwen3_moe" in start["base"]:
        changes["adapter"] |= EXPERTS
    training = {
        "steps": STEPS,
        "batch_size": 4,
        "learning_rate": 5e-3,
        "log_every": 1,
        "evaluate_every": STEPS,
    }
    changes["training"] = {**training, **changes.get("training", {})}
    data = {
        "source": start["source"],
        "sequence_length": 32,
        "validation_fraction": 0.3,
        "validation_sequences": 6,
    }
    data["samples"] = 0 if "pp_size" in layout else 2
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


def shown(start: dict[str, Any], name: str) -> str:
    """What the card says of texts before and after training."""
    card = next((Path(start["runs"]) / name).glob("*/README.md")).read_text()
    return card.partition("## Before and after")[2].partition("##")[0]


def trained(path: Path, overrides: list[str]) -> None:
    """The run of a recipe's file, on this rank."""
    finetune(load_recipe(FinetuneRecipe, path, overrides))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_searched_recipe_trains(pools: Pools, base: Any, tmp_path: Path, capsys: Any) -> None:
    """What `hfscale search` writes for two GPUs runs on two processes, and its losses are those of one."""
    start = base("llama")
    recipe = tmp_path / "searched.yaml"
    os.makedirs(start["runs"])
    argv = [
        "search",
        start["base"],
        "--gpus",
        "2",
        "--tokens-per-step",
        "128",
        "--sequence-length",
        "32",
    ]
    assert (
        main([*argv, "--lora", "--rank", "4", "--dtype", "float32", "--out", str(recipe), "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["best"]
    more = [
        f"data.source={start['source']}",
        "data.validation_fraction=0.3",
        "data.validation_sequences=6",
    ]
    more += [
        "training.steps=3",
        "training.log_every=1",
        "training.learning_rate=5e-3",
        "training.mixed_precision='no'",
    ]
    pools(2).run(trained, recipe, [*more, f"name={start['runs']}/two"])
    alone = yaml.safe_load(recipe.read_text())
    assert alone.pop("parallel")
    recipe.write_text(yaml.safe_dump(alone))
    trained(recipe, [*more, f"name={start['runs']}/one"])
    expected = losses(start, "one")
    assert len(expected) >= 3
    assert expected[2] < expected[0]
    assert losses(start, "two") == pytest.approx(expected, rel=TOLERANCE["lora"])


@pytest.mark.daily("lora-qwen3_moe-fast")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("method", "family", "names"), _CASES)
def test_losses_agree(pools: Pools, base: Any, method: str, family: str, names: list[str]) -> None:
    start = base(family)
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
        if "pp2" not in name and method in ("full", "lora", "qlora"):
            assert shown(start, name) == shown(start, "single")
    assert shown(start, "single").count("| <code>word") == 2


@pytest.mark.filterwarnings("ignore")
def test_a_run_goes_on_with_a_saved_adapter_and_says_what_it_needs(
    base: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start = base("llama")
    runs = Path(start["runs"])
    run(start, "first", "lora", {}, limit=math.inf)
    said = capsys.readouterr().out
    assert "100.0% of parameters of the layers have adapters" in said
    assert "optimizer" in said
    assert "memory of the rank with most: predicted 0.0" in said
    assert json.loads((runs / "first" / "adapter" / "adapter_config.json").read_text())["r"] == 4
    card = (runs / "first" / "adapter" / "README.md").read_text()
    assert "library_name: peft" in card
    assert (
        "- adapter: lora (r 4, lora_alpha 8, target_modules all-linear); the base was in float32"
        in card
    )
    assert "PeftModel.from_pretrained(base" in card
    monkeypatch.setitem(METHODS, "further", {"adapter": {"path": str(runs / "first" / "adapter")}})
    run(start, "second", "further", {})
    assert losses(start, "second")[STEPS] == pytest.approx(
        losses(start, "first")[STEPS + 1], rel=1e-6
    )
    assert not (runs / "second" / "checkpoint").exists()
    with pytest.raises(RecipeError, match=r"would be overwritten by name="):
        run(start, "first", "further", {})
    with pytest.raises(RecipeError, match=r"--max-memory=1e-06: a rank would need about"):
        run(start, "third", "full", {}, limit=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", METHODS)
def test_results_are_what_plain_libraries_load(pools: Pools, base: Any, method: str) -> None:
    start = base("llama")
    pools(2).run(run, start, "checked", method, {"tp_size": 2})
    command = [
        sys.executable,
        str(SCRIPTS / "check_checkpoint.py"),
        f"{start['runs']}/checked",
        "--new-tokens",
        "4",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    adapted = "adapter" in METHODS[method]
    assert done.stdout.count("without hfscale") == 1 + adapted
    assert ("peft.peft_model.PeftModelForCausalLM around" in done.stdout) == adapted


def test_shipped_adapters_and_quantizations_are_ones_that_their_libraries_take() -> None:
    for path in sorted(RECIPES.glob("*.yaml")):
        if "pretrain" in path.name:
            continue
        recipe = load_recipe(FinetuneRecipe, path)
        assert (adapter_of(recipe) is None) == (not recipe.adapter)
        assert (quantization_of(recipe) is None) == (not recipe.quantization)


def test_methods_are_configs_of_peft() -> None:
    def made(*overrides: str) -> Any:
        return adapter_of(load_recipe(FinetuneRecipe, RECIPES / "demo_finetune.yaml", overrides))

    assert made() is None
    assert made("adapter.path=somewhere") == "somewhere"
    assert made("adapter.method=dora", "adapter.r=2", "adapter.target_modules=[q_proj]").use_dora
    assert isinstance(made("adapter.method=ia3"), IA3Config)
    assert isinstance(made("adapter.method=loha"), LoHaConfig)
    with pytest.raises(
        RecipeError, match=r"adapter.lora_alfa is no field of LoraConfig: did you mean 'lora_alpha'"
    ):
        made("adapter.method=lora", "adapter.lora_alfa=3")
    with pytest.raises(RecipeError, match="is refused by LoraConfig"):
        made(
            "adapter.method=lora",
            "adapter.target_modules=all-linear",
            "adapter.layers_to_transform=[0]",
        )


_ADAPTED = ("adapter.method=lora", "adapter.target_modules=all-linear")
_QUANTIZED = (*_ADAPTED, "quantization.load_in_4bit=true")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["adapter.r=4"], "adapter.method=None is not known: use lora, dora, ia3, loha"),
        (["adapter.path=x", "adapter.r=4"], "leave out adapter.r"),
        (
            ["quantization.load_in_4bit=true"],
            "without an adapter: weights in 4 or 8 bits cannot be trained",
        ),
        (["merge=true"], "without an adapter: there is nothing to merge"),
        (["parallel.pp_size=2"], "a layout without pipeline stages: set data.samples=0"),
        ([*_ADAPTED, "merge=maybe"], "merge='maybe' is not known"),
        ([*_ADAPTED, "merge=bfloat16"], "the base is not quantized: use merge=true"),
        (
            [*_QUANTIZED, "merge=true"],
            "does not say what dtype its weights are dequantized into: use merge=bfloat16",
        ),
        (
            ["training.dtype=bfloat16"],
            r"updates smaller than .* would be lost; use training.dtype=float32",
        ),
        (
            [*_ADAPTED, "training.dtype=int8"],
            "training.dtype='int8' is not known: use float32 or bfloat16",
        ),
    ],
)
def test_what_cannot_be_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(FinetuneRecipe, RECIPES / "demo_finetune.yaml", overrides)


def test_what_may_be_is_taken() -> None:
    for overrides in (
        [*_ADAPTED, "merge=true", "training.dtype=bfloat16"],
        [*_QUANTIZED, "merge=bfloat16"],
    ):
        load_recipe(FinetuneRecipe, RECIPES / "demo_finetune.yaml", overrides)
    with pytest.raises(RecipeError, match="without an adapter"):
        load_recipe(PretrainRecipe, RECIPES / "demo_pretrain.yaml", ["training.dtype=bfloat16"])
    recipe = load_recipe(
        FinetuneRecipe,
        RECIPES / "demo_finetune.yaml",
        ["quantization.load_in_3bit=true", *_ADAPTED],
    )
    with pytest.raises(
        RecipeError, match=r"load_in_3bit is no field of BitsAndBytesConfig: did you mean"
    ):
        quantization_of(recipe)


@pytest.mark.parametrize(
    ("flags", "limit"),
    [
        ([], None),
        (["--max-memory"], math.inf),
        (["--max-memory=40"], 40.0),
        (["--max-memory=40GiB"], 40.0),
        (["--max-memory=40GB"], 40e9 / 2**30),
    ],
)
def test_a_limit_is_read(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], limit: float | None
) -> None:
    arguments = [
        "finetune.py",
        "--config",
        str(RECIPES / "demo_lora.yaml"),
        "training.steps=3",
        *flags,
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from recipe_flags import recipe_and_limit

    recipe, found = recipe_and_limit(FinetuneRecipe, "x")
    assert (recipe.training.steps, found) == (3, limit)
    assert all(
        float(flag.partition("=")[2]) == pytest.approx(limit)
        for flag in memory_limit_flags(limit)
        if "=" in flag
    )


def test_a_limit_that_is_no_number_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["finetune.py", "--config", "x", "--max-memory", "training.steps=3"]
    )
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from recipe_flags import recipe_and_limit

    with pytest.raises(SystemExit):
        recipe_and_limit(FinetuneRecipe, "x")
    assert "write --max-memory=40" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["demo_lora", "demo_qlora", "demo_8bit"])
def test_the_demos_start_from_the_demos_base(tmp_path: Path, recipe: str) -> None:
    log = tmp_path / "log"
    python = tmp_path / "python"
    python.write_text(f'#!/usr/bin/env bash\necho "$@" >> {log}\n')
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "BASE": "none", "RECIPE": recipe}
    command = ["bash", str(SCRIPTS / "demo_lora.sh"), "training.steps=3"]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    pretrain, train, check, summary = log.read_text().splitlines()
    name = recipe.replace("_", "-")
    assert pretrain.endswith("demo_pretrain.yaml name=none replace=true")
    assert train.endswith(
        f"{recipe}.yaml name={name} replace=true base=runs/none/checkpoint training.steps=3"
    )
    assert check.endswith(f"check_checkpoint.py runs/{name}")
    assert summary.endswith(f"summary.py runs/{name}")
    written, plain = (
        yaml.safe_load((RECIPES / f"{file}.yaml").read_text()) for file in (recipe, "demo_finetune")
    )
    assert (written["name"], written["base"], written["data"]) == (
        name,
        plain["base"],
        plain["data"],
    )
