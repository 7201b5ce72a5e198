"""An error that memory ran out says what held it, beside the plan's numbers, and what would need less."""

import re
import sys

import pytest
import torch

import hfscale
from hfscale.distributed import failures
from hfscale.extras.out_of_memory import explain as out_of_memory
from hfscale.plan.table import human

from ..tiny_models import tiny


def failed(model: torch.nn.Module) -> BaseException:
    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    model.lm_head.register_forward_pre_hook(run_out)
    ids = torch.randint(0, 60, (4, 8))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    return caught.value


def test_what_held_it_and_what_would_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hfscale.from_config(tiny("llama", num_hidden_layers=2)).train()
    optimizer = hfscale.create_optimizer(model, lr=0.1)
    error = failed(model)
    monkeypatch.setattr(out_of_memory, "memory_in_use", lambda: (2 << 30, 1 << 39))
    sys.excepthook(type(error), error, error.__traceback__)
    told = capsys.readouterr().err
    assert "memory of cpu on rank 0: 2.0 GiB of 512.0 GiB" in told
    planned = hfscale.memory_estimate(model, tokens=32, sequence_length=8)
    # In the lines of this model; other tests' may be alive.
    for kind in (
        "weights",
        "gradients",
        "optimizer",
    ):
        assert re.search(rf"(?m) {human(planned.kinds[kind])}  {kind}$", told), told
    assert "gradient checkpointing: " in told
    assert "microbatches of half the tokens: " in told
    assert ", fits" in told
    assert "hfscale search" in told
    assert optimizer.name == "adamw_torch_fused"


def test_other_errors_say_nothing() -> None:
    assert failures.explained(ValueError("x")) == ""
    assert (
        failures.explained(
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")
        )
        != ""
    )
