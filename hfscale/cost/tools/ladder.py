"""Measure and estimate a rank's memory as memory-saving options are added one by one (``hfscale memory-ladder``).

Measured on a small clone of the model that takes a step with each rung (storages of parameters, gradients and the
optimizer's state; saved tensors), beside the estimate for that clone, and the estimate for the model itself, which
nothing runs.
"""

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ..._compat.torch_device import device_module, is_accelerator
from ..._compat.transformers.classes import from_config as host_from_config
from ...api.build import from_pretrained, plan
from ...config.memory import MemoryConfig
from ...config.parallel import ParallelConfig
from ...errors import PlanError
from ...features.memory.saved import SavedBytes, count_saved
from ...models.clone import tiny_clone
from ...optim import create_optimizer
from ...testing.pool import RankPool
from ...train import batch_world, train_step
from ...train.runtime import runtime_of
from ..model.memory_model import MemoryEstimate
from .memory_report import held_bytes, memory_estimate

ROWS, LENGTH = 8, 64
_LAYERS = 4
_SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2}
_SIZES |= {"head_dim": 64, "vocab_size": 2048, "max_position_embeddings": 256}


@dataclass(frozen=True)
class Rung:
    """Describe a run with all options up to one."""

    name: str  # of the lever that is added
    dtype: torch.dtype = torch.bfloat16  # of the weights
    recompute: str = "none"
    optimizer: str = "adamw_torch_fused"
    on_host: bool = False  # whether the optimizer's state is there
    lora: bool = False  # whether adapters train
    quantized: bool = False  # over a base in 4 bits
    sizes: Mapping[str, Any] = field(default_factory=dict)  # of the layout

    def options(self) -> dict[str, Any]:
        """Return the optimizer's options: stochastic rounding in bf16, where small updates would be lost."""
        return {"stochastic_rounding": self.dtype == torch.bfloat16 and not self.lora}

    def choices(self) -> dict[str, Any]:
        """Return the arguments of ``from_pretrained`` and of ``plan``."""
        memory = MemoryConfig(recompute=self.recompute, offload_optimizer=self.on_host)
        found: dict[str, Any] = {"parallel": ParallelConfig(**self.sizes), "memory": memory, "dtype": self.dtype}
        if self.lora:
            from peft import LoraConfig

            found["peft_config"] = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        if self.quantized:
            from transformers import BitsAndBytesConfig

            found["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        return found


_EIGHT: dict[str, Any] = {"recompute": "full", "optimizer": "adamw_8bit"}
LADDER = (
    Rung("float32", torch.float32),
    Rung("bf16"),
    Rung("recompute", recompute="full"),
    Rung("8-bit optimizer", **_EIGHT),
    Rung("offload", **_EIGHT, on_host=True),
    Rung("LoRA", **_EIGHT, lora=True),
    Rung("QLoRA", **_EIGHT, lora=True, quantized=True),
    Rung("tp2", **_EIGHT, lora=True, quantized=True, sizes={"tp_size": 2}),
    Rung("fsdp2", **_EIGHT, lora=True, quantized=True, sizes={"tp_size": 2, "dp_shard_size": 2}),
)
"""In turn. Adapters leave so little state to the optimizer that it comes back from the host with them."""


@dataclass(frozen=True)
class Step:
    """Hold the result of one rung, for the rank that holds most."""

    name: str  # of the lever that is added
    counted: dict[str, int]  # bytes by kind, of the clone
    estimated: dict[str, int]  # of the same
    on_host: int  # bytes of the clone's optimizer that were counted on the host
    allocated: int  # the allocator's peak, on a GPU; 0 elsewhere
    model: MemoryEstimate | None = None  # the estimate for the model itself; None where it does not fit the layout

    @property
    def totals(self) -> tuple[int, int]:
        """Bytes of all counted kinds: counted, and estimated."""
        return sum(self.counted.values()), sum(self.estimated[kind] for kind in self.counted)

    @property
    def ratio(self) -> float:
        """The estimate divided by the count."""
        counted, estimated = self.totals
        return estimated / counted

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain numbers and strings."""
        names = ("counted", "estimated", "on_host", "allocated", "ratio")
        model = None if self.model is None else {**self.model.kinds, "total": self.model.total}
        return {"lever": self.name, **{name: getattr(self, name) for name in names}, "model": model}


def climb(config: PreTrainedConfig, tokens: int = 2048, rungs: Sequence[Rung] = LADDER) -> list[Step]:
    """Measure a step of each rung on a small clone; ``tokens`` are those of a microbatch of one batch rank."""
    known, found = config.to_dict(), list[Step]()
    clone = tiny_clone(config, layers=_LAYERS, **{k: size for k, size in _SIZES.items() if known.get(k) is not None})
    with tempfile.TemporaryDirectory() as directory:
        host_from_config(AutoModelForCausalLM, clone, dtype=torch.float32).save_pretrained(directory)
        for rung in rungs:
            ranks = ParallelConfig(**rung.sizes).total_size
            with RankPool(ranks) if ranks > 1 else nullcontext() as pool:
                steps = [_measured(directory, rung)] if pool is None else pool.run(_measured, directory, rung)
            fullest = max(steps, key=lambda step: step.totals[0])
            found.append(replace(fullest, model=_of_model(config, rung, tokens)))
    return found


def _measured(directory: str, rung: Rung) -> Step:
    """Run a step of the clone with the options of a rung."""
    held, estimated, kept, peak = _stepped(directory, rung)
    if rung.recompute != "none":  # saved-tensor hooks do not see what a layer keeps while it is recomputed
        _, _, whole, _ = _stepped(directory, replace(rung, recompute="none"))
        kept = replace(kept, around=kept.around + whole.layers // _LAYERS)
    on_host = held["optimizer"] if rung.on_host else 0
    counted = {**held, "optimizer": held["optimizer"] - on_host, "activations": kept.layers + kept.around}
    return Step(rung.name, counted, estimated, on_host, peak)


def _stepped(directory: str, rung: Rung) -> tuple[dict[str, int], dict[str, int], SavedBytes, int]:
    """Return the bytes held, estimated and saved in a step of the clone, and the allocator's peak."""
    model = from_pretrained(directory, **rung.choices()).train()
    runtime = runtime_of(model)
    device, rows = runtime.mesh.device, ROWS // batch_world(model)
    optimizer = create_optimizer(model, rung.optimizer, lr=1e-4, **rung.options())
    if is_accelerator(device):
        device_module(device).reset_peak_memory_stats(device)
    ids = torch.randint(3, model.config.get_text_config().vocab_size, (rows, LENGTH)).to(device)
    with count_saved(runtime.model, runtime.plan.layers, runtime.plan.head) as saved:
        train_step(model, {"input_ids": ids, "labels": ids})
    optimizer.step()
    estimated = memory_estimate(model, rung.optimizer, tokens=rows * LENGTH, optim_args=rung.options()).kinds
    peak = device_module(device).max_memory_allocated(device) if is_accelerator(device) else 0
    return held_bytes(model, optimizer), estimated, saved, peak


def _of_model(config: PreTrainedConfig, rung: Rung, tokens: int) -> MemoryEstimate | None:
    try:
        planned = plan(config, **rung.choices())
    except PlanError:
        return None
    return memory_estimate(planned, rung.optimizer, tokens=tokens, optim_args=rung.options())
