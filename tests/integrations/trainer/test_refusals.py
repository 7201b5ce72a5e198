"""What a Trainer cannot do in a layout is refused when it is made, on every rank, and says what to do."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainingArguments

import hfscale
from hfscale import ParallelConfig
from hfscale._compat.torch import is_compiled_in_place
from hfscale.integrations.trainer.refusals import check_cached
from hfscale.integrations.trainer.trainer_optimizers import check_optimizer, heard_options
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of

from ...refusals import refusal_of
from ...tiny_models import tiny
from .script import Rows, collate

Pools = Callable[[int], RankPool]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"torch_compile_mode": "reduce-overhead"}, "CUDA graphs"),
    ({"torch_compile_backend": "cudagraphs"}, "use compile=True"),
    ({"neftune_noise_alpha": 5.0}, "leave it out"),
    ({"auto_find_batch_size": True}, "per_device_train_batch_size"),
    ({"bf16_full_eval": True}, "sharded"),
    ({"eval_use_gather_object": True}, "share a batch"),
    ({"save_on_each_node": True}, "all nodes see"),
    ({"average_tokens_across_devices": False}, "mean over all tokens"),
    ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
    ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "use_reentrant"),
    ({"enable_jit_checkpoint": True}, "hfscale.preempted(model)"),
    ({"optim": "lomo"}, "Use one of"),
    ({"optim": "sgd", "optim_args": "speed=3"}, "it takes"),
    ({"bf16": True}, "mixed_precision='bf16'"),
    ({"fp16": True}, "mixed_precision='fp16'"),
    ({"use_liger_kernel": True}, "from_pretrained(..., use_liger_kernel=True)"),
    ({"dataloader_num_workers": 2, "dataloader_in_order": False}, "as workers finish"),
]


def arguments(out: str, **given: Any) -> TrainingArguments:
    return TrainingArguments(
        out, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", **given
    )


def try_arguments(out: str) -> list[str]:
    model = hfscale.from_config(tiny("llama"), parallel=ParallelConfig(tp_size=2))
    return [
        refusal_of(lambda given=given: hfscale.Trainer(model, arguments(out, **given)))
        for given, _ in REFUSED
    ]


def test_arguments(pools: Pools, tmp_path: Path) -> None:
    for messages in pools(2).run(try_arguments, str(tmp_path)):
        for message, (given, advice) in zip(messages, REFUSED, strict=True):
            assert advice in message, (given, message)


@pytest.mark.filterwarnings("ignore")  # of TRL's config itself
def test_an_engine_is_not_given_shares(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    config = trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, use_vllm=True, report_to=[])

    class FillsAnother(hfscale.Trainer):
        """A trainer with an engine of its own."""

    message = refusal_of(lambda: FillsAnother(model=None, args=config))
    assert "use_vllm=True" in message
    assert "hfscale.stream_weights" in message


def test_options_that_make_no_difference_are_said(tmp_path: Path) -> None:
    given = arguments(str(tmp_path), optim="adamw_torch", optim_args="amsgrad=true")
    with pytest.warns(UserWarning, match="ignores amsgrad"):
        assert heard_options(given) == {}
    given = arguments(str(tmp_path), optim="sgd", optim_args="momentum=0.9,nesterov=true")
    assert heard_options(given) == {"momentum": "0.9", "nesterov": "true"}
    # Which nothing hears.
    check_optimizer(arguments(str(tmp_path), optim="adamw_torch", optim_args="eps=1e-6"))


def try_precision_of_launcher(out: str) -> str:
    model = hfscale.from_config(tiny("llama"), parallel=ParallelConfig(tp_size=2))
    held = os.environ.get("ACCELERATE_MIXED_PRECISION")
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    try:
        return refusal_of(lambda: hfscale.Trainer(model, arguments(out)))
    finally:
        os.environ.pop("ACCELERATE_MIXED_PRECISION")
        if held is not None:
            os.environ["ACCELERATE_MIXED_PRECISION"] = held


def test_a_precision_that_a_config_file_says_is_told_from_an_argument(
    pools: Pools, tmp_path: Path
) -> None:
    for message in pools(2).run(try_precision_of_launcher, str(tmp_path)):
        assert "of its config file" in message


def try_models(out: str) -> list[str]:
    stock = AutoModelForCausalLM.from_config(tiny("llama"))
    held = hfscale.from_config(tiny("llama"), parallel=ParallelConfig(tp_size=2))
    late = hfscale.from_config(
        tiny("llama"), parallel=ParallelConfig(pp_size=2, pipeline_schedule="pipedream")
    )
    two = ParallelConfig(dp_shard_size=2)
    return [
        refusal_of(lambda: hfscale.Trainer(stock, arguments(out))),
        refusal_of(lambda: hfscale.Trainer(held, arguments(out), parallel=two)),
        refusal_of(lambda: hfscale.Trainer(late, arguments(out))),
    ]


def test_models(pools: Pools, tmp_path: Path) -> None:
    for stock, held, late in pools(2).run(try_models, str(tmp_path)):
        assert "is not parallelized, but 2 processes run" in stock
        assert "parallel=layout" in stock
        assert "leave parallel out" in held
        assert "'1f1b' or 'zbv'" in late


def compiled_by(out: str) -> list[Any]:
    """By which compiler the layers run, under one Trainer after the other."""
    stock = AutoModelForCausalLM.from_config(tiny("llama", num_hidden_layers=1))
    built = hfscale.from_config(tiny("llama", num_hidden_layers=1), compile="aot_eager")
    found = list[Any]()
    for model, backend in (
        (stock, "eager"),
        (stock, None),
        (built, None),
        (built, "eager"),
        (built, None),
    ):
        hfscale.Trainer(model, arguments(out, torch_compile_backend=backend))
        found.append(runtime_of(model).compiled)
        assert is_compiled_in_place(model.model.layers[0]) == bool(found[-1])
    return found


def test_a_trainers_compiler_ends_with_it(pools: Pools, tmp_path: Path) -> None:
    """It goes before that which the model was built with, and so do layers that were not compiled."""
    expected = ["eager", False, "aot_eager", "eager", "aot_eager"]
    assert pools(1).run(compiled_by, str(tmp_path)) == [expected]


def try_rebalanced(out: str, layout: dict[str, Any]) -> str:
    model = hfscale.from_config(
        tiny("llama", num_hidden_layers=4), parallel=ParallelConfig(pp_size=2, **layout)
    )
    given = arguments(out, train_sampling_strategy="batch_rebalance", gradient_accumulation_steps=3)
    return refusal_of(
        lambda: hfscale.Trainer(model, given, data_collator=collate, train_dataset=Rows(48, 1))
    )


@pytest.mark.parametrize(
    ("layout", "advice"),
    [
        ({"num_microbatches": 6}, "set num_microbatches=3"),
        ({"pipeline_schedule": "dualpipev", "virtual_stages": 2}, "length is one of 4, 5, 6"),
    ],
)
def test_batches_of_unequal_rows_are_the_microbatches(
    pools: Pools, tmp_path: Path, layout: dict[str, Any], advice: str
) -> None:
    for message in pools(2).run(try_rebalanced, str(tmp_path), layout):
        assert advice in message


def try_smoothing(out: str) -> str:
    config = tiny("llama", num_labels=3, pad_token_id=0)
    layout = ParallelConfig(pp_size=2)
    model = hfscale.from_config(
        config, parallel=layout, auto_class=AutoModelForSequenceClassification
    )
    return refusal_of(lambda: hfscale.Trainer(model, arguments(out, label_smoothing_factor=0.1)))


def test_a_loss_that_nobody_smooths_is_refused_before_a_stage_waits(
    pools: Pools, tmp_path: Path
) -> None:
    for message in pools(2).run(try_smoothing, str(tmp_path)):
        assert "label_smoothing_factor=0.1" in message
        assert "tensor ranks alone" in message


def test_rows_in_memory_are_not_cached_beside() -> None:
    rows = Dataset.from_dict({"prompt": ["a"]})
    assert "load_from_disk" in refusal_of(lambda: check_cached(rows, 2))
    check_cached(rows, 1)


class OwnLoss(hfscale.Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return model(**inputs).loss


def try_own_loss(out: str) -> str:
    model = hfscale.from_config(tiny("llama"), parallel=ParallelConfig(pp_size=2))
    return refusal_of(
        lambda: OwnLoss(model, arguments(out), data_collator=collate, train_dataset=Rows(8, 1))
    )


def test_own_losses_through_stages(pools: Pools, tmp_path: Path) -> None:
    for message in pools(2).run(try_own_loss, str(tmp_path)):
        assert "compute_loss" in message
        assert "pp_size=1" in message


def counted(out: str, layout: dict[str, int]) -> tuple[int, int, list[str]]:
    """Arguments made without ``use_cpu``, a stock model, ``parallel``: as few lines as can be."""
    torch.manual_seed(0)
    given = TrainingArguments(
        out,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        max_steps=1,
        remove_unused_columns=False,
    )
    trainer = hfscale.Trainer(
        AutoModelForCausalLM.from_config(tiny("llama")),
        given,
        data_collator=collate,
        train_dataset=Rows(8, 1),
        parallel=ParallelConfig(**layout),
    )
    trainer.train()
    return given.world_size, trainer.accelerator.num_processes, [type(trainer.model).__name__]


def without_switch(out: str, layout: dict[str, int]) -> Any:
    import os

    held = os.environ.pop("ACCELERATE_USE_CPU", None)
    try:
        return counted(out, layout)
    finally:
        if held is not None:
            os.environ["ACCELERATE_USE_CPU"] = held


@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"dp_shard_size": 2}])
def test_processes_are_counted_without_being_told(
    pools: Pools, layout: dict[str, int], tmp_path: Path
) -> None:
    for world, batches, _ in pools(2).run(without_switch, str(tmp_path), layout):
        assert world == 2
        assert batches == layout.get("dp_shard_size", 1)
