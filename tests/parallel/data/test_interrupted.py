"""A step that raises, as one out of memory does, leaves nothing over data ranks to the step that is tried after it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hfscale
from hfscale import ParallelConfig
from hfscale.testing import RankPool
from hfscale.train.runtime import local_tensor, runtime_of

from ...families import config_of

Pools = Callable[[int], RankPool]
Gradients = dict[str, Tensor]
IDS = torch.arange(96).reshape(4, 4, 6) % 61


class OutOfMemoryError(RuntimeError):
    """Stands for the device's."""


def _raises(model: Any, passing: str) -> list[Any]:
    """Let the second pass of a step raise in its first layer, ``forward`` or ``backward``."""
    passes = []

    def count(*_: Any) -> None:
        passes.append(passing)
        if len(passes) == 2:
            raise OutOfMemoryError

    def watch(module: Any, args: Any, output: Any) -> None:
        output[0].register_hook(count)

    attention = model.model.layers[0].self_attn
    return [attention.register_forward_hook(count if passing == "forward" else watch)]


def _gradients(model: Any) -> Gradients:
    return {
        planned.name: local_tensor(parameter.grad).clone()
        for planned, parameter in runtime_of(model).parameters()
        if parameter.grad is not None
    }


def _tried_again(
    family: str, layout: dict[str, Any], options: dict[str, Any], passing: str
) -> list[Gradients]:
    """Return gradients of a step, of it after an interrupted one, and of one before an interrupted one."""
    model = hfscale.from_config(
        config_of(family), parallel=ParallelConfig(**layout), seed=0, **options
    ).train()
    mine = IDS.chunk(hfscale.batch_world(model), dim=1)[hfscale.batch_rank(model)]
    batches = [{"input_ids": ids, "labels": ids} for ids in mine]
    hfscale.train_step(model, batches[:2])
    found = [_gradients(model)]
    for drops in (True, False):
        hooks = _raises(model, passing)
        with pytest.raises(OutOfMemoryError):
            hfscale.train_step(model, batches[2:])
        for hook in hooks:
            hook.remove()
        if drops:
            model.zero_grad()
            hfscale.train_step(model, batches[:2])
        found.append(_gradients(model))
    return found


@pytest.mark.daily("shard2-forward", "replicate2-bf16-backward", "ep2-shard2-backward")
@pytest.mark.parametrize("passing", ["forward", "backward"])
@pytest.mark.parametrize(
    ("family", "layout", "options"),
    [
        pytest.param("llama", {"dp_shard_size": 2}, {}, id="shard2"),
        pytest.param(
            "llama", {"dp_replicate_size": 2}, {"mixed_precision": "bf16"}, id="replicate2-bf16"
        ),
        pytest.param(
            "llama", {"dp_shard_size": 2, "reduce_each_microbatch": True}, {}, id="each-shard2"
        ),
        pytest.param("mixtral", {"dp_shard_size": 2, "ep_size": 2}, {}, id="ep2-shard2"),
    ],
)
def test_a_step_after_one_that_raised(
    pools: Pools, family: str, layout: dict[str, Any], options: dict[str, Any], passing: str
) -> None:
    # Else what an interrupted forward pass has reduced of earlier ones stays, as one process's does.
    reduces_late = layout.keys() <= {"dp_shard_size", "dp_replicate_size"}
    for first, again, kept in pools(2).run(_tried_again, family, layout, options, passing):
        assert first.keys() == again.keys() == kept.keys()
        for name, gradient in first.items():
            assert torch.equal(again[name], gradient), name
            if passing == "forward" and reduces_late:
                assert torch.equal(kept[name], gradient), name
