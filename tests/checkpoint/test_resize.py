"""Another number of tokens than the checkpoint has, in any layout, is what stock code makes of it by means."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PhiConfig

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale.models.precision import keep_float64
from hfscale.testing import RankPool
from hfscale.testing.parity import stored

from ..features.quantization.models import four_bits
from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
STORED = 67
CONFIGS: dict[str, Any] = {
    "untied": lambda: tiny("llama", vocab_size=STORED),
    "tied": lambda: tiny("llama", vocab_size=STORED, tie_word_embeddings=True),
    "bias": lambda: PhiConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=STORED,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "fused": lambda: tiny("gpt2", vocab_size=STORED),
}


def save(kind: str, directory: Path) -> Any:
    """A stock checkpoint; the model is resized after."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return model


def resize_by_means(model: Any, tokens: int) -> None:
    """As the host does, but without the noise that it adds."""
    head = model.get_output_embeddings()
    olds = [model.get_input_embeddings().weight.detach().clone(), head.weight.detach().clone()]
    olds += [] if head.bias is None else [head.bias.detach().clone()]
    model.resize_token_embeddings(tokens, mean_resizing=False)
    head = model.get_output_embeddings()
    news = [model.get_input_embeddings().weight, head.weight, head.bias]
    for old, new in zip(olds, news, strict=False):
        new.data[STORED:] = old.mean(0)


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, STORED - 7, (2, 9), generator=torch.Generator().manual_seed(2))
    ids[:, 4] = STORED - 8
    return {"input_ids": ids, "labels": ids}


def run(path: str, layout: dict[str, Any], tokens: int, new: int) -> float:
    model = hfscale.from_pretrained(
        path, parallel=ParallelConfig(**layout), resize_token_embeddings=tokens, dtype=torch.float64
    )
    model.train()
    given = batch()
    given["input_ids"][0, 2] = new
    given["labels"] = given["input_ids"]
    with keep_float64():
        loss = hfscale.train_step(model, given)
    hfscale.save_pretrained(model, Path(path) / "out")
    return float(loss)


@pytest.mark.parametrize(
    ("kind", "tokens", "axis"),
    [
        *(
            (kind, tokens, "tp_size")
            for kind, tokens in (("untied", 72), ("bias", 71), ("fused", 80), ("tied", 61))
        ),
        *(("tied", 72, axis) for axis in ("dp_shard_size", "pp_size")),
    ],
)
def test_resized(pools: Pools, tmp_path: Path, kind: str, tokens: int, axis: str) -> None:
    stock = save(kind, tmp_path)
    resize_by_means(stock, tokens)
    given = batch()
    new = given["input_ids"][0, 2] = min(tokens - 1, 70)
    with keep_float64():
        wanted = float(stock(**given).loss.detach())
    losses = pools(2).run(run, str(tmp_path), {axis: 2}, tokens, int(new))
    assert losses == pytest.approx([wanted, wanted], rel=1e-13)
    stock.save_pretrained(tmp_path / "wanted")
    found = stored(tmp_path / "out")
    expected = stored(tmp_path / "wanted")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=1e-14, atol=1e-15), name
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.config.vocab_size == tokens


def test_over_four_bits(tmp_path: Path) -> None:
    save("untied", tmp_path)
    model = hfscale.from_pretrained(
        str(tmp_path),
        resize_token_embeddings=72,
        dtype=torch.float32,
        quantization_config=four_bits(),
    )
    assert model.get_output_embeddings().weight.shape[0] == 72
    rows = model.get_input_embeddings().weight
    assert torch.allclose(rows[STORED:], rows[:STORED].mean(0).expand(5, -1), atol=1e-6)


def test_what_cannot_be_resized(tmp_path: Path) -> None:
    save("untied", tmp_path)
    for size in (0, True, 2.5):
        with pytest.raises(ConfigError, match="use a whole number of at least 1"):
            hfscale.from_pretrained(str(tmp_path), resize_token_embeddings=size)  # type: ignore[arg-type]
