"""Runs that stop in one layout and go on in another; ranks import this, so it names no fixtures."""

import warnings
from contextlib import nullcontext
from typing import Any

import torch
from peft import LoraConfig, get_peft_config
from torch import Tensor
from transformers import BitsAndBytesConfig

import hfscale
from hfscale import ParallelConfig
from hfscale.models.precision import keep_float64
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.full_tensors import full_tensors, tensors_to_save

from ..mixtures import EAGER, qwen3_moe
from ..tiny_models import tiny

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp_size": 2},
    "sp2": {"tp_size": 2, "sequence_parallel": True},
    "tp4": {"tp_size": 4},
    "pp2": {"pp_size": 2},
    "pp2-uneven": {"pp_size": 2, "stage_layers": (1, 3)},
    "zbv": {"pp_size": 2, "pipeline_schedule": "zbv"},
    "shard2": {"dp_shard_size": 2},
    "shard4": {"dp_shard_size": 4},
    "replicate2": {"dp_replicate_size": 2},
    "cp2": {"cp_size": 2},
    "tp2-shard2": {"tp_size": 2, "dp_shard_size": 2},
    "pp2-tp2": {"pp_size": 2, "tp_size": 2},
    "pp2-shard2": {"pp_size": 2, "dp_shard_size": 2},
    "ep2": {"ep_size": 2},
    "ep2-tp2": {"ep_size": 2, "tp_size": 2},
    "ep2-cut": {"ep_size": 2, "tp_size": 2, "expert_tp_size": 2},
    "ep4": {"ep_size": 4},
}
_RAGGED = {
    "hidden_size": 64,
    "intermediate_size": 10,
    "num_key_value_heads": 1,
    "vocab_size": 129,
    "num_hidden_layers": 4,
    "tie_word_embeddings": False,
}
_LORA = {"r": 4, "target_modules": "all-linear"}
KINDS: dict[str, dict[str, Any]] = {
    # Fused projections, a head that is the embedding, on the last stage as well.
    "tied": {"config": lambda: tiny("gpt2", n_layer=4, vocab_size=66)},
    # One key/value head for all tensor ranks; ragged vocabulary and MLP, of which narrow's last share of four is empty.
    "ragged": {"config": lambda: tiny("qwen2", **_RAGGED)},
    "narrow": {"config": lambda: tiny("qwen2", **{**_RAGGED, "intermediate_size": 5})},
    # Rows of 512: cut in two along columns, blocks of 256 stay whole.
    "rows": {
        "config": lambda: tiny("llama", intermediate_size=512, vocab_size=128, num_hidden_layers=4)
    },
    "mixture": {"config": lambda: qwen3_moe(num_hidden_layers=4), "build": EAGER},
    "four-bit": {},
    "lora": {"config": lambda: tiny("llama", num_hidden_layers=4), "peft": _LORA},
    # Every tensor rank computes whole projections.
    "oft": {
        "config": lambda: tiny("llama", intermediate_size=48),
        "peft": {"peft_type": "OFT", "oft_block_size": 4, "r": 0, "target_modules": "all-linear"},
    },
}
ROWS = 4


def build(kind: str, layout: str, seed: int, dtype: torch.dtype, path: str | None = None) -> Any:
    chosen = KINDS[kind]
    parallel = ParallelConfig(**LAYOUTS[layout])
    extra = dict(chosen.get("build", {}))
    if path is not None:  # a base in 4 bits comes from a checkpoint
        four = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
        return hfscale.from_pretrained(
            path,
            parallel=parallel,
            dtype=dtype,
            quantization_config=four,
            peft_config=LoraConfig(**_LORA),
            **extra,
        )
    model = hfscale.from_config(
        chosen["config"](), parallel=parallel, seed=seed, dtype=dtype, **extra
    )
    if "peft" not in chosen:
        return model
    adapter = get_peft_config({"peft_type": "LORA", **chosen["peft"]})
    return hfscale.get_peft_model(model, adapter, seed=0).base_model.model


def make_optimizer(model: Any, name: str) -> torch.optim.Optimizer:
    if name == "stock":  # frozen ones and those in 4 bits as well, as users write it
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    if name == "sums":  # has a state of every parameter from the beginning
        return torch.optim.Adagrad(model.parameters(), lr=1e-2)
    own: dict[str, Any] = {"min_8bit_size": 256} if "8bit" in name else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return hfscale.create_optimizer(model, name, lr=1e-2, weight_decay=0.1, **own)


def steps(model: Any, optimizer: Any, scheduler: Any, numbers: range) -> list[tuple[float, float]]:
    """Loss and norm of each step; a step's batch is the same in every layout."""
    found = []
    rank = hfscale.batch_rank(model)
    world = hfscale.batch_world(model)
    for number in numbers:
        generator = torch.Generator().manual_seed(100 + number)
        ids = torch.randint(0, 66, (ROWS, 12), generator=generator)[rank::world]
        loss = hfscale.train_step(model, {"input_ids": ids, "labels": ids})
        found.append((float(loss), float(hfscale.clip_grad_norm_(model, 0.5))))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return found


def leg(
    kind: str,
    name: str,
    layout: str,
    dtype: torch.dtype,
    numbers: range,
    directory: str,
    base: str | None,
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Steps ``numbers`` of a run, from its saved state or the start, written down behind; losses and whole weights."""
    with keep_float64() if dtype == torch.float64 else nullcontext():
        model = build(kind, layout, 0 if numbers.start == 0 else 1 + numbers.start, dtype, base)
        model.train()
        optimizer = make_optimizer(model, name)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=8)
        if numbers.start:
            if numbers.start % 2:
                steps(model, optimizer, scheduler, range(50, 51))  # something else is in its place
            resumed = hfscale.load_state(model, directory, optimizer=optimizer, scheduler=scheduler)
            assert (resumed.step, scheduler.last_epoch) == (numbers.start, numbers.start)
            hfscale.save_state(
                model, f"{directory}-moved", optimizer=optimizer, scheduler=scheduler
            )
        losses = steps(model, optimizer, scheduler, numbers)
        step = numbers.stop
        hfscale.save_state(
            model, f"{directory}/step-{step}", optimizer=optimizer, scheduler=scheduler, step=step
        )
        quantized = runtime_of(model).plan.quantized
        frozen = quantized.weights if quantized is not None else ()
        runtime = runtime_of(model)
        entries = [
            entry
            for entry in tensors_to_save(runtime)
            if entry.planned and entry.owned not in frozen
        ]
        weights = {entry.owned: tensor for entry, tensor in full_tensors(runtime, entries)}
    return losses, {key: tensor.clone() for key, tensor in weights.items() if tensor.numel()}


class Loader:
    """Has a place in its data."""

    def __init__(self, place: int) -> None:
        self.place = place

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def loaders(layout: str, directory: str, source: str | None) -> int | str:
    model = build("tied", layout, 0, torch.float32)
    loader = Loader(100 * hfscale.batch_rank(model) if source is None else -1)
    try:
        if source is not None:
            hfscale.load_state(model, source, dataloader=loader)
        hfscale.save_state(model, directory, dataloader=loader)
    except hfscale.CheckpointError as error:
        return str(error)
    return loader.place
