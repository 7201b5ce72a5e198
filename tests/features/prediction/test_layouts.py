"""Multi-token prediction in layouts equals one process with transformers' layers: loss, gradients, norm, weights.

A layout's checkpoint has every key of the reference's, copies of the embedding and the head included.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from hfscale import MemoryConfig, ParallelConfig
from hfscale.testing import RankPool
from hfscale.testing.differences import difference
from hfscale.testing.parity import _built, keep_float64, run_rank, stored

from ...mixtures import EAGER
from ...sweeps import cases
from .plain_prediction import WEIGHT, PredictionCase, config_with, reference, trains

Pools = Callable[[int], RankPool]
pytestmark = trains
SEQUENCE = {"tp_size": 2, "sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp_size": 2, "sequence_parallel": False},
    "sequence": SEQUENCE,
    "pp2": {"pp_size": 2},
    "zbv": {"pp_size": 2, "pipeline_schedule": "zbv"},
    "shard2": {"dp_shard_size": 2},
    "replicate2": {"dp_replicate_size": 2},
    "cp2": {"cp_size": 2},
    "ep2": {"ep_size": 2},
    "ep2, tp2": {"ep_size": 2, **SEQUENCE},
    "pp2, tp2": {"pp_size": 2, **SEQUENCE},
}


def equal(case: PredictionCase, sizes: dict[str, Any], pools: Pools, directory: Path) -> None:
    layout = ParallelConfig(**sizes)
    case.asked = {"mtp_loss_weight": WEIGHT, **case.asked}
    case.hf_kwargs = {**EAGER, "attn_implementation": "eager"}
    reference(case, layout.batch_world, directory)
    one = layout.total_size == 1
    args = case, layout, str(directory)
    assert any(
        value for found in case.measured for name, value in found.items() if name != "mtp_loss"
    )
    for parity in [run_rank(*args)] if one else pools(layout.total_size).run(run_rank, *args):
        assert parity.worst() < 1e-10, parity
    saved = stored(directory / "saved")
    end = stored(directory / "end")
    assert saved.keys() == end.keys(), sorted(saved.keys() ^ end.keys())
    assert max(difference(saved[key], end[key]) for key in saved) < 1e-10


@pytest.mark.daily("ep2")
@pytest.mark.parametrize(
    "layout", cases(LAYOUTS, daily=("one", "sequence", "cp2", "ep2", "pp2, tp2"))
)
def test_layout(layout: str, pools: Pools, tmp_path: Path) -> None:
    config = config_with(depths=2, layers=4 if layout == "zbv" else 2)
    equal(PredictionCase(config), LAYOUTS[layout], pools, tmp_path)


@pytest.mark.parametrize("layout", cases(["sequence", "pp2", "cp2"], daily=["pp2"]))
def test_tied_head(layout: str, pools: Pools, tmp_path: Path) -> None:
    """One tensor under three names, whose gradients add."""
    equal(
        PredictionCase(config_with("glm4_moe", tie_word_embeddings=True)),
        LAYOUTS[layout],
        pools,
        tmp_path,
    )


def test_a_tied_head_in_a_split_backward_pass(pools: Pools, tmp_path: Path) -> None:
    """Its second half runs through the layers again, since they read the embedding below the head."""
    config = config_with(layers=4, tie_word_embeddings=True)
    equal(PredictionCase(config, accumulation=4), LAYOUTS["zbv"], pools, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", cases(["one", "sequence", "cp2"], daily=["cp2"]))
def test_sliding_layers_and_other_names(layout: str, pools: Pools, tmp_path: Path) -> None:
    equal(PredictionCase(config_with("mellum")), LAYOUTS[layout], pools, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", cases(["one", "pp2", "cp2"], daily=["cp2"]))
def test_packed_rows(layout: str, pools: Pools, tmp_path: Path) -> None:
    equal(PredictionCase(config_with(depths=2), packed=True), LAYOUTS[layout], pools, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", cases(["sequence", "pp2", "shard2"], daily=["shard2"]))
def test_adapters(layout: str, pools: Pools, tmp_path: Path) -> None:
    """Over a base that does not train; the layers' projections have adapters too."""
    lora = peft.LoraConfig(
        r=4, target_modules=["o_proj", "kv_b_proj", "eh_proj", "down_proj"], init_lora_weights=False
    )
    equal(PredictionCase(config_with(), peft=lora), LAYOUTS[layout], pools, tmp_path)


@pytest.mark.parametrize("layout", cases(["sequence", "pp2"], daily=["pp2"]))
def test_recomputation(layout: str, pools: Pools, tmp_path: Path) -> None:
    case = PredictionCase(config_with(depths=2), memory=MemoryConfig(recompute="full"))
    equal(case, LAYOUTS[layout], pools, tmp_path)


@pytest.mark.parametrize("layout", cases(["one", "pp2", "shard2"], daily=["shard2"]))
def test_alone(layout: str, pools: Pools, tmp_path: Path) -> None:
    """Nothing but the layers trains, and short rows have no token so far ahead."""
    case = PredictionCase(config_with(depths=2), frozen=("model.", "lm_head"), lengths=(2, 9))
    equal(case, LAYOUTS[layout], pools, tmp_path)


def test_host_checkpointing(pools: Pools, tmp_path: Path) -> None:
    equal(PredictionCase(config_with(), checkpointing=True), LAYOUTS["sequence"], pools, tmp_path)


def test_a_plain_loop_trains_them_too(tmp_path: Path) -> None:
    case = PredictionCase(config_with(depths=2), accumulation=1)
    case.hf_kwargs = {**EAGER, "attn_implementation": "eager"}
    reference(case, 1, tmp_path)
    expected = torch.load(tmp_path / "reference.pt", weights_only=False)[0]
    case.asked = {"mtp_loss_weight": WEIGHT}
    model = _built(case, ParallelConfig(), str(tmp_path))
    with keep_float64():
        loss = model(**case.batches(1)[0][0][0]).loss
    loss.backward()
    assert difference(loss.detach(), expected["losses"][0]) < 1e-10
    for name, parameter in model.named_parameters():
        assert difference(parameter.grad, expected["gradients"][name]) < 1e-9, name
