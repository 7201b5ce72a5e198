"""The function that upcycles a dense model to a mixture of experts, in memory or into a directory."""

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedConfig, PreTrainedModel

from ..._compat.transformers.stored import write_configs
from ...distributed.files.writer import STALE, CheckpointWriter
from ...errors import ConfigError, check_count, check_path
from ...train.runtime.writing import atomic_directory
from .expert_tensors import TOKENIZER_FILES, Upcycling, Variation, open_whole
from .moe_targets import find_family, upcycled_config


def upcycle(
    model_or_path: PreTrainedModel | str | os.PathLike[str],
    directory: str | os.PathLike[str] | None = None,
    *,
    num_experts: int = 8,
    top_k: int = 2,
    every: int = 1,
    noise: float = 0.0,
    reinitialize: float = 0.0,
    seed: int = 0,
    max_shard_size: str | int = "5GB",
) -> Any:
    """Turn a dense model into a mixture of experts of a stock class (llama -> mixtral, qwen3 -> qwen3_moe, ...).

    Every expert starts as a copy of the layer's MLP, and the router starts at random (Komatsuzaki et al. 2023, "Sparse
    Upcycling"). So the mixture computes what the dense model computes until it is trained, unless ``noise`` or
    ``reinitialize`` (Nakamura et al. 2025, "Drop-Upcycling") make the experts differ from the start. Dtypes, tied
    embeddings, attention biases, rotary parameters and sliding windows are kept.

    Call it in one process.

    Args:
        model_or_path: a dense causal language model: in memory, a directory, or a Hub id.
        directory: where to write the mixture, and a directory's tokenizer. Then only a few tensors are
            in memory at a time. ``None``: return the model.
        num_experts: experts in each mixture.
        top_k: experts per token. With 1, normalized routing weights are always 1, so the router learns only from a
            load-balancing loss.
        every: every ``every``-th layer becomes a mixture, for targets that can leave layers dense.
        noise: standard deviation of the noise on expert weights, relative to the standard deviation of each matrix.
        reinitialize: fraction of each expert's hidden channels that are redrawn at random.
        seed: of the router, the noise and the channels. The same seed gives the same bytes.
        max_shard_size: the maximum size of one file, as for ``save_pretrained``.

    Returns:
        the path of ``directory``, or the model, in evaluation mode.

    Raises:
        ConfigError: the family, one of the model's features or an argument does not fit; lists all reasons.
        CheckpointError: the dense checkpoint is incomplete, or writing failed; ``directory`` is then unchanged.
    """
    variation = Variation(noise, reinitialize, seed)
    for name, count in {"num_experts": num_experts, "top_k": top_k, "every": every}.items():
        check_count(name, count)
    if directory is not None:
        check_path("directory", directory)
    dense = open_whole(model_or_path)
    _check_class(model_or_path, dense.config)
    config = upcycled_config(dense.config, num_experts=num_experts, top_k=top_k, every=every)
    if top_k == 1 and num_experts > 1:
        warnings.warn(
            "top_k=1: normalized routing weights are then always 1, so only a load-balancing loss "
            "(output_router_logits=True) trains the router; use top_k=2 or more to train it by the model's loss",
            stacklevel=2,
        )
    job = Upcycling(dense, config, every, variation)
    return _in_memory(job) if directory is None else _write(job, Path(directory), max_shard_size)


def _in_memory(job: Upcycling) -> Any:
    """Return the model in memory; equal experts share memory until transformers stacks them."""
    tensors = dict(job.with_progress())
    model = type(job.model).from_pretrained(
        None, config=job.config, state_dict=tensors, dtype=job.dtype
    )
    model.generation_config = job.model.generation_config
    return model


def _write(job: Upcycling, target: Path, max_shard_size: str | int) -> Path:
    source = job.dense.directory
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"upcycle would write {target} from {dist.get_world_size()} processes at once: call it in one, before the "
            "training is launched"
        )
    if source is not None and target.resolve() == source.resolve():
        raise ConfigError(
            f"{target} holds the dense model, which would be overwritten: name another directory for the mixture of "
            "experts"
        )
    with atomic_directory(target, stale=STALE) as staging:
        writer = CheckpointWriter(staging.path, job.contents(), max_shard_size)
        for name, tensor in job.with_progress():
            writer.add(name, tensor)
        write_configs(job.model, staging.path)
        if source is not None:
            for file in (
                file
                for pattern in TOKENIZER_FILES
                for file in source.glob(pattern)
                if file.is_file()
            ):
                shutil.copyfile(file, staging.path / file.name)
        writer.finish()
    return target


def _check_class(source: Any, config: PreTrainedConfig) -> None:
    find_family(config)  # report a family that does not fit first
    in_memory = isinstance(source, PreTrainedModel)
    kinds = [type(source).__name__] if in_memory else config.architectures or []
    if not all(kind.endswith("ForCausalLM") for kind in kinds):
        raise ConfigError(
            f"a {kinds[0]} cannot be upcycled, because only causal language models can: save the model as one, with "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
