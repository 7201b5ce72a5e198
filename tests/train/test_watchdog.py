"""A watchdog names the ranks, the axis and the collective that wait, and where the others are."""

import io
import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale._compat import torch_gloo
from hfscale.testing import RankPool
from hfscale.train.watchdog import RankState, report

from ..tiny_models import tiny

Pools = Callable[[int], RankPool]


class Screen(io.StringIO):
    """Once it shows where the late rank is, it leaves a mark that every rank sees; a busy machine may show more."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark

    def flush(self) -> None:
        if is_seen(self.getvalue()):
            self.mark.touch()


def is_seen(told: str) -> bool:
    return bool(re.search("waits for no other rank, and is at test_watchdog.py.*in hangs", told))


def hangs(mark: Path) -> None:
    """Until somebody says so."""
    for _ in range(6000):
        if mark.exists():
            return
        time.sleep(0.01)


def hang(layout: dict[str, Any], late: int, mark: str) -> str:
    model = hfscale.from_config(
        tiny("llama", num_hidden_layers=2), parallel=ParallelConfig(**layout)
    ).train()
    ids = torch.arange(16).view(2, 8)
    screen = Screen(Path(mark))
    with redirect_stderr(screen):
        hfscale.watchdog(model, patience=0.5)
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
        if torch.distributed.get_rank() == late:
            layers = [module for name, module in model.named_modules() if name.endswith("mlp")]
            layers[0].register_forward_hook(lambda *_: hangs(screen.mark))
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
        hfscale.watchdog(model, patience=1000.0)  # takes the place of the first
    return screen.getvalue()


@pytest.mark.daily("tp", "first-stage")
@pytest.mark.parametrize(
    ("layout", "late", "waits"),
    [
        ({"tp_size": 2}, 1, r"all_reduce of Float \[\[?.*\] over tp \(all ranks\)"),
        (
            {"pp_size": 2, "num_microbatches": 2},
            1,
            r"recv from rank 1 over pp, 1 to 0 \(all ranks\)",
        ),
        (
            {"pp_size": 2, "num_microbatches": 2},
            0,
            r"recv from rank 0 over pp, 0 to 1 \(all ranks\)",
        ),
    ],
    ids=["tp", "last-stage", "first-stage"],
)
def test_who_waits_for_whom(
    pools: Pools, tmp_path: Path, layout: dict[str, Any], late: int, waits: str
) -> None:
    told = pools(2).run(hang, layout, late, str(tmp_path / "mark"))[1 - late]
    head = "[hfscale watchdog] ranks have waited for more than 0.5 s. Look at the ranks that do not wait"
    found = next(report.splitlines() for report in told.split(head) if is_seen(report))
    (waiting,) = (line for line in found if line.startswith(f"  rank {1 - late}: waits in "))
    assert re.search(
        rf"{waits}, for \d+ s, at test_watchdog.py:\d+ in hang, in hfscale/", waiting
    ), waiting
    assert any(line.startswith(f"  rank {late}: ") and is_seen(line) for line in found)


def test_words() -> None:
    seen = [
        RankState(3, 9.0, "all_gather over ep (all ranks)", "train.py:8 in main"),
        None,
        RankState(2, 0.0, "", "x.py:1 in f"),
    ]
    seen += seen[:1]
    told = report(seen, {2}, 5.0).splitlines()
    assert (
        told[1]
        == "  ranks 0, 3: waits in all_gather over ep (all ranks), for 9 s, at train.py:8 in main"
    )
    assert told[2].startswith("  rank 1: gives no sign of life: the process or its machine is gone")
    assert told[3].startswith("  rank 2: gives no sign of life")
    assert told[3].endswith("it was last at x.py:1 in f")


def test_patience_is_a_time() -> None:
    model = hfscale.from_config(tiny("llama", num_hidden_layers=1))
    with pytest.raises(ConfigError, match="patience=0 is invalid: use a finite number above 0"):
        hfscale.watchdog(model, patience=0)
    hfscale.watchdog(model)  # one process waits for nobody
    assert not [thread for thread in threading.enumerate() if thread.name == "hfscale-watchdog"]


def _recorded(
    call: str, seconds: float, group: str = "5", state: str = "completed", **more: Any
) -> dict[str, Any]:
    """An entry of NCCL's flight recorder, of a call some seconds ago."""
    return {
        "profiling_name": f"nccl:{call}",
        "process_group": [group, "pp"],
        "input_dtypes": [] if call == "coalesced" else ["Float"],
        "input_sizes": [] if call == "coalesced" else [[4]],
        "retired": state == "completed",
        "state": state,
        "is_p2p": call.startswith(("send", "recv")),
        "thread_id": "1",
        "time_created_ns": int((1000 - seconds) * 1e9),
        **more,
    }


_HALVES = [
    _recorded("send 0->1", 400, state="scheduled"),
    _recorded("recv 0<-1", 400, state="scheduled"),
]
_WAITS = _recorded("all_reduce", 9, group="2", state="started")
_ALONE = _recorded("recv 0<-1", 5, state="scheduled")
_BOTH = [("all_reduce", "Float [4]"), ("recv 0<-1", "Float [4]")]


@pytest.mark.parametrize(
    ("entries", "waits"),
    [
        ([*_HALVES, _recorded("coalesced", 400), _recorded("all_reduce", 1, group="2")], []),
        # a pause between two steps, then a batch under way: its halves have no state of their own
        (
            [
                *_HALVES,
                _recorded("coalesced", 400),
                *_HALVES[:1],
                _recorded("coalesced", 30, state="started"),
            ],
            [("send 0->1", "Float [4]"), ("coalesced", "")],
        ),
        # another group's batch says nothing of this one's
        ([*_HALVES[:1], _recorded("coalesced", 300, group="6")], [("send 0->1", "Float [4]")]),
        (
            [*_HALVES, _recorded("coalesced", 400), _WAITS, _ALONE],
            [("all_reduce", "Float [4]"), ("recv 0<-1", "Float [4]")],
        ),
        ([_recorded("all_reduce", 9, state="scheduled", retired=True)], []),
    ],
    ids=["finished", "under way", "other group", "others wait", "retired"],
)
def test_halves_of_batches_end_with_their_batch(
    monkeypatch: pytest.MonkeyPatch, entries: list[Any], waits: list[tuple[str, str]]
) -> None:
    """NCCL records the halves of batch_isend_irecv without events: they stay scheduled for ever."""

    def dump(collectives: bool, only_active: bool) -> str:
        kept = [entry for entry in entries if not only_active or entry["state"] != "completed"]
        return json.dumps({"entries": kept if collectives else []})

    monkeypatch.setattr(torch_gloo, "_c10d", SimpleNamespace(_dump_nccl_trace_json=dump))
    assert [(one.call, one.shapes) for one in torch_gloo.collectives_under_way()] == waits
