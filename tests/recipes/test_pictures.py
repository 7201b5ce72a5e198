"""Vision-language models by recipe: conversations with pictures as rows, and the same numbers in every layout."""

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from omegaconf import OmegaConf
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, AutoProcessor

from hfscale.recipes.checks import check_values
from hfscale.recipes.corpus import Document
from hfscale.recipes.pictures import PictureRows, encode_pictures
from hfscale.recipes.read import load_recipe
from hfscale.recipes.run import carry_out as finetune
from hfscale.recipes.schema import DataRecipe, FinetuneRecipe, RecipeError
from hfscale.testing import RankPool

from ..sweeps import cases

Pools = Callable[[int], RankPool]

SCRIPTS = Path(__file__).parents[2] / "scripts"
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
}


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What scripts/make_pictures.py makes, and less of it."""
    spec = importlib.util.spec_from_file_location("make_pictures", SCRIPTS / "make_pictures.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    directory = tmp_path_factory.mktemp("pictures")
    script.make(directory, captions=20, questions=24)
    return directory


def recipe(pictures: Path, name: str, layout: dict[str, Any]) -> FinetuneRecipe:
    values = OmegaConf.load(SCRIPTS / "recipes" / "demo_vision.yaml")
    source = {
        "source": str(pictures / "questions.jsonl"),
        "validation_fraction": 0.4,
        "validation_sequences": 5,
    }
    changes = {
        "name": str(pictures / name),
        "base": str(pictures / "start"),
        "parallel": layout,
        "data": {**source, "samples": 0 if "pp_size" in layout else 2},
        "training": {"steps": 2, "batch_size": 4, "log_every": 1, "evaluate_every": 2},
    }
    del values["parallel"]
    merged = OmegaConf.merge(OmegaConf.structured(FinetuneRecipe), values, changes)
    return OmegaConf.to_object(merged)  # type: ignore[return-value]


def run(pictures: Path, name: str, layout: dict[str, Any]) -> None:
    """The run of a recipe, on this rank."""
    os.makedirs(pictures, exist_ok=True)
    finetune(recipe(pictures, name, layout))


def numbers(directory: Path) -> list[float]:
    records = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    kinds = ("loss", "validation_loss", "merged_validation_loss")
    return [record[kind] for record in records for kind in kinds if kind in record]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", cases(LAYOUTS, daily=["tp2"]))
def test_numbers_agree(pools: Pools, pictures: Path, name: str) -> None:
    run(pictures, f"beside-{name}", {})
    expected = numbers(pictures / f"beside-{name}")
    assert len(expected) == 2 + 2 + 1
    pools(2).run(run, pictures, name, LAYOUTS[name])
    assert numbers(pictures / name) == pytest.approx(expected, rel=1e-5)
    if name != "tp2":  # has samples
        return
    with safe_open(pictures / "tp2" / "adapter" / "adapter_model.safetensors", "pt") as saved:
        trained = set(saved.keys())
    assert any("multi_modal_projector" in name for name in trained)
    assert not any("vision_tower" in name for name in trained)
    before, after = (
        AutoModelForImageTextToText.from_pretrained(path)
        for path in (pictures / "start", pictures / "tp2/checkpoint")
    )
    changed = [
        name
        for (name, one), other in zip(before.named_parameters(), after.parameters(), strict=True)
        if not torch.equal(one, other)
    ]
    assert any("projector" in name for name in changed)
    assert any("language_model" in name for name in changed)
    assert not any("vision_tower" in name for name in changed)
    card = (pictures / "tp2" / "adapter" / "README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card
    assert "processor = AutoProcessor.from_pretrained" in card
    assert "| ![picture](sample-1.png) |" in card
    assert (pictures / "tp2" / "adapter" / "sample-1.png").is_file()


def test_only_the_assistants_words_have_labels(pictures: Path) -> None:
    processor = AutoProcessor.from_pretrained(pictures / "start")
    data = DataRecipe(
        source=str(pictures / "questions.jsonl"), format="chat", images_column="images"
    )
    lines = (pictures / "questions.jsonl").read_text().splitlines()
    documents = [Document(str(index), json.loads(line)) for index, line in enumerate(lines[:3])]
    columns = encode_pictures(data, processor, documents, "training")
    for labels, answer in zip(columns["labels"], columns["answer"], strict=True):
        said = processor.decode(
            [label for label in labels if label != -100], skip_special_tokens=True
        )
        assert said.strip() == answer
    rows = PictureRows(Dataset.from_dict(columns).with_format("torch"), processor)
    first, second = rows.step([0, 1, 2, 0], size=2, counted=3)
    assert first["pixel_values"].shape[0] == second["pixel_values"].shape[0] == 2
    assert (second["labels"][1] == -100).all()
    assert int((first["labels"][:, 1:] != -100).sum()) == rows.labels[:2].sum()
    with pytest.raises(RecipeError, match=r"x names the picture 'none.png', but there is no file"):
        encode_pictures(
            data,
            processor,
            [Document("x", {**documents[0].columns, "images": ["none.png"]})],
            "training",
        )
    with pytest.raises(RecipeError, match="x is no conversation with its pictures"):
        encode_pictures(data, processor, [Document("x", {"messages": 3, "images": []})], "training")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.format=text"], "needs conversations, one per row"),
        (["data.packing=true"], "needs conversations, one per row"),
        (["parallel.pp_size=2"], "and a layout without pipeline stages"),
    ],
)
def test_what_cannot_be_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check_values(load_recipe(FinetuneRecipe, "demo_vision", overrides))
