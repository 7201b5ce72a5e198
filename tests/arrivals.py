"""Directories as other trainers write them, made by the real libraries over the ranks of a pool."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import PartialState
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

WRITES_SLICES = find_spec("transformers.distributed.checkpoint") is not None
"""Whether transformers' distributed saving leaves slices, as it does since 5.20; it joined them before."""

KINDS = ("state dict", "nested", "compiled", "accelerate", "full", "slices")
"""Ways to write weights."""


def write_shards(start: str, out: str, kind: str, dtype: torch.dtype = torch.float32) -> None:
    """Write the model in ``start`` as FSDP2 over all ranks has it."""
    if kind == "slices":
        config = DistributedConfig(fsdp_size=dist.get_world_size())
        model = AutoModelForCausalLM.from_pretrained(start, dtype=dtype, distributed_config=config)
        model.save_pretrained(out, distributed_checkpoint=True)
        return
    model = _sharded(start, dtype)
    state = get_model_state_dict(model)
    if kind == "state dict":
        dcp.save(state, checkpoint_id=out)
    elif kind == "nested":
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        states = {"state": get_optimizer_state_dict(model, optimizer)}
        dcp.save({"app": {"model": state, "optim": states}, "step": 3}, checkpoint_id=out)
    elif kind == "torchtitan":
        dcp.save(
            {_of_titan(name): _rotated(name, t) for name, t in state.items()}, checkpoint_id=out
        )
    elif kind == "compiled":
        dcp.save({f"_orig_mod.{name}": t for name, t in state.items()}, checkpoint_id=out)
    else:
        save_fsdp_model(_plugin(kind == "full"), _accelerator(), model, out)


_TITAN = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def _of_titan(name: str) -> str:
    for here, there in _TITAN.items():
        name = name.replace(here, there)
    return name


def _rotated(name: str, value: Any) -> Any:
    """Rows of queries and keys as torchtitan orders them: both halves of a head (8 wide) entry by entry."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return value
    whole = value.full_tensor().unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2)
    return _like(whole.contiguous(), value)


def write_trainers_shards(checkpoint: str, out: str) -> None:
    """Write what FSDP2 over all ranks has of a checkpoint that stock Trainer wrote in one process."""
    write_shards(checkpoint, out, "accelerate")
    write_optimizer(checkpoint, f"{checkpoint}/optimizer.pt", out, groups_of_trainer(checkpoint))


def groups_of_trainer(checkpoint: str) -> list[list[str]]:
    """The parameters of Trainer's optimizer: those that decay, and the others."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    decay = [name for name, p in model.named_parameters() if p.ndim > 1]
    others = [name for name, p in model.named_parameters() if p.ndim == 1]
    return [decay, others]


@mock.patch.dict(sys.modules)
def write_partitions(start: str, file: str, out: str, names: list[list[str]], stage: int) -> None:
    """Write weights and an optimizer's state as DeepSpeed's ZeRO has them over three ranks, after its format (0.19);
    weights that are in no group of the optimizer's are frozen.
    """
    world = 3
    weights = AutoModelForCausalLM.from_pretrained(start).state_dict()
    written = torch.load(file, weights_only=True)
    order = [name for group in names for name in group]
    states = {name: written["state"][number] for number, name in enumerate(order)}
    directory = Path(out, "global_step3")
    directory.mkdir(parents=True)
    Path(out, "latest").write_text("global_step3")
    shapes = [{name: weights[name].shape for name in group} for group in names]
    model = {"param_shapes": shapes, "global_steps": 3, "shared_params": {}, "lr_scheduler": None}
    kinds = {"": weights} | {
        key: {name: state[key] for name, state in states.items()}
        for key in ("exp_avg", "exp_avg_sq")
    }
    cut = {kind: _partitions(tensors, names, world, stage) for kind, tensors in kinds.items()}
    scaler = _object_of_deepspeeds()
    for rank in range(world):
        if stage == 3 or rank == 0:
            name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
            model |= _not_trained(start, set(order), rank, world, stage)
            torch.save(model, directory / f"{name}_model_states.pt")
        moments = {
            number: {
                "step": states[order[0]]["step"],
                **{key: cut[key][rank][number] for key in ("exp_avg", "exp_avg_sq")},
            }
            for number in range(len(names))
        }
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [number]}
            for number, group in enumerate(written["param_groups"])
        ]
        base = {"state": moments, "param_groups": groups}
        kept = {"loss_scaler": scaler, "partition_count": world if stage == 3 else [world] * 2}
        kept |= (
            {"fp32_flat_groups": cut[""][rank], "optimizer_state_dict": base}
            if stage == 3
            else {"single_partition_of_fp32_groups": cut[""][rank], "base_optimizer_state": base}
        )
        path = directory / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": kept}, path)


def _not_trained(
    start: str, trained: set[str], rank: int, world: int, stage: int
) -> dict[str, Any]:
    """What the model states of a rank hold besides: weights that do not train, and buffers."""
    whole = AutoModelForCausalLM.from_pretrained(start)
    state = whole.state_dict()
    buffers = [name for name, _ in whole.named_buffers() if name in state]
    shared = dict(whole.all_tied_weights_keys)
    frozen = {
        name: value
        for name, value in state.items()
        if name not in trained and name not in buffers and name not in shared
    }
    held = {"buffer_names": buffers, "module": {name: state[name] for name in buffers}}
    if stage < 3:
        held["module"] = state
    held["shared_params"] = shared
    fragments = dict(frozen)
    for name, value in frozen.items() if stage == 3 else ():
        flat = torch.nn.functional.pad(value.reshape(-1), (0, -value.numel() % world))
        fragments[name] = flat.chunk(world)[rank].clone()
    # Stage 1 writes none.
    told = frozen if stage > 1 else None
    held["frozen_param_shapes"] = told and {name: value.shape for name, value in told.items()}
    held["frozen_param_fragments"] = told and fragments
    return held


def _partitions(
    tensors: dict[str, torch.Tensor], names: list[list[str]], world: int, stage: int
) -> list[list[torch.Tensor]]:
    """The flat partitions of each rank, one for each group."""
    by_group = []
    for group in names:
        flat = [tensors[name].reshape(-1) for name in group]
        if stage == 3:
            padded = [torch.nn.functional.pad(each, (0, -len(each) % world)) for each in flat]
            by_group.append(
                [torch.cat(each) for each in zip(*(p.chunk(world) for p in padded), strict=True)]
            )
        else:
            whole = torch.cat(flat)
            whole = torch.nn.functional.pad(whole, (0, -len(whole) % (2 * world)))
            by_group.append([part.clone() for part in whole.chunk(world)])
    return [list(each) for each in zip(*by_group, strict=True)]


def _object_of_deepspeeds() -> Any:
    """An object whose pickle names a class of DeepSpeed's."""
    name = "deepspeed.runtime.fp16.loss_scaler"
    kind = type("LossScaler", (), {"__module__": name})
    for part in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16", name):
        sys.modules.setdefault(part, ModuleType(part))
    sys.modules[name].LossScaler = kind  # type: ignore[attr-defined]
    made = kind()
    made.cur_scale = 1.0
    return made


def write_optimizer(start: str, file: str, out: str, names: list[list[str]]) -> None:
    """Write the state of an optimizer over full parameters, whose groups have these ``names``, as FSDP2 has it."""
    written = torch.load(file, weights_only=True)
    model = _sharded(start, None)
    named: dict[str, Any] = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": [named[n] for n in group]} for group in names])
    optimizer.load_state_dict({**written, "state": {}})
    for number, name in enumerate(name for group in names for name in group):
        like = named[name]
        for key, value in written["state"][number].items():
            spread = value if value.ndim == 0 else _like(value, like)
            optimizer.state[like][key] = spread
    save_fsdp_optimizer(_plugin(False), _accelerator(), optimizer, model, out)


def _like(value: torch.Tensor, like: Any) -> Any:
    return distribute_tensor(value, like.device_mesh, like.placements)


def _sharded(start: str, dtype: torch.dtype | None) -> Any:
    PartialState(cpu=True)  # whose logger asks for it
    model = AutoModelForCausalLM.from_pretrained(start, dtype=dtype)
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


def write_zero(
    start: Path, out: Path, stage: int, gradient: float, frozen: tuple[str, ...] = ()
) -> None:
    """Write the partitions of a model after one step of AdamW with gradients of one value; weights whose names have a
    part of ``frozen`` do not train.
    """
    model = AutoModelForCausalLM.from_pretrained(start)
    groups = [
        [name for name in group if not any(part in name for part in frozen)]
        for group in groups_of_trainer(str(start))
    ]
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": [named[n] for n in group]} for group in groups])
    for parameter in named.values():
        parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step()
    state = out.with_suffix(".pt")
    torch.save(optimizer.state_dict(), state)
    write_partitions(str(start), str(state), str(out), groups, stage)


@contextmanager
def bytes_read() -> Iterator[list[int]]:
    """Collect the sizes of what is read of files at a place inside the ``with`` block."""
    sizes: list[int] = []
    stock = os.preadv

    def preadv(*args: Any) -> int:
        sizes.append(stock(*args))
        return sizes[-1]

    with mock.patch("os.preadv", preadv):
        yield sizes
