"""Loads: right on routes made by hand, over ranks and stages, once under recomputation; kept and drawn."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hfscale
from hfscale import ConfigError, ExpertLoad, ExpertLoadHistory, ParallelConfig, RoutingConfig
from hfscale._compat.transformers.computing import enable_checkpointing
from hfscale._compat.transformers.experts import use_eager_experts
from hfscale.parallel.experts.load_report import LayerLoad
from tests.parity.test_balance import _config, _microbatches, _together
from tests.tiny_models import tiny


def _loaded(
    layout: ParallelConfig | None, routing: RoutingConfig | None, checkpointing: bool = False
) -> Any:
    model = hfscale.from_config(
        _config("olmoe"), parallel=layout, dtype=torch.float64, routing=routing
    ).train()
    if checkpointing:
        enable_checkpointing(model)
    return model


def _loads(
    layout: ParallelConfig | None, routing: RoutingConfig | None, checkpointing: bool = False
) -> Any:
    """Loads of a training step, of an evaluation, and of two steps of which the last one counts."""
    model = _loaded(layout, routing, checkpointing)
    mine = _microbatches()[hfscale.batch_rank(model) :: hfscale.batch_world(model)]
    found = []
    for step in (hfscale.train_step, hfscale.eval_step):
        step(model, mine)
        step(model, mine)
        found.append(hfscale.expert_load(model))
        assert hfscale.expert_load(model) == found[-1], "asking changes nothing"
    return found


def _by_hand() -> list[list[int]]:
    """Tokens per expert and layer, from what the stock routers of one process choose."""
    model = _loaded(None, None)
    use_eager_experts(model)
    counts = [[0] * 4, [0] * 4]

    def count(number: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            for expert in output[2].flatten().tolist():
                counts[number][expert] += 1

        return hook

    for number, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(count(number))
    with torch.no_grad():
        for batch in _microbatches():
            model(**batch)
    return counts


def test_loads_are_those_of_a_count_by_hand() -> None:
    expected = _by_hand()
    for checkpointing in (False, True):
        for load in _loads(None, RoutingConfig(), checkpointing):
            assert [list(layer.tokens) for layer in load.layers] == expected
            assert [layer.name for layer in load.layers] == [
                f"model.layers.{i}.mlp.experts" for i in (0, 1)
            ]
            assert sum(load.layers[0].tokens) == sum(
                2 * batch["input_ids"].numel() for batch in _microbatches()
            )


@pytest.mark.daily("True-tp2, sequence parallel, ep2", "False-dp_shard2 x pp2, ep2")
@pytest.mark.parametrize(
    "layout",
    [
        ParallelConfig(dp_shard_size=2),
        ParallelConfig(tp_size=2),
        ParallelConfig(pp_size=2),
        ParallelConfig(tp_size=2, ep_size=2),
        ParallelConfig(tp_size=2, ep_size=2, sequence_parallel=True),
        ParallelConfig(pp_size=2, ep_size=2),
    ],
    ids=lambda layout: layout.describe(),
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_loads_are_the_same_in_every_layout(
    pools: Any, layout: ParallelConfig, checkpointing: bool
) -> None:
    expected = _by_hand()
    for found in pools(layout.total_size).run(_loads, layout, RoutingConfig(), checkpointing):
        for load in found:
            assert [list(layer.tokens) for layer in load.layers] == expected


def test_spread_experts_count_unasked(pools: Any) -> None:
    expected = _by_hand()
    for load in pools(2).run(_loads, ParallelConfig(ep_size=2), None)[0]:
        assert [list(layer.tokens) for layer in load.layers] == expected


def test_loops_of_ones_own_count_until_they_ask() -> None:
    model = _loaded(None, RoutingConfig())
    batch = _together(_microbatches())
    routes = 2 * batch["input_ids"].numel()
    for passes in (1, 3):
        for _ in range(passes):
            model(**batch).loss.backward()
        assert sum(hfscale.expert_load(model).layers[0].tokens) == passes * routes


def test_a_model_that_does_not_count_says_so() -> None:
    with pytest.raises(ConfigError, match=r"routing=hfscale.RoutingConfig\(\)"):
        hfscale.expert_load(_loaded(None, None))
    with pytest.raises(ConfigError, match="has no experts"):
        hfscale.expert_load(hfscale.from_config(tiny("llama")))


def test_metrics_are_the_worst_layers() -> None:
    load = ExpertLoad((LayerLoad("a", (3, 3), 0, 1.0, 2.0), LayerLoad("b", (4, 0), 2, 2.0, 4.0)))
    found = load.metrics()
    assert found == {
        "experts/max_over_mean": 2.0,
        "experts/entropy": 0.0,
        "experts/dropped": pytest.approx(2 / 12),
        "experts/balance_loss": 1.5,
        "experts/z_loss": 3.0,
    }
    assert load.layers[1].dropped_share == pytest.approx(2 / 6)


def _history(path: Path | None = None) -> ExpertLoadHistory:
    history = ExpertLoadHistory(path)
    for step in range(5):
        history.record(
            step, ExpertLoad(tuple(LayerLoad(f"l{i}", (8 - step, step, 4)) for i in range(5)))
        )
    return history


def test_a_history_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "loads.jsonl"
    history = _history(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(5))
    assert lines[1]["layers"][0]["tokens"] == [7, 1, 4]
    assert ExpertLoadHistory.read(path).steps == history.steps
    path.write_text("{}\n")
    with pytest.raises(ConfigError, match="holds no loads"):
        ExpertLoadHistory.read(path)
    with pytest.raises(ConfigError, match="does not exist"):
        ExpertLoadHistory(tmp_path / "nowhere" / "loads.jsonl")


@pytest.mark.daily(".png")
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_picture_has_a_map_per_layer(tmp_path: Path, suffix: str) -> None:
    target = _history().plot(tmp_path / f"loads{suffix}")
    content = target.read_bytes()
    assert len(content) > 5000
    assert content[:4] == (b"\x89PNG" if suffix == ".png" else b"<?xm")
    if suffix == ".svg":
        assert content.count(b'id="image') >= 5


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no recorded steps to plot"):
        ExpertLoadHistory().plot(tmp_path / "loads.png")
    with pytest.raises(ConfigError, match=r"ending in .png or .svg"):
        _history().plot(tmp_path / "loads.gif")
    with pytest.raises(ConfigError, match="cannot be drawn"):
        _history().plot(tmp_path / "nowhere" / "loads.png")
