"""The plan, printed."""

import json
import re
import time
from itertools import product
from math import prod

import pytest
import torch
from transformers import LlamaConfig

import hfscale
from hfscale import ParallelConfig
from hfscale.plan.table import human, local_bytes, render, to_json
from tests.tiny_models import tiny


def test_70b_takes_seconds() -> None:
    config = LlamaConfig(
        num_hidden_layers=80,
        hidden_size=8192,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
        vocab_size=128256,
        dtype="bfloat16",
    )
    start = time.process_time()
    plan = hfscale.plan(config, ParallelConfig(tp_size=8, dp_shard_size=4))
    text = render(plan)
    document = json.loads(to_json(plan))
    assert time.process_time() - start < 5
    assert "70,553,706,496 parameters (131.4 GiB) on tp8 x dp_shard4 = 32 ranks" in text
    assert len(text.splitlines()) < 30  # layers are folded
    assert document["weight_bytes_per_rank"] * 32 == pytest.approx(2 * 70_553_706_496, rel=1e-3)


def test_json_says_what_the_plan_says() -> None:
    plan = hfscale.plan(tiny("gpt2"), ParallelConfig(tp_size=2, dp_shard_size=2))
    document = json.loads(to_json(plan))
    assert document["family"] == "gpt2"
    assert document["layout"] == {
        "pp": 1,
        "dp_replicate": 1,
        "dp_shard": 2,
        "ep": 1,
        "cp": 1,
        "tp": 2,
    }
    assert document["ranks"] == 4
    assert document["layers"] == list(plan.layers)
    assert [block["name"] for block in document["blocks"]] == [block.name for block in plan.blocks]
    assert (document["embedding"], document["head"], document["loss"]) == (
        "transformer.wte",
        "lm_head",
        "ForCausalLM",
    )
    assert [row["name"] for row in document["parameters"]] == [
        planned.name for planned in plan.parameters
    ]
    for row, planned in zip(document["parameters"], plan.parameters, strict=True):
        assert tuple(row["shape"]) == planned.shape
        assert tuple(row["local_shape"]) == planned.local_shape({})
        assert [
            (cut["axis"], cut["dim"], cut["size"], tuple(cut["parts"])) for cut in row["cuts"]
        ] == [(cut.axis, cut.dim, cut.size, cut.parts) for cut in planned.cuts]
        assert tuple(row["partial"]) == planned.partial
        assert row["tied_to"] == planned.tied_to
        assert getattr(torch, row["dtype"]) == planned.dtype


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_of_all_ranks_are_the_models(tied: bool) -> None:
    config = tiny("llama", tie_word_embeddings=tied)
    plan = hfscale.plan(config, ParallelConfig(tp_size=2, dp_shard_size=3), dtype=torch.float64)
    document = json.loads(to_json(plan))
    rows = document["parameters"]
    assert document["weight_bytes_per_rank"] == sum(row["bytes_per_rank"] for row in rows)
    assert document["weight_bytes_per_rank"] == sum(
        local_bytes(planned, {}) for planned in plan.parameters
    )
    for planned in plan.owned():
        if len(planned.cuts) == 2:
            shares = [
                local_bytes(planned, {"tp": t, "dp_shard": d})
                for t, d in product(range(2), range(3))
            ]
            assert sum(shares) == 8 * prod(planned.shape)
            assert shares[0] == max(shares)
    (head,) = [row for row in rows if row["name"] == "lm_head.weight"]
    assert (head["bytes_per_rank"] == 0) is tied


def _row(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return re.split(r"  +", line)


def test_a_row_says_everything() -> None:
    text = str(
        hfscale.plan(tiny("gpt2"), ParallelConfig(tp_size=2, dp_shard_size=2), dtype=torch.float32)
    )
    assert _row(text, "transformer.h.*.attn.c_attn.weight") == [
        "transformer.h.*.attn.c_attn.weight",
        "2",
        "0",
        "32 x 96",
        "dim 1 / tp2 in 3 parts, dim 0 / dp_shard2",
        "16 x 48",
        "6.0 KiB",
        "reduce-scatter over dp_shard",
    ]
    assert (
        _row(text, "transformer.h.*.mlp.c_proj.bias")[-1]
        == "sum over tp, reduce-scatter over dp_shard"
    )
    assert _row(text, "lm_head.weight")[-2:] == ["-", "tied to transformer.wte.weight"]


def test_gradients_of_replicas_are_reduced() -> None:
    text = str(hfscale.plan(tiny("llama"), ParallelConfig(dp_replicate_size=2)))
    assert _row(text, "model.norm.weight")[-1] == "all-reduce over dp_replicate"
    assert _row(str(hfscale.plan(tiny("llama"))), "model.norm.weight")[-1] == "complete"


def test_edges_are_named() -> None:
    text = str(hfscale.plan(tiny("qwen3"), ParallelConfig(tp_size=2)))
    assert re.search(
        r"model.layers.\*.self_attn x2 +column q_proj, k_proj, v_proj; row o_proj; shared q_norm",
        text,
    )
    assert re.search(r"model.embed_tokens +all-reduce forward, 34 of 67 tokens per rank", text)
    assert re.search(
        r"lm_head +all-reduce backward, loss ForCausalLM on cut logits, 34 of 67", text
    )
    assert "edges" not in str(hfscale.plan(tiny("qwen3")))
    assert "data axes: 2 layers" in str(
        hfscale.plan(tiny("qwen3"), ParallelConfig(dp_shard_size=2))
    )


def test_layers_that_differ_are_not_folded() -> None:
    plan = hfscale.plan(tiny("llama"), ParallelConfig(tp_size=2))
    text = render(plan)
    assert _row(text, "model.layers.*.mlp.up_proj.weight")[1] == "2"
    assert not re.search(r"model\.layers\.\d", text)
    config = tiny("llama", num_hidden_layers=1)
    assert _row(str(hfscale.plan(config)), "model.layers.0.mlp.up_proj.weight")[1] == "1"


def test_columns_are_aligned() -> None:
    lines = render(hfscale.plan(tiny("llama"), ParallelConfig(tp_size=2))).splitlines()
    header = lines.index("") + 1
    end = lines[header].index("bytes per rank") + len("bytes per rank")
    rows = lines[header + 2 : lines.index("", header)]
    assert len(rows) == 12
    for line in rows:
        assert re.fullmatch(r".* \d[\d.]* (B|KiB|MiB)", line[:end])
        assert line[end : end + 2] == "  "


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        (3 << 30, "3.0 GiB"),
        (1 << 50, "1024.0 TiB"),
    ],
)
def test_human(size: int, text: str) -> None:
    assert human(size) == text
