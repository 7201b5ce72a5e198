"""Training steps under collectives that are slow, strict, or driven from another thread give what they always give."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import MixtralConfig

import hfscale
from hfscale import ParallelConfig
from hfscale.distributed.ops.collectives import (
    all_to_all,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from hfscale.testing import RankPool
from hfscale.train.runtime import local_tensor, runtime_of

from ..layouts import named
from ..sweeps import pairs
from ..tiny_models import tiny
from .collectives import RaceError, backward_on_a_thread, races, strict

Pools = Callable[[int], RankPool]
LAYOUTS = named("tp2", "apart", "sequence", "regather", "1f1b", "zbv", "shard2", "ep2", "ep2, tp2")
# What each starts and does not wait for at once; FSDP2 does so on GPUs only.
ASYNCHRONOUS = {
    "tp2": {"all_reduce"},
    "sequence": {"all_gather", "all_to_all_single"},
    "regather": {"all_gather", "all_to_all_single"},
    "1f1b": {"isend", "irecv"},
    "zbv": {"isend", "irecv"},
}


def _step(layout: ParallelConfig, rows: int) -> dict[str, torch.Tensor]:
    config: Any = tiny("llama", num_hidden_layers=4, mlp_bias=True)
    if layout.size("ep") > 1:
        sizes = {
            name: getattr(config, name)
            for name in ("hidden_size", "num_hidden_layers", "vocab_size")
        }
        config = MixtralConfig(
            **sizes,
            intermediate_size=24,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
        )
    model = hfscale.from_config(config, parallel=layout, dtype=torch.float32).train()
    generator = torch.Generator().manual_seed(3 + hfscale.batch_rank(model))
    ids = torch.randint(0, 67, (3, rows, 12), generator=generator)
    loss = hfscale.train_step(model, [{"input_ids": one, "labels": one} for one in ids])
    norm = hfscale.clip_grad_norm_(model, 0.1)
    return {
        "loss": loss,
        "norm": norm,
        **{
            p.name: local_tensor(x.grad).clone()
            for p, x in runtime_of(model).parameters()
            if x.grad is not None
        },
    }


def _steps(layout: ParallelConfig, rows: int) -> tuple[Counter[str], Counter[str]]:
    expected = _step(layout, rows)

    def same(found: dict[str, torch.Tensor], how: str) -> None:
        assert found.keys() == expected.keys()
        different = [name for name in expected if not torch.equal(found[name], expected[name])]
        assert not different, f"{how}: {different}"

    with races(seed=rows) as slow:
        same(_step(layout, rows), "slow collectives")
    with strict():
        same(_step(layout, rows), "strict collectives")
    with backward_on_a_thread() as threads:
        same(_step(layout, rows), "backward on a thread")
    return slow.seen, threads


# Shares of one sample are sent as they lie, without a copy.
ONE = ("tp2", "sequence", "regather", "ep2")


@pytest.mark.daily("ep2, tp2-2", "zbv-2")
@pytest.mark.parametrize(
    ("layout", "rows"),
    pairs(
        LAYOUTS,
        (1, 2),
        daily=[*((at, 1) for at in ONE), *((at, 2) for at in LAYOUTS if at not in ONE)],
    ),
)
def test_a_step_does_not_race(pools: Pools, layout: str, rows: int) -> None:
    parallel = ParallelConfig(**LAYOUTS[layout])
    for seen, threads in pools(parallel.total_size).run(_steps, parallel, rows):
        names = {name.replace("_into_tensor", "").replace("_tensor", "") for name in seen}
        names = {
            name.removesuffix("_single") if name != "all_to_all_single" else name for name in names
        }
        assert names >= ASYNCHRONOUS.get(layout, set()), seen
        assert threads.total() >= 3


def _found() -> list[str]:
    """Mistakes that the guards are for."""
    group = dist.group.WORLD
    found = []

    def caught(make: Callable[[], Any], error: type[BaseException] = RaceError) -> None:
        with pytest.raises(error) as info:
            make()
        found.append(str(info.value))

    def changed_input() -> None:
        x = torch.ones(1, 4, 2)
        with races(0):
            started = start_reduce_scatter(x, [2, 2], 1, group)
            x.mul_(2)
            started.result()

    def written_output() -> None:
        x = torch.ones(4)
        with races(0):
            started = start_all_reduce(x, group)
            x.fill_(0)
            started.result()

    def forgotten() -> None:
        with races(0):
            start_all_gather(torch.ones(1), [1, 1], 0, group)

    def strided() -> None:
        with strict():
            dist.all_reduce(torch.ones(4, 6).t(), group=group)

    def other_type() -> None:
        with strict():
            all_to_all(torch.ones(2, dtype=torch.int16), [1, 1], [1, 1], group)

    caught(changed_input)
    caught(written_output)
    caught(forgotten)
    caught(strided, AssertionError)
    caught(other_type, AssertionError)
    with races(0):
        x = torch.ones(4)
        started = start_all_reduce(x, group)
        early = x.sum()
        found.append(f"{float(early)} and then {float(started.result().sum())}")
    return found


def test_what_the_guards_catch(pools: Pools) -> None:
    for changed, written, forgotten, strided, other, early in pools(2).run(_found):
        assert "input was changed before" in changed
        assert "output was written to before" in written
        assert "never waited for" in forgotten
        assert "with strides (1, 6)" in strided
        assert "torch.int16" in other
        assert early == "nan and then 8.0"
