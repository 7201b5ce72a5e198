"""Names of users: which one was meant by one that is unknown, and which are paths."""

import difflib
import os
from collections.abc import Iterable

CP_METHODS = ("auto", "gather", "heads", "ring", "heads_ring")
"""How context ranks attend to each other's tokens."""

_AXES = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
_FORMS = (
    *("{}", "{}_size", "{}_degree", "{}_parallel", "{}_parallel_size", "{}_parallel_degree", "{}_parallelism"),
    *("{}_model_parallel", "{}_model_parallel_size"),
)
_SHARDED = ("dp", "dp_size", "data_parallel_size", "data_parallel", "dp_degree", "fsdp", "fsdp_size", "fsdp2", "zero")
_REPLICATED = ("ddp", "ddp_size", "replicas", "num_replicas")
_MEANT: dict[str, tuple[str, ...]] = {
    **{
        form.format(word): (f"{axis}_size", axis)
        for axis, name in _AXES.items()
        for word in (axis, name)
        for form in _FORMS
    },
    **dict.fromkeys(("mp", "mp_size", "model_parallel_size"), ("tp_size", "tp")),
    **dict.fromkeys(_SHARDED, ("dp_shard_size", "dp_shard")),
    **dict.fromkeys(_REPLICATED, ("dp_replicate_size", "dp_replicate")),
    **dict.fromkeys(("ulysses_size", "sp_degree", "ring_size", "sequence_parallel_size"), ("cp_size", "cp")),
    **dict.fromkeys(("micro_batches", "num_micro_batches", "num_microbatches"), ("num_microbatches", "microbatches")),
    **dict.fromkeys(("schedule", "pp_schedule", "pipeline_parallel_schedule"), ("pipeline_schedule", "schedule")),
    **dict.fromkeys(("seq_length", "seq_len", "max_seq_length", "block_size", "context_length"), ("sequence_length",)),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing", "recomputation"), ("recompute",)),
    **dict.fromkeys(("lora_r", "lora_rank"), ("rank", "r")),
    **dict.fromkeys(("optim", "optimizer_name"), ("optimizer",)),
    **dict.fromkeys(("lr",), ("learning_rate", "lr")),
    # How many processes there are is said to the launcher.
    **dict.fromkeys(("gpu", "gpus", "num_gpus", "n_gpus", "ngpus", "nproc", "nproc_per_node"), ("gpus",)),
    **dict.fromkeys(("num_processes", "world_size", "devices", "device", "nodes", "nnodes"), ("gpus",)),
}
"""Names in other tools -> names here, of which the first that is known is meant."""


_SUFFIXES = (".json", ".yaml", ".yml", ".safetensors", ".bin", ".pt", ".gguf")


def written_like_a_path(text: str) -> bool:
    """Return whether a text can be no id on the Hub, which is ``name`` or ``owner/name``."""
    odd = text.startswith((".", "~", "/")) or "\\" in text or text.endswith("/") or text.count("/") > 1
    return odd or os.path.isabs(text) or text.endswith(_SUFFIXES)


def meant(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return which of the ``known`` names was probably meant; ``None`` where none is near.

    Args:
        name: that is none of them; with ``-`` or ``_``, with or without a leading ``--``.
        cutoff: how alike names must be, of 1, where nothing is known of their meaning.
    """
    plain = {each.lstrip("-").replace("-", "_"): each for each in known}
    asked = name.lstrip("-").replace("-", "_").lower()
    if asked in plain:
        return plain[asked]
    if asked in _MEANT:
        return next((plain[each] for each in _MEANT[asked] if each in plain), None)
    close = difflib.get_close_matches(asked, plain, 1, cutoff)
    return plain[close[0]] if close else None
