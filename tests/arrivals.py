"""Directories as other trainers write them, made by the real libraries over the ranks of a pool."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import PartialState
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import StateDictType, fully_shard
from transformers import AutoModelForCausalLM

try:
    from transformers.distributed import DistributedConfig
except ImportError:  # releases before its distributed saving
    DistributedConfig = None

KINDS = ("state dict", "nested", "compiled", "accelerate", "full", "slices")
"""Ways to write weights."""


def write_shards(start: str, out: str, kind: str) -> None:
    """Write the model in ``start`` as FSDP2 over all ranks has it."""
    if kind == "slices":
        config = DistributedConfig(fsdp_size=dist.get_world_size())
        model = AutoModelForCausalLM.from_pretrained(
            start, dtype=torch.float32, distributed_config=config
        )
        model.save_pretrained(out, distributed_checkpoint=True)
        return
    model = _sharded(start)
    state = get_model_state_dict(model)
    if kind == "state dict":
        dcp.save(state, checkpoint_id=out)
    elif kind == "nested":
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        states = {"state": get_optimizer_state_dict(model, optimizer)}
        dcp.save({"app": {"model": state, "optim": states}, "step": 3}, checkpoint_id=out)
    elif kind == "compiled":
        dcp.save({f"_orig_mod.{name}": t for name, t in state.items()}, checkpoint_id=out)
    else:
        save_fsdp_model(_plugin(kind == "full"), _accelerator(), model, out)


def write_trainers_shards(checkpoint: str, out: str) -> None:
    """Write what FSDP2 over all ranks has of a checkpoint that stock Trainer wrote in one process."""
    model = _sharded(checkpoint)
    written = torch.load(Path(checkpoint, "optimizer.pt"), weights_only=True)
    decay = [name for name, p in model.named_parameters() if p.ndim > 1]
    others = [name for name, p in model.named_parameters() if p.ndim == 1]
    named = dict(model.named_parameters())
    groups = [{"params": [named[name] for name in names]} for names in (decay, others)]
    optimizer = torch.optim.AdamW(groups)
    optimizer.load_state_dict({**written, "state": {}})
    for number, name in enumerate([*decay, *others]):
        parameter: Any = named[name]
        mesh = parameter.device_mesh
        for key, value in written["state"][number].items():
            spread = value if value.ndim == 0 else dcp_shard(value, mesh, parameter)
            optimizer.state[parameter][key] = spread
    save_fsdp_model(_plugin(False), _accelerator(), model, out)
    save_fsdp_optimizer(_plugin(False), _accelerator(), optimizer, model, out)


def dcp_shard(value: torch.Tensor, mesh: Any, like: Any) -> Any:
    return torch.distributed.tensor.distribute_tensor(value, mesh, like.placements)


def _sharded(start: str) -> Any:
    PartialState(cpu=True)  # whose logger asks for it
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    inside = next(each for each in model.modules() if isinstance(each, torch.nn.ModuleList))
    for layer in inside:
        fully_shard(layer)
    return fully_shard(model)


def _plugin(full: bool) -> Any:
    kind = StateDictType.FULL_STATE_DICT if full else StateDictType.SHARDED_STATE_DICT
    config = SimpleNamespace(offload_to_cpu=False, rank0_only=False)
    return SimpleNamespace(fsdp_version=2, state_dict_type=kind, state_dict_config=config)


def _accelerator() -> Any:
    rank = dist.get_rank()
    return SimpleNamespace(
        process_index=rank, num_processes=dist.get_world_size(), is_main_process=rank == 0
    )
