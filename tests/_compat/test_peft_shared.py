"""What ``_compat/peft_shared.py`` relies on of PEFT's methods whose wrappers share values."""

from typing import Any

import pytest
import torch
from peft import PveraConfig, VeraConfig, get_peft_model
from torch import nn

from .relied_on import relying

relies_on = relying("peft_shared.py")


def around(config: Any) -> Any:
    """PEFT's model around two projections of other sizes."""
    return get_peft_model(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), config)


@relies_on("peft.tuners._buffer_dict.BufferDict")
def test_wrappers_share_one_holder_of_matrices() -> None:
    """Matrices are entries, by the adapter's name, of a dict of buffers that the tuner and all wrappers hold; PEFT sets
    entries, moves the holder by ``to``, and writes persistent ones alone.
    """
    from peft.tuners._buffer_dict import BufferDict

    model = around(VeraConfig(r=2, target_modules=["0", "1"]))
    holder = model.base_model.vera_A
    assert isinstance(holder, BufferDict)
    assert model.base_model.model[0].vera_A is model.base_model.model[1].vera_A is holder
    assert holder.persistent
    assert holder["default"].shape == (2, 6)
    holder["default"] = torch.ones(2, 6)
    assert torch.equal(model.state_dict()["base_model.vera_A.default"], torch.ones(2, 6))
    assert holder.to("cpu") is holder


@relies_on("peft.tuners.vera.model.VeraModel._find_dim")
def test_matrices_have_the_sizes_of_one_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """``_find_dim(config)`` tells the tuner the largest output and input."""
    from peft.tuners.vera.model import VeraModel

    monkeypatch.setattr(VeraModel, "_find_dim", lambda *_: (8, 9))
    model = around(VeraConfig(r=2, target_modules=["0", "1"]))
    assert model.base_model.vera_A["default"].shape == (2, 9)
    assert model.base_model.vera_B["default"].shape == (8, 2)


@relies_on("peft.tuners.pvera.layer.PveraLayer._reparametrize")
def test_pvera_samples_by_one_method() -> None:
    """A wrapper's forward pass in training calls the instance's ``_reparametrize(mean, log_variance, adapter)``."""
    model = around(PveraConfig(r=2, target_modules=["0"]))
    wrapper = model.base_model.model[0]
    seen = []
    stock = wrapper._reparametrize

    def sample(mean: Any, log_variance: Any, name: str) -> Any:
        seen.append((mean.shape, log_variance.shape, name))
        return stock(mean, log_variance, name)

    wrapper._reparametrize = sample
    model.train()(torch.ones(3, 4))
    assert seen == [((3, 2), (3, 2), "default")]
