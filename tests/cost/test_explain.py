"""The accounting tables, against the numbers in the papers that they are from."""

import json
from pathlib import Path

import pytest

from hfscale.errors import ConfigError
from scripts.explain_memory import (
    ADAM,
    DOUBLE_BITS,
    NF4_BITS,
    SCALE_BITS,
    activations,
    lora_parameters,
    main,
    zero_stages,
)

from ..tiny_models import tiny
from .test_search import facts


def test_zero_of_seven_and_a_half_billion_over_64_ranks() -> None:
    """Figure 1 of Rajbhandari et al. 2020: 120, 31.4, 16.6 and 1.9 GB."""
    found = zero_stages(7.5e9, 64)
    assert [round(size / 1e9, 1) for size in found.values()] == [120.0, 31.4, 16.6, 1.9]
    assert sum(size for _, size in ADAM) == 16


def test_activations_of_gpt3_and_mt_nlg() -> None:
    """Korthikanti et al. 2022: scores are 80 of GPT-3's 114 units and 64 of 98 of MT-NLG's, 70% and 65% of all."""
    for hidden, heads, share in ((12288, 96, 80 / 114), (20480, 128, 64 / 98)):
        found = activations(hidden, heads, 2048, 1, 8)
        saved = 1 - found["tensor and sequence, selective"] / found["tensor and sequence"]
        assert saved == pytest.approx(share)
        assert found["tensor and sequence"] * 8 == pytest.approx(found["no parallelism"])
        assert found["full recomputation"] == 2 * 2048 * hidden


def test_bits_of_a_quantized_weight() -> None:
    """Dettmers et al. 2023: double quantization saves 0.373 bits of a weight, and leaves 0.127."""
    assert round(DOUBLE_BITS, 3) == 0.127
    assert round(SCALE_BITS - DOUBLE_BITS, 3) == 0.373
    assert 65e9 * (NF4_BITS + DOUBLE_BITS) / 8 < 48 * 2**30  # 65 billion on a GPU of 48 GB


def test_factors_are_those_of_peft() -> None:
    shape = facts().shape
    per_layer = 2 * (2048 + 2048) + 2 * (2048 + 1024) + 3 * (2048 + 5632)
    assert lora_parameters(facts(), 4) == 4 * shape.layers * per_layer


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny("llama").save_pretrained(tmp_path)
    main([str(tmp_path), "--data-ranks", "4"])
    said = capsys.readouterr().out
    assert "16 bytes for each parameter" in said
    assert "(2 + 2 + 12)/4" in said
    main([str(tmp_path), "--json"])
    titles = [table["title"] for table in json.loads(capsys.readouterr().out)]
    assert len(titles) == 4
    with pytest.raises(ConfigError, match="--tp 0 is invalid"):
        main([str(tmp_path), "--tp", "0"])
