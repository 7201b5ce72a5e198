"""What begins at some length, or is counted from where a row begins: refused where it is wrong, and nowhere else."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    masking_utils,
)

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale._compat.transformers.experts import use_eager_experts
from hfscale._compat.transformers.packed_rows import packing
from hfscale.extras.pictures.picture_configs import with_pictures
from hfscale.models.precision import keep_float64
from hfscale.train.packed_rows.guard import check_packed_rows, has_packed_rows

from ...families import config_of

DOCUMENTS = (6, 4, 2)
CHUNKS_BEGIN_WITH_DOCUMENTS = hasattr(masking_utils, "remap_positions_for_packed_sequence")
"""Whether this transformers counts chunks of attention from where a document begins, and not from the row's start."""
NARROW = {
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "rope_theta": 1e4,
    "rope_type": "longrope",
}


def _long(tokens: int) -> dict[str, Any]:
    return {
        "rope_parameters": {**NARROW, "original_max_position_embeddings": tokens},
        "original_max_position_embeddings": tokens,
    }


def _dynamic(tokens: int) -> dict[str, Any]:
    return {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        "max_position_embeddings": tokens,
    }


def _sparse(tokens: int) -> dict[str, Any]:
    return {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_block_size": tokens,
        "index_topk_blocks": 1,
    }


# family, what its config says, what tells documents apart, words of the refusal where there is one
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("llama4_text", {"floor_scale": 13}, "positions", ""),
    (
        "llama4_text",
        {"floor_scale": 8},
        "positions",
        r"in rows of more than 7 tokens \(floor_scale\)",
    ),
    ("llama4_text", {"floor_scale": 2, "attn_temperature_tuning": False}, "positions", ""),
    (
        "llama4_text",
        {"attention_chunk_size": 4},
        "positions",
        "" if CHUNKS_BEGIN_WITH_DOCUMENTS else r"more than 4 tokens \(attention_chunk_size\)",
    ),
    ("ministral3", {}, "positions", ""),
    ("minimax_m3_vl_text", _sparse(12), "positions", ""),
    (
        "minimax_m3_vl_text",
        _sparse(4),
        "positions",
        r"in rows of more than 4 tokens \(index_block_size\)",
    ),
    ("deepseek_v32", {"index_topk": 3}, "positions", ""),
    ("glm_moe_dsa", {"index_topk": 3}, "positions", ""),
    ("phi3", _long(6), "positions", ""),
    (
        "phi3",
        _long(5),
        "positions",
        r"one has more than 5 tokens \(original_max_position_embeddings\)",
    ),
    ("llama", _dynamic(6), "positions", ""),
    ("llama", _dynamic(5), "positions", r"one has more than 5 tokens \(max_position_embeddings\)"),
    ("mistral", {"sliding_window": 3}, "positions", ""),
    ("gpt2", {"n_positions": 6}, "positions", ""),
    ("gpt_neo", {"max_position_embeddings": 8}, "positions", r"in rows of more than 8 tokens"),
    ("qwen2_vl", {}, "axes", r"time, height and width\) begin anew"),
    ("qwen2_vl", {}, "four axes", ""),
    ("llama", {}, "mask", ""),
    ("gpt2", {}, "mask", "a mask without position_ids.*or give position_ids"),
    ("llama", _dynamic(8), "mask", r"in rows of more than 8 tokens \(max_position_embeddings\)"),
    ("minimax", {}, "positions", "they do"),
]


def _model(family: str, changes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    if family == "qwen2_vl":
        model = AutoModelForImageTextToText.from_config(with_pictures(family), dtype=torch.float64)
    else:
        model = AutoModelForCausalLM.from_config(config_of(family, **changes), dtype=torch.float64)
    use_eager_experts(model)  # the host's grouped products take no float64
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def _told(by: str, ids: Tensor) -> dict[str, Tensor]:
    if by == "mask":
        apart = torch.block_diag(*(torch.ones(n, n).tril() for n in DOCUMENTS)).bool()
        return {"input_ids": ids, "attention_mask": apart[None, None]}
    positions = torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
    axes = {"axes": 3, "four axes": 4}.get(by)
    return {
        "input_ids": ids,
        "position_ids": positions if axes is None else positions.expand(axes, -1, -1),
    }


def _strays(model: Any, batch: dict[str, Tensor], by: str) -> bool:
    """Whether stock code computes other logits for documents in one row than for each by itself."""
    with torch.no_grad(), keep_float64():
        parts = batch["input_ids"].split(DOCUMENTS, dim=1)
        expected = torch.cat(
            [model(input_ids=part, use_cache=False).logits for part in parts], dim=1
        )
        try:
            with packing(True if by in ("positions", "four axes") else None, batch):
                found = model(**batch, use_cache=False).logits
        except RuntimeError:  # of shapes that do not fit
            return True
    return not torch.allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "changes", "by", "words"), CASES, ids=lambda value: str(value)[:40]
)
def test_what_is_refused_is_wrong_and_what_is_not_is_equal(
    family: str, changes: dict[str, Any], by: str, words: str
) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    model = _model(family, changes)
    batch = _told(by, torch.randint(3, 60, (1, sum(DOCUMENTS))))
    assert has_packed_rows(batch)
    assert _strays(model, batch, by) == bool(words)
    if not words:
        check_packed_rows(model, [batch])
        return
    with pytest.raises(ConfigError, match=words):
        check_packed_rows(model, [batch])


@pytest.mark.parametrize("call", ["train_step", "plain loop"])
@pytest.mark.parametrize(("family", "by"), [("gpt2", "mask"), ("llama4_text", "positions")])
def test_steps_and_plain_loops_look_at_lengths_and_masks(call: str, family: str, by: str) -> None:
    changes = {"floor_scale": 8} if family == "llama4_text" else {}
    stock = AutoModelForCausalLM.from_config(config_of(family, **changes)).train()
    model = hfscale.parallelize(stock, ParallelConfig())
    batch = _told(by, torch.randint(3, 60, (1, sum(DOCUMENTS))))
    batch["labels"] = batch["input_ids"].clone()
    with pytest.raises(ConfigError, match="must not affect each other"):
        hfscale.train_step(model, batch) if call == "train_step" else model(**batch)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_begins_no_document(side: str) -> None:
    places = torch.arange(8) - (3 if side == "left" else 0)
    real = (places >= 0) if side == "left" else places < 5
    causal = torch.ones(8, 8, dtype=torch.bool).tril() & real
    reads_all = torch.where(real[:, None], causal, True)  # as hosts let queries of padding do
    for mask in (causal, reads_all):
        assert not has_packed_rows({"attention_mask": mask[None, None]})
        assert not has_packed_rows(
            {"attention_mask": torch.zeros(8, 8).masked_fill(~mask, -1e30)[None, None]}
        )
    axes = torch.where(real, places.clamp(min=0), 1).expand(3, 1, 8)
    assert not has_packed_rows({"position_ids": axes, "attention_mask": real[None].long()})


def test_pictures_begin_no_document() -> None:
    time = [0, 1, 2, 2, 2, 2, 4, 5]
    height = [0, 1, 2, 2, 3, 3, 4, 5]
    width = [0, 1, 2, 3, 2, 3, 4, 5]
    assert not has_packed_rows({"position_ids": torch.tensor([time, height, width])[:, None]})
