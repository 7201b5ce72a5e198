"""How shards come to the rank that wants full tensors: the messages, their bytes, and copies off the device."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import hfscale
from hfscale import ParallelConfig
from hfscale.testing import RankPool
from hfscale.train.runtime import full_tensors as gathering, runtime_of

from ...tiny_models import tiny

Pools = Callable[[int], RankPool]


def gathered(device_is_far: bool) -> tuple[list[tuple[str, int]], int, int, int]:
    """What rank 0 or 1 asks for, in order; buckets; bytes of what rank 1 holds; copies into pinned memory."""
    model = hfscale.from_config(
        tiny("llama", num_hidden_layers=2), parallel=ParallelConfig(tp_size=2)
    )
    runtime = runtime_of(model)
    log = list[tuple[str, int]]()
    pins = 0
    empty = torch.empty
    receive = dist.irecv
    send = dist.isend

    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        nonlocal pins
        pins += pin_memory
        return empty(*args, **kwargs)

    def noted(what: str, call: Any) -> Any:
        def run(tensor: Any, **kwargs: Any) -> Any:
            log.append((what, tensor.numel()))
            return call(tensor, **kwargs)

        return run

    entries = gathering.tensors_to_save(runtime)
    buckets = len(
        list(gathering.buckets(entries, lambda e: e.nbytes, max(e.nbytes for e in entries)))
    )
    with (
        patch.object(torch, "empty", made),
        patch.object(gathering, "is_accelerator", lambda device: device_is_far),
        patch.object(dist, "irecv", noted("receive", receive)),
        patch.object(dist, "isend", noted("send", send)),
    ):
        for entry, tensor in gathering.full_tensors(runtime, entries):
            log.append(("read", 0))
            assert tensor.shape == (entry.shape if dist.get_rank() == 0 else (0,))
    held = sum(each.numel() * each.element_size() for p, each in runtime.parameters() if p.cuts)
    return log, buckets, held, pins


def test_a_message_for_each_bucket_and_rank(pools: Pools) -> None:
    for far in (False, True):
        (log, buckets, _, _), (sent, _, held, pins) = pools(2).run(gathered, far)
        messages = [size for what, size in sent if what == "send"]
        assert [size for what, size in log if what == "receive"] == messages
        assert not [what for what, _ in log if what == "send"]
        assert len(messages) <= buckets < len([what for what, _ in log if what == "read"])
        assert held <= sum(messages) <= held + 256 * len(sent)  # where tensors begin is aligned
        assert pins == far * len(messages)
