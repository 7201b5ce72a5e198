"""Liger's kernels in a layout are Liger's in one process, run by Triton's interpreter: make test-liger."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, TrainingArguments

import hfscale
from hfscale import MemoryConfig, ParallelConfig
from hfscale.testing import RankPool
from hfscale.testing.parity import Batch, Case, assert_layout_equal, measure_parity

from ...families import config_of
from ...layouts import named
from ...tiny_models import tiny
from .liger_on_cpu import prepare

pytestmark = pytest.mark.liger
if find_spec("liger_kernel") is not None:
    prepare()  # in ranks too, which import this file for its cases
Pools = Callable[[int], RankPool]
ROUNDING = 1e-6
"""The kernels compute in float32 on whatever they are given: a few of its roundings of 6e-8."""


@contextmanager
def stock_liger(model: Any, **switches: bool) -> Iterator[None]:
    """Within, ``model`` has the kernels that Liger's own function gives it; the host's files are left as they were."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    names = vars(sys.modules[type(model).__module__])
    before = dict(names)
    _apply_liger_kernel_to_instance(
        model, cross_entropy=False, fused_linear_cross_entropy=False, **switches
    )
    try:
        yield
    finally:
        names.update(before)


@dataclass
class LigerCase(Case):
    """The reference is one process with the kernels.

    Attributes:
        left: Liger's switches that the reference has off.
    """

    left: tuple[str, ...] = ()

    def reference_step(self, model: Any, step: list[list[Batch]]) -> list[Tensor]:
        stock = model.get_base_model() if self.peft is not None else model
        with stock_liger(stock, **dict.fromkeys(self.left, False)):
            return super().reference_step(model, step)


def case(family: str = "llama", **changes: Any) -> LigerCase:
    asked = {"use_liger_kernel": changes.pop("use", True)}
    return LigerCase(
        tiny(family, num_hidden_layers=changes.pop("layers", 2)), asked=asked, **changes
    )


LAYOUTS = named("one", "tp2", "sequence", "regather", "1f1b", "zbv", "shard2", "cp2")
EXACT = ("one", "tp2", "1f1b", "zbv", "shard2")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_equals_one_process(pools: Pools, layout: str) -> None:
    """Where ranks share tokens out, each sums its own rows of a norm's gradient, which the kernel does in float32."""
    layers = 4 if layout == "zbv" else 2
    tolerance = 1e-10 if layout in EXACT else ROUNDING
    pool = None if layout == "one" else pools(2)
    assert_layout_equal(case(layers=layers), ParallelConfig(**LAYOUTS[layout]), pool, tolerance)


def test_stock_code_is_something_else() -> None:
    """Or the tests above would compare it with itself."""
    plain = measure_parity(replace(case(), asked={}), ParallelConfig(), None)
    assert 1e-9 < plain.gradient < ROUNDING, plain


@pytest.mark.parametrize("layout", ["tp2", "1f1b"])
def test_adapters(pools: Pools, layout: str) -> None:
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    assert_layout_equal(case(peft=lora), ParallelConfig(**LAYOUTS[layout]), pools(2))


@pytest.mark.parametrize("again", ["full", ["mlp", "input_layernorm"]])
def test_recomputed_layers(pools: Pools, again: Any) -> None:
    assert_layout_equal(
        case(memory=MemoryConfig(recompute=again)), ParallelConfig(tp_size=2), pools(2)
    )


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "olmo2", "qwen3_moe"])
def test_families(pools: Pools, family: str) -> None:
    """Norms of heads, of which each rank sums its own rows; of all heads at once, and behind blocks; another
    activation; experts, which stay stock's.
    """
    left = ("swiglu",) if family == "qwen3_moe" else ()
    mixed = replace(case(), config=config_of(family), left=left)
    assert_layout_equal(mixed, ParallelConfig(tp_size=2), pools(2), ROUNDING)


def train(
    path: str, out: str, kind: Any, rows: list[dict[str, Tensor]], layout: Any = None
) -> list[float]:
    args = TrainingArguments(
        out, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", max_steps=2, logging_steps=1,
        per_device_train_batch_size=2, use_liger_kernel=True, liger_kernel_config={"fused_linear_cross_entropy": False},
        eval_on_start=True, eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    if layout is not None:
        kernels = args.liger_kernel_config
        parallel = ParallelConfig(**layout)
        model = hfscale.from_pretrained(
            path, dtype=torch.float64, parallel=parallel, use_liger_kernel=kernels
        )
    data = {"train_dataset": rows, "eval_dataset": rows[:2]}
    if kind is hfscale.Trainer:
        trainer = kind(model, args, **data)
        trainer.train()
    else:
        trainer = kind(model, args, **data)
        with stock_liger(model):  # Trainer's own call replaces names for good
            trainer.train()
    return [
        each[key]
        for each in trainer.state.log_history
        for key in ("loss", "eval_loss")
        if key in each
    ]


@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"pp_size": 2, "num_microbatches": 2}])
def test_a_trainer_asks_for_them(pools: Pools, layout: dict[str, int], tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float64).save_pretrained(
        tmp_path / "in"
    )
    ids = torch.arange(48).view(4, 12)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    path = str(tmp_path / "in")
    expected = train(path, str(tmp_path / "stock"), transformers.Trainer, rows)
    for found in pools(2).run(train, path, str(tmp_path / "cut"), hfscale.Trainer, rows, layout):
        assert found == pytest.approx(expected, rel=1e-6)
    assert train(path, str(tmp_path / "ours"), hfscale.Trainer, rows) == pytest.approx(
        expected, rel=1e-6
    )


def fine_tune(path: str, out: str, layout: Any = None) -> list[float]:
    import trl
    from datasets import Dataset

    import hfscale.trl

    from ...integrations.trl.script import tokenizer

    config = trl.SFTConfig(
        out, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, save_strategy="no", max_steps=2,
        logging_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2, use_liger_kernel=True,
        max_length=None,
    )  # fmt: skip
    rows = Dataset.from_dict({"input_ids": torch.arange(96).view(8, 12).remainder(60).tolist()})
    given = {"args": config, "train_dataset": rows, "processing_class": tokenizer(Path(out))}
    model: Any
    if layout is None:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        trainer = trl.SFTTrainer(model, **given)
        with stock_liger(model):
            trainer.train()
    else:
        trainer = hfscale.trl.SFTTrainer(path, parallel=ParallelConfig(**layout), **given)
        trainer.train()
    return [
        each[key]
        for each in trainer.state.log_history
        for key in ("loss", "grad_norm")
        if key in each
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"pp_size": 2}])
def test_a_trainer_of_trl_asks_for_them(
    pools: Pools, layout: dict[str, int], tmp_path: Path
) -> None:
    pytest.importorskip("trl")
    torch.manual_seed(0)
    tokens = {"eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0}
    AutoModelForCausalLM.from_config(tiny("llama", **tokens), dtype=torch.float32).save_pretrained(
        tmp_path / "in"
    )
    expected = fine_tune(str(tmp_path / "in"), str(tmp_path / "stock"))
    for found in pools(2).run(fine_tune, str(tmp_path / "in"), str(tmp_path / "cut"), layout):
        assert found == pytest.approx(expected, rel=1e-5)
