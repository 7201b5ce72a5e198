"""An engine has the old weights or the new ones, whole, whichever rank dies; and changes alone make it the same."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForImageTextToText

import hfscale
from hfscale import CheckpointError, ConfigError, ParallelConfig
from hfscale.distributed.mesh import Mesh
from hfscale.extras.pictures.picture_configs import with_pictures
from hfscale.testing import RankPool
from hfscale.testing.pool import RankError
from hfscale.train.runtime.shards import local_tensor

from .state_runs import LAYOUTS, build

Pools = Callable[[int], RankPool]


def dying(call: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
    """Kill this process at the call for which ``when`` holds."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            os.kill(os.getpid(), 9)
        return call(*args, **kwargs)

    return counted


def killed(layout: str, at: str, staged: bool, out: Path) -> None:
    """Stream two versions; rank 1 dies in the second, and rank 0 writes down what its engine has."""
    model = build("ragged", layout, 0, torch.float32)
    engine = {}
    sends = 0
    send = dist.isend
    gather = Mesh.all_gather_object

    def count(*_: Any) -> bool:
        nonlocal sends
        sends += 1
        return False

    with patch.object(dist, "isend", dying(send, count)):
        for name, tensor in hfscale.stream_weights(model, version=1):
            engine[name] = tensor.clone()
    before = dict(engine)
    half = sends // 2
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    if dist.get_rank() == 1:
        sends = 0
        middle = dying(send, lambda *_: count() or (at == "middle" and sends == half))
        commit = dying(gather, lambda _, value, *__: at == "commit" and value == 2)
        with patch.object(dist, "isend", middle), patch.object(Mesh, "all_gather_object", commit):
            assert list(hfscale.stream_weights(model, version=2, staged=staged)) == []
        os.kill(os.getpid(), 9)
    weights = hfscale.stream_weights(model, version=2, staged=staged)
    told = ""
    try:
        for name, tensor in weights:
            if at == "applying":
                time.sleep(0.01)
            engine[name] = tensor.clone()
    except CheckpointError as error:
        told = str(error)
    changed = [not torch.equal(before[name], engine[name]) for name in before]
    torch.save((changed, weights.version, weights.committed, told), out)


@pytest.mark.daily("tp2-middle-False")
@pytest.mark.parametrize(
    ("layout", "at", "staged"),
    [
        ("pp2", "middle", True),
        ("tp2", "commit", True),
        ("tp2", "applying", True),
        ("tp2", "middle", False),
    ],
)
def test_a_rank_dies(tmp_path: Path, layout: str, at: str, staged: bool) -> None:
    with RankPool(2) as pool, pytest.raises(RankError, match="rank 1 failed:\nthe process died"):
        pool.run(killed, layout, at, staged, tmp_path / "found")
    changed, version, committed, told = torch.load(tmp_path / "found")
    assert (version, committed) == (2, at == "applying")
    if at == "applying":
        assert all(changed)
        assert told == ""
    else:
        assert any(changed) == (not staged)
        assert not all(changed)
        assert (
            "version 2 of the weights did not arrive completely: let the engine keep its previous version"
            in told
        )


def other_versions() -> str:
    model = build("ragged", "tp2", 0, torch.float32)
    weights = hfscale.stream_weights(model, version=3 + dist.get_rank(), staged=True)
    with pytest.raises(CheckpointError) as caught:
        next(weights)
    assert not weights.committed
    return str(caught.value)


def test_ranks_stream_one_version(pools: Pools) -> None:
    for message in pools(2).run(other_versions):
        assert (
            message
            == "version must be the same on every rank, got [3, 4]: pass one number on all ranks"
        )


def changes(kind: str, layout: str, part: str, options: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Return the old and the new weights, and what a stream of the changes yields: the last rank changes one entry."""
    model = build(kind, layout, 0, torch.float32)
    first = hfscale.stream_weights(model, ranks="all", version=1, **options)
    old = {name: tensor.clone() for name, tensor in first}
    assert (
        list(hfscale.stream_weights(model, ranks="all", version=2, changed_since=first, **options))
        == []
    )
    if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
        found = [parameter for name, parameter in model.named_parameters() if part in name]
        assert len(found) == 1
        with torch.no_grad():
            local_tensor(found[0]).view(-1)[-1] += 1.0
    later = hfscale.stream_weights(
        model, ranks="all", version=3, changed_since=first, staged=True, **options
    )
    sent = {name: tensor.clone() for name, tensor in later}
    new = {
        name: tensor.clone()
        for name, tensor in hfscale.stream_weights(model, ranks="all", **options)
    }
    return [old, new, sent]


MERGED = {"merge_adapters": True}
ALONE = {"adapters_only": True}


@pytest.mark.daily(
    "ragged-tp2-layers.1.mlp.down_proj-options1-1",
    "tied-pp2-h.3.mlp.c_fc.weight-options2-1",
    "mixture-ep2-layers.1.mlp.experts.gate_up_proj-options4-8",
    "lora-tp2-layers.1.self_attn.q_proj.lora_B-options6-1",
    "ragged-one-layers.1.mlp.down_proj-options0-1",
)
@pytest.mark.parametrize(
    ("kind", "layout", "part", "options", "count"),
    [
        ("ragged", "one", "layers.1.mlp.down_proj", {}, 1),
        ("ragged", "tp2", "layers.1.mlp.down_proj", {}, 1),
        ("tied", "pp2", "h.3.mlp.c_fc.weight", {}, 1),
        ("narrow", "shard2", "layers.0.self_attn.q_proj.bias", {}, 1),
        (
            "mixture",
            "ep2",
            "layers.1.mlp.experts.gate_up_proj",
            {},
            8,
        ),  # one parameter of four experts
        ("lora", "tp2-shard2", "layers.1.self_attn.q_proj.lora_B", MERGED, 1),
        ("lora", "tp2", "layers.1.self_attn.q_proj.lora_B", ALONE, 1),
        ("lora", "pp2", "layers.3.self_attn.q_proj.lora_B", {}, 1),
    ],
)
def test_changes_alone(
    pools: Pools, kind: str, layout: str, part: str, options: dict[str, Any], count: int
) -> None:
    world = ParallelConfig(**LAYOUTS[layout]).total_size
    arguments = (kind, layout, part, options)
    for old, new, sent in (
        pools(world).run(changes, *arguments) if world > 1 else [changes(*arguments)]
    ):
        assert (len(sent), list(sent)) == (count, [name for name in new if name in sent])
        assert any(not torch.equal(old[name], new[name]) for name in sent)
        engine = old | sent
        assert all(torch.equal(engine[name], new[name]) for name in new)


def test_what_is_stored_together_changes_together() -> None:
    """The tower's checkpoint has q, k and v as one."""
    model = hfscale.from_config(
        with_pictures("qianfan_ocr"), auto_class=AutoModelForImageTextToText
    )
    first = hfscale.stream_weights(model, version=1)
    old = {name: tensor.clone() for name, tensor in first}
    with torch.no_grad():
        model.get_parameter("model.vision_tower.layers.0.attention.q_proj.weight")[0, 0] += 1.0
    ((key, sent),) = hfscale.stream_weights(model, version=2, changed_since=first)
    assert key.endswith("layers.0.attn.qkv.weight")
    assert (sent != old[key]).sum() == 1


def test_changes_since_what() -> None:
    model = build("lora", "one", 0, torch.float32)
    begun, without = (
        hfscale.stream_weights(model, merge_adapters=True, version=version) for version in (1, None)
    )
    assert list(without)
    next(begun)
    for since, more in (
        (begun, {"version": 2}),
        (without, {"version": 2}),
        ("0", {"version": 2}),
        (done := hfscale.stream_weights(model, version=1, merge_adapters=True), {}),
        (done, {"version": 2, "adapters_only": True, "merge_adapters": False}),
    ):
        assert since is not done or done.committed or list(done)
        with pytest.raises(
            ConfigError, match="changed_since must be a committed stream of this model"
        ):
            hfscale.stream_weights(model, **{"merge_adapters": True, **more}, changed_since=since)
