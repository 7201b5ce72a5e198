"""``hfscale memory-ladder``: what a rank holds as one lever after the other is added to a run.

Counted on a small clone of the model that takes a step with each rung (storages of parameters, gradients and the
optimizer's state; saved tensors), beside the estimate for that clone, and the estimate for the model itself, which
nothing runs.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from .. import create_optimizer, from_pretrained, plan, train_step
from .._host.torch_device import device_module, is_accelerator
from .._host.transformers.classes import from_config as host_from_config
from ..config import ParallelConfig
from ..errors import PlanError
from ..estimate.memory import MemoryEstimate
from ..families.clone import tiny_clone
from ..memory.report import held_bytes, memory_estimate
from ..memory.saved import SavedBytes, count_saved
from ..memory_config import MemoryConfig
from ..runtime import runtime_of
from ..train.step import batch_world
from .pool import RankPool

ROWS, LENGTH = 8, 64
_LAYERS = 4
_SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2}
_SIZES |= {"head_dim": 64, "vocab_size": 2048, "max_position_embeddings": 256}
COUNTED = ("weights", "adapters", "gradients", "optimizer", "activations")
"""Kinds of an estimate that are counted; gathered weights and the loss's chunk come and go."""


@dataclass(frozen=True)
class Rung:
    """A run with all levers up to one.

    Attributes:
        name: of the lever that is added.
        dtype: of the weights.
        recompute: see :class:`hfscale.MemoryConfig`; ``on_host``: whether the optimizer's state is there.
        lora: whether adapters train; ``quantized``: over a base in 4 bits.
        sizes: of the layout.
    """

    name: str
    dtype: torch.dtype = torch.bfloat16
    recompute: str = "none"
    optimizer: str = "adamw_torch_fused"
    on_host: bool = False
    lora: bool = False
    quantized: bool = False
    sizes: Mapping[str, Any] = field(default_factory=dict)

    def memory(self) -> MemoryConfig:
        """Return the rung's ``MemoryConfig``."""
        return MemoryConfig(recompute=self.recompute, offload_optimizer=self.on_host)

    def layout(self) -> ParallelConfig:
        """Return the rung's ``ParallelConfig``."""
        return ParallelConfig(**self.sizes)

    def options(self) -> dict[str, Any]:
        """Return the optimizer's options: stochastic rounding in bf16, where small updates would be lost."""
        return {"stochastic_rounding": self.dtype == torch.bfloat16 and not self.lora}

    def choices(self) -> dict[str, Any]:
        """Arguments of ``from_pretrained`` and of ``plan``."""
        found: dict[str, Any] = {"parallel": self.layout(), "memory": self.memory(), "dtype": self.dtype}
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
    """What was found on one rung, of the rank that holds most.

    Attributes:
        counted: bytes by kind, of the clone; ``estimated`` of the same.
        on_host: bytes of the clone's optimizer that were counted on the host.
        allocated: the allocator's peak, on a GPU; 0 elsewhere.
        model: the estimate for the model itself; ``None`` where it does not fit the layout.
    """

    name: str
    counted: dict[str, int]
    estimated: dict[str, int]
    on_host: int
    allocated: int
    model: MemoryEstimate | None

    @property
    def ratio(self) -> float:
        """The estimate over what was counted."""
        return sum(self.estimated[kind] for kind in COUNTED) / sum(self.counted.values())


def clone_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """Make a small clone, with layers large enough to outweigh the modules around them."""
    fields = config.to_dict()
    return tiny_clone(
        config, layers=_LAYERS, **{name: size for name, size in _SIZES.items() if fields.get(name) is not None}
    )


def climb(config: PreTrainedConfig, tokens: int = 2048, rungs: Sequence[Rung] = LADDER) -> list[Step]:
    """Measure a step of each rung, one after the other.

    Args:
        tokens: of a microbatch of one batch rank, for the estimates of the model itself.

    Raises:
        PlanError: the clone does not fit a rung.
    """
    clone, found = clone_of(config), list[Step]()
    with tempfile.TemporaryDirectory() as directory:
        host_from_config(AutoModelForCausalLM, clone, dtype=torch.float32).save_pretrained(directory)
        for rung in rungs:
            ranks = rung.layout().total_size
            if ranks == 1:
                each = [measured(directory, rung)]
            else:
                with RankPool(ranks) as pool:
                    each = pool.run(measured, directory, rung)
            counted, estimated, on_host, allocated = max(each, key=lambda rank: sum(rank[0].values()))
            found.append(Step(rung.name, counted, estimated, on_host, allocated, _of_model(config, rung, tokens)))
    return found


def measured(directory: str, rung: Rung) -> tuple[dict[str, int], dict[str, int], int, int]:
    """Run a step of the clone; return bytes counted, estimated, counted on the host, and the allocator's peak."""
    held, estimated, kept, peak = _stepped(directory, rung)
    if rung.recompute != "none":  # saved-tensor hooks do not see what a layer keeps while it is recomputed
        _, _, whole, _ = _stepped(directory, replace(rung, recompute="none"))
        kept = replace(kept, around=kept.around + whole.layers // _LAYERS)
    on_host = held["optimizer"] if rung.on_host else 0
    counted = {**held, "optimizer": held["optimizer"] - on_host, "activations": kept.layers + kept.around}
    return counted, estimated, on_host, peak


def _stepped(directory: str, rung: Rung) -> tuple[dict[str, int], dict[str, int], SavedBytes, int]:
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
    return asdict(held_bytes(model, optimizer)), estimated, saved, peak


def _of_model(config: PreTrainedConfig, rung: Rung, tokens: int) -> MemoryEstimate | None:
    try:
        planned = plan(config, **rung.choices())
    except PlanError:
        return None
    return memory_estimate(planned, rung.optimizer, tokens=tokens, optim_args=rung.options())
