"""Every block of Python in the documentation is run: in small, on a CPU, by as many ranks as it needs.

A page's blocks are run one after the other in one namespace, in which the names that a page takes for known
(``model``, ``batch``, ``optimizer`` ...) are tiny ones. Layouts are made as they are printed, and what is built has
the layout of the pool: the page's other arguments are the call's. A block that cannot be run stands behind
``<!-- not run: the reason -->``.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments

import hfscale
from hfscale import ParallelConfig
from hfscale.models.blueprint import Block, Blueprint
from hfscale.testing import RankPool

from ..mixtures import qwen3_moe
from ..tiny_models import tiny

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])
_BLOCK = re.compile(r"(?ms)^(<!-- not run: [^\n]+ -->\n)?```python\n(.*?)^```")
# tests/scripts/test_docs_site.py, as they are printed.
_RUN_ELSEWHERE = {
    "quickstart.md",
    "tutorial.md",
}
_MODELS = {page.name for page in PAGES if page.name.startswith("model-")}
_LONG = {"finetuning.md", "testing.md"} | _MODELS - {"model-llama-8b.md"}

LAYOUTS: dict[str, dict[str, Any]] = {
    "README.md": {"tp_size": 2},
    "checkpoints.md": {"tp_size": 2},
    "distillation.md": {"tp_size": 2},
    "experts.md": {"ep_size": 2},
    "finetuning.md": {"tp_size": 2},
    "grpo.md": {"tp_size": 2},
    "long-sequences.md": {"cp_size": 2},
    "other-classes.md": {"tp_size": 2},
    "pipelines.md": {"pp_size": 2, "num_microbatches": 4},
    "trainer.md": {"tp_size": 2},
    **{page: {"tp_size": 2} for page in _MODELS},
    "model-llama-70b-qlora.md": {"pp_size": 2, "num_microbatches": 2},
}
"""Of what a page builds; one process where it is not listed."""


def blocks(page: Path) -> list[str]:
    """A line of dots stands for a step."""
    code = [code for skipped, code in _BLOCK.findall(page.read_text()) if not skipped]
    return [
        re.sub(r"(?m)^( *)\.\.\.", r"\1hfscale.train_step(model, batch)", block) for block in code
    ]


def config_of(page: str) -> Any:
    return qwen3_moe() if page == "experts.md" else tiny("llama", pad_token_id=0)


def rows(count: int = 8, width: int = 8) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 67, (count, width), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def context(directory: Path, layout: dict[str, Any], config: Any) -> dict[str, Any]:
    """What pages take for known."""
    parallel = ParallelConfig(**layout)
    batch = rows()
    model = hfscale.from_config(config, parallel=parallel, dtype=torch.float32, seed=0).train()
    optimizer = hfscale.create_optimizer(model, "adamw_torch", lr=1e-3)
    return {
        "torch": torch,
        "hfscale": hfscale,
        "model": model,
        "stock": AutoModelForCausalLM.from_config(config, dtype=torch.float32),
        "config": config,
        "parallel": parallel,
        "batch": batch,
        "loader": torch.utils.data.DataLoader(
            [{name: value[0] for name, value in batch.items()}] * 4, batch_size=2
        ),
        "few_batches": [batch],
        "batch_of": lambda step: batch,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "steps": 502,
        "step": 500,
        "args": TrainingArguments(
            str(directory / "trainer"), max_steps=1, report_to=[], use_cpu=True
        ),
        "train": [{name: value[0] for name, value in batch.items()}] * 8,
        "advantages": torch.ones(1),
        "ids": batch["input_ids"],
        "mask": batch["attention_mask"],
        "classes": torch.zeros(8, dtype=torch.long),
        "routed_experts": [np.array([[[0, 1], [3, 2]]] * 7)] * 8,
        "Block": Block,
        "Blueprint": Blueprint,
        "engine": type("Engine", (), {"update": staticmethod(lambda name, tensor: None)}),
    }


def run_page(
    name: str, code: list[str], checkpoint: str, directory: str, layout: dict[str, Any]
) -> None:
    """On every rank; what pages build is tiny and has ``layout``."""
    stock = hfscale.from_pretrained
    estimate = hfscale.estimate
    config = LlamaConfig(num_hidden_layers=8)  # of which no weights are made

    def from_pretrained(path: Any, *args: Any, **given: Any) -> Any:
        assert not args
        assert isinstance(given.get("parallel"), ParallelConfig)
        return stock(
            checkpoint if isinstance(path, str) else path,
            **{**given, "parallel": ParallelConfig(**layout)},
        )

    def estimated(path: Any, *args: Any, **given: Any) -> Any:
        return estimate(config if isinstance(path, str) else path, *args, **given)

    before = Path.cwd()
    hfscale.from_pretrained = from_pretrained
    hfscale.estimate = estimated
    os.chdir(directory)
    try:
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(0)  # ranks have run other tests
        known = context(Path(directory), layout, config_of(name))
        trained = known["model"]
        for block in code:
            AcceleratorState._reset_state()  # each block is another script's
            if known["model"] is not trained:  # by an earlier block
                trained = known["model"].train()
                known["optimizer"] = hfscale.create_optimizer(trained, "adamw_torch", lr=1e-3)
                known["scheduler"] = torch.optim.lr_scheduler.ConstantLR(known["optimizer"])
            exec(compile(block, name, "exec"), known)
    finally:
        hfscale.from_pretrained = stock
        hfscale.estimate = estimate
        os.chdir(before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page.name in _LONG else [], id=page.name)
        for page in PAGES
        if blocks(page) and page.name not in _RUN_ELSEWHERE
    ],
)
def test_python_in_pages_runs(
    page: Path, pools: Callable[[int], RankPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AutoModelForCausalLM.from_config(config_of(page.name)).save_pretrained(tmp_path / "model")
    (tmp_path / "out").mkdir()
    layout = LAYOUTS.get(page.name, {})
    given = (page.name, blocks(page), str(tmp_path / "model"), str(tmp_path / "out"), layout)
    if layout:
        pools(2).run(run_page, *given)
    else:
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        run_page(*given)
