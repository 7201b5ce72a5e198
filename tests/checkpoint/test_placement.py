"""Where the host is told to put what it reads."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import hfscale
from hfscale.checkpoint.load import load_pretrained
from hfscale.distributed.process_groups import build_mesh

from ..tiny_models import tiny


class _Asked(Exception):
    pass


class Host:
    """An Auto class that only notes how it is asked."""

    @staticmethod
    def from_pretrained(path: str, **kwargs: Any) -> Any:
        raise _Asked(kwargs)


@pytest.mark.parametrize(
    ("device", "quantized", "expected"),
    [
        ("cpu", False, {}),
        ("cuda:1", False, {"": "cuda:1"}),
        ("cpu", True, {"": "cpu"}),
        ("cuda:1", True, {"": "cuda:1"}),
    ],
)
def test_weights_go_to_the_device_of_the_rank(
    device: str, quantized: bool, expected: dict[str, str]
) -> None:
    """Unasked, the host reads into the CPU's memory, and quantizes on the first GPU also where the run is the CPU's."""
    quantization = BitsAndBytesConfig(load_in_4bit=True) if quantized else None
    planned = hfscale.plan(tiny("llama"), quantization_config=quantization)
    mesh = replace(build_mesh(hfscale.ParallelConfig()), device=torch.device(device))
    with pytest.raises(_Asked) as asked:
        load_pretrained(Host, "somewhere", Host, planned, mesh, {"dtype": torch.float32})
    given = asked.value.args[0].get("device_map", {})
    assert given == {name: torch.device(place) for name, place in expected.items()}


def test_a_loaded_model_does_not_look_dispatched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(tmp_path)
    expected = hfscale.from_pretrained(str(tmp_path))
    monkeypatch.setattr(
        "hfscale.checkpoint.load._placed", lambda *_: {"device_map": {"": torch.device("cpu")}}
    )
    model = hfscale.from_pretrained(str(tmp_path))
    assert not hasattr(model, "hf_device_map")
    for (name, value), (_, other) in zip(
        model.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert torch.equal(value, other), name
