"""First values of a model that is made from a config: those of constructors and of the host's initialization."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ParallelConfig
from hfscale.testing import RankPool
from hfscale.testing.parity import stored
from tests.fuzz.choose_family import families
from tests.sweeps import cases

from ...families import config_of

# Of the first three, the host's initialization leaves some to constructors; of falcon_h1, to the model around layers.
OFTEN = ["apertus", "data2vec-text", "openai-gpt", "falcon_h1", "llama", "gpt2", "mamba2", "bloom"]


@pytest.mark.parametrize("family", cases(families(), daily=OFTEN))
def test_values_are_of_the_kind_of_stock_ones(family: str) -> None:
    """Constants and buffers are stock's; what is random is about as large."""
    config = config_of(family)
    torch.manual_seed(3)
    stock = AutoModelForCausalLM.from_config(config)
    torch.full((1 << 16,), torch.nan)  # memory that nobody fills is full of these
    ours: Any = hfscale.from_config(config_of(family), seed=5)
    wanted = {name: parameter.detach() for name, parameter in stock.named_parameters()}
    for name, parameter in ours.named_parameters():
        found = parameter.detach()
        spread = float(wanted[name].float().std(correction=0))
        assert found.isfinite().all(), name
        if spread == 0.0:
            torch.testing.assert_close(found, wanted[name], msg=name)
        elif found.numel() >= 256:  # of a handful, chance decides
            assert float(found.float().std(correction=0)) == pytest.approx(spread, rel=0.25), name
    buffers = dict(stock.named_buffers())
    for name, found in ours.named_buffers():
        torch.testing.assert_close(found, buffers[name], msg=name)


def _make(family: str, layout: dict[str, Any], directory: str) -> None:
    model = hfscale.from_config(config_of(family, 2), parallel=ParallelConfig(**layout), seed=5)
    hfscale.save_pretrained(model, directory)


@pytest.mark.parametrize("family", ["openai-gpt", "falcon_h1"])
@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"pp_size": 2}], ids=["tp", "pp"])
def test_constructors_values_do_not_depend_on_the_layout(
    pools: Callable[[int], RankPool], tmp_path: Path, family: str, layout: dict[str, Any]
) -> None:
    pools(2).run(_make, family, layout, str(tmp_path / "cut"))
    _make(family, {}, str(tmp_path / "whole"))
    whole = stored(tmp_path / "whole")
    cut = stored(tmp_path / "cut")
    assert whole.keys() == cut.keys()
    assert [name for name in whole if not torch.equal(whole[name], cut[name])] == []
