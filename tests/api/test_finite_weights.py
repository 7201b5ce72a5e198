"""A load looks for NaN and infinity in the values that will be used, once they are there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig

import hfscale
from hfscale import ParallelConfig
from hfscale.testing import RankPool

from ..features.quantization.models import save
from ..tiny_models import tiny

Pools = Callable[[int], RankPool]


@contextmanager
def told() -> Iterator[list[str]]:
    """Collect warnings; torch fills memory that holds no values yet with NaN."""
    logged: list[str] = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with patch(
            "hfscale.train.runtime.writing._log.warning",
            lambda text, *given: logged.append(text % given),
        ):
            yield logged
    finally:
        torch.use_deterministic_algorithms(False)


def of_a_base(path: str, layout: dict[str, int]) -> list[str]:
    """What is told of a classifier, whose head the checkpoint lacks."""
    with told() as logged:
        model = hfscale.from_pretrained(
            path, parallel=ParallelConfig(**layout), auto_class=AutoModelForSequenceClassification
        )
    assert all(
        tensor.isfinite().all()
        for name, tensor in model.named_parameters()
        if name != "model.norm.weight"
    )
    return logged


@pytest.mark.parametrize("layout", [{}, {"tp_size": 2}, {"pp_size": 2}, {"dp_shard_size": 2}])
def test_weights_that_a_checkpoint_lacks_are_drawn(
    layout: dict[str, int], pools: Pools, tmp_path: Path
) -> None:
    path = save(tiny("llama"), tmp_path)
    world = ParallelConfig(**layout).total_size
    found = [of_a_base(path, layout)] if world == 1 else pools(world).run(of_a_base, path, layout)
    assert found == [[]] * world


@pytest.mark.parametrize("storage", ["uint8", "bfloat16", "float16", "float32"])
def test_packed_bytes_are_no_numbers(storage: str, tmp_path: Path) -> None:
    path = save(tiny("llama"), tmp_path)
    kind = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=storage
    )
    with told() as logged:
        hfscale.from_pretrained(path, quantization_config=kind, dtype=torch.float32)
    assert logged == []


def test_values_of_the_checkpoint_are_looked_at(tmp_path: Path) -> None:
    """Also beside a head that it lacks, and packed weights."""
    path = save(tiny("llama"), tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][3] = float("inf")
    save_file(weights, file, metadata={"format": "pt"})
    (message,) = of_a_base(path, {})
    assert "NaN or infinity in model.norm.weight" in message
    kind = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage="bfloat16")
    with told() as logged:
        hfscale.from_pretrained(path, quantization_config=kind)
    assert ["model.norm.weight" in message for message in logged] == [True]
