"""A Trainer's 8-bit optimizers keep states of embeddings in 32 bits, as stock Trainer's do, in every layout."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, default_data_collator

import hfscale
from hfscale import ParallelConfig
from hfscale.cost.model.memory_model import estimate_memory
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of

from ...optim.cases import state_bytes
from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
IDS = torch.randint(3, 128, (8, 12), generator=torch.Generator().manual_seed(3))
ROWS = [{"input_ids": ids, "labels": ids} for ids in IDS]


def config(tied: bool) -> Any:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 128,
        "tie_word_embeddings": tied,
    }
    return tiny("llama", **sizes)


def trained(
    optim: str, layout: dict[str, Any] | None, start: str, out: str
) -> tuple[dict[str, str], Any, Any]:
    """The types of states by parameter, the weights, and the bytes of the state with those that were estimated."""
    world = ParallelConfig(**layout or {}).batch_world
    args = transformers.TrainingArguments(
        out, optim=optim, learning_rate=1e-2, lr_scheduler_type="constant", max_steps=3, report_to=[], use_cpu=True,
        per_device_train_batch_size=4 // world, save_strategy="no", max_grad_norm=0.0, disable_tqdm=True,
        logging_strategy="no", adam_epsilon=1e-4,
    )  # fmt: skip
    given: dict[str, Any] = {
        "args": args,
        "train_dataset": ROWS,
        "data_collator": default_data_collator,
    }
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    kind: Any = transformers.Trainer if layout is None else hfscale.Trainer
    if layout is not None:
        given["parallel"] = ParallelConfig(**layout)
    trainer = kind(model, **given)
    trainer.train()
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if layout is None:
        named: Any = list(model.named_parameters())
        weights = {name: each.detach() for name, each in named}
        told = None
    else:
        runtime = runtime_of(model)
        named = [(planned.name, each) for planned, each in runtime.parameters()]
        weights = dict(hfscale.stream_weights(model))
        options = {"embeddings_in_32_bits": True}
        ranks = runtime.mesh.ranks
        held = estimate_memory(
            runtime.plan, ranks, pp_rank=runtime.mesh.pp_rank, optimizer=optim, options=options
        )
        told = state_bytes(optimizer), held.optimizer
    kinds = {
        name: str(optimizer.state[each]["state1"].dtype)
        for name, each in named
        if each in optimizer.state
    }
    return kinds, weights, told


@pytest.fixture
def overrides() -> Iterator[None]:
    """Leave no overrides of bitsandbytes to other tests."""
    bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()
    yield
    bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()


LAYOUTS = {"one": {}, "tp": {"tp_size": 2}, "shard": {"dp_shard_size": 2}, "stages": {"pp_size": 2}}
CASES = [
    *[("lion_8bit", layout, tied) for layout in LAYOUTS for tied in (False, True)],
    *[
        (optim, "tp", True)
        for optim in ("adamw_8bit", "paged_adamw_8bit", "ademamix_8bit", "rmsprop_bnb_8bit")
    ],
]


@pytest.mark.daily("lion_8bit-stages-True", "adamw_8bit-tp-True", "lion_8bit-one-False")
@pytest.mark.parametrize(
    ("optim", "name", "tied"), CASES, ids=["-".join(map(str, case)) for case in CASES]
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("overrides")
def test_embeddings_have_32_bits(
    pools: Pools, optim: str, name: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    torch.manual_seed(0)
    start = str(tmp_path / "start")
    layout = LAYOUTS[name]
    AutoModelForCausalLM.from_config(config(tied), dtype=torch.float32).save_pretrained(start)
    stock, expected, _ = trained(optim, None, start, str(tmp_path))
    assert stock["model.embed_tokens.weight"] == "torch.float32"
    assert stock["model.layers.0.mlp.up_proj.weight"] == "torch.uint8"
    # In one process what stock Trainer has set for its own parameters is there still.
    every = pools(2).run(trained, optim, layout, start, str(tmp_path)) if layout else [None]
    for found in every:
        kinds, weights, told = found or trained(optim, {}, start, str(tmp_path))
        for parameter, dtype in kinds.items():
            assert dtype == stock[parameter]
        name = "model.embed_tokens.weight"
        for value in (weights[name],) if weights else ():  # the first rank's
            torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-3)
        assert told[0] == pytest.approx(told[1], rel=0.02)
