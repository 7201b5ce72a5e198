"""Rewrite a saved adapter for engines, which know experts one by one.

PEFT keeps the factors of a parameter that stacks all experts side by side: ``lora_A`` is ``[experts * rank, in]``,
``lora_B`` ``[out, rank * experts]``. If a family's checkpoints store the projections of each expert by themselves, vLLM
and SGLang look for factors under the same names::

    experts.base_layer.lora_A  ->  experts.3.gate_proj.lora_A [rank, in]    experts.3.up_proj.lora_A [rank, in]
    experts.base_layer.lora_B  ->  experts.3.gate_proj.lora_B [out, rank]   experts.3.up_proj.lora_B [out, rank]

Values are copied. Families whose checkpoints store stacked experts (gpt-oss) are served from PEFT's own format.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .._compat.peft import LORA_A, LORA_B
from .._compat.transformers.saving import AsStored
from ..errors import ConfigError
from ..features.adapters.storage import WEIGHTS
from ..plan import AdapterParameter
from ..train.runtime.writing import atomic_directory
from .merge_files import AdaptedBase

_PREFIX = "base_model.model."


def adapter_for_engine(base: Path, adapter: Path, out: Path, *, trust_remote_code: bool = False) -> int:
    """Write the LoRA adapter of the checkpoint ``base`` for an engine; return how many tensors; refuse other forms."""
    adapted = AdaptedBase(base, adapter, trust_remote_code)
    stored = {key: tensor[...] for key, tensor in adapted.trained.items()}
    contents = {name: p.detach() for name, p in adapted.model.named_parameters()}
    as_stored, settings = AsStored(adapted.model, contents), json.loads((adapter / "adapter_config.json").read_text())
    factors: dict[str, dict[str, AdapterParameter]] = {}
    for each in adapted.adapters:
        if each.experts:
            factors.setdefault(each.base, {})[each.kept_in] = each
    for parameter, pair in factors.items():
        pieces = _pieces(as_stored, parameter, contents[parameter])
        if list(pieces) != [parameter]:
            a, b = (stored.pop(adapted.keys[pair[kind].name]) for kind in (LORA_A, LORA_B))
            stored |= _per_expert(a, b, pair[LORA_A].experts, pieces)
            rank = len(a) // pair[LORA_A].experts
            _note(settings, rank, pieces)
            module = parameter.rpartition(".")[0]
            for other, weight in contents.items():  # engines want all projections of an expert adapted, or none
                if other.rpartition(".")[0] == module and weight.ndim == 3 and other not in factors:
                    beside = _pieces(as_stored, other, weight)
                    experts, rows, columns = weight.shape
                    zeros = torch.zeros(experts * rank, columns), torch.zeros(rows, rank * experts)
                    stored |= _per_expert(*zeros, experts, beside)
                    _note(settings, rank, beside)
    with atomic_directory(out, stale=(WEIGHTS, "adapter_model.bin")) as staging:
        save_file(stored, staging.path / WEIGHTS, metadata={"format": "pt"})
        (staging.path / "adapter_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    return len(stored)


def _pieces(as_stored: AsStored, parameter: str, like: Tensor) -> dict[str, tuple[int, Tensor]]:
    """Return experts and their rows for each stored module that was split from stacked ``like [experts, out, in]``."""
    rows = torch.arange(like.shape[0] * like.shape[1]).view(*like.shape[:2], 1).expand(like.shape)
    found: dict[str, tuple[int, Tensor]] = {}
    for key, piece in as_stored.made_of(parameter, rows).items():
        if piece.shape == like.shape:
            return {parameter: (0, rows)}
        if piece.dim() != 2 or not torch.equal(piece, piece[:, :1].expand_as(piece)):
            break
        found[key.removesuffix(".weight")] = int(piece[0, 0]) // like.shape[1], piece[:, 0] % like.shape[1]
    else:
        if found:
            return found
    raise ConfigError(
        f"the adapter of {parameter} cannot be rewritten: its experts are stored neither alone nor stacked: merge "
        "into the weights (hfscale merge) for this family"
    )


def _per_expert(a: Tensor, b: Tensor, experts: int, pieces: dict[str, tuple[int, Tensor]]) -> dict[str, Tensor]:
    """Return the factors of each stored module, keyed as in an adapter's file."""
    by_expert, found = b.view(len(b), -1, experts), dict[str, Tensor]()
    for module, (expert, rows) in pieces.items():
        found[f"{_PREFIX}{module}.{LORA_A}.weight"] = a.view(experts, -1, a.shape[1])[expert].clone()
        found[f"{_PREFIX}{module}.{LORA_B}.weight"] = by_expert[rows, :, expert].contiguous()
    return found


def _note(settings: dict[str, Any], rank: int, modules: Collection[str]) -> None:
    """Record in an adapter's config that it has factors of this rank for the experts' projections ``modules``."""
    projections = {name.rpartition(".")[2] for name in modules}
    if any("expert" in pattern for pattern in settings.get("alpha_pattern") or {}):
        raise ConfigError(
            "alpha_pattern must not name experts, since engines use one scale for all: train with one lora_alpha"
        )
    known = settings.get("target_modules") or []
    settings["target_modules"] = sorted({*([known] if isinstance(known, str) else known), *projections})
    settings["target_parameters"] = None
    if rank != settings["r"]:
        ranks = {rf"experts\.\d+\.{name}": rank for name in projections}
        settings["rank_pattern"] = {**(settings.get("rank_pattern") or {}), **ranks}
