"""How much code a warm step runs: whoever wants to understand a step reads all of it."""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import hfscale
from hfscale import ParallelConfig
from hfscale._compat.replaced import attribute_replaced
from hfscale._compat.torch import _counts_of_unshared
from hfscale.distributed.ops import overlap
from hfscale.testing import RankPool

from ..tiny_models import tiny

FILES = 25
FUNCTIONS = 120
CALLS = 265
"""Files, functions and calls of hfscale's own in a step of two tensor ranks with a tiny Llama. Comprehensions are not
counted, which only some versions of Python run as functions."""
_OWN = str(Path(hfscale.__file__).parent)


def _called() -> Counter[tuple[str, str, int]]:
    """Return how often each function of hfscale's ran in a warm training step of this rank."""
    model = hfscale.from_config(tiny("llama"), parallel=ParallelConfig(tp_size=2)).train()
    ids = torch.arange(12).view(2, 6)
    batch = {"input_ids": ids, "labels": ids}
    for _ in range(2):
        hfscale.train_step(model, batch)
    called: Counter[tuple[str, str, int]] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        named = not code.co_name.startswith("<") or code.co_name == "<lambda>"
        if event == "call" and named and code.co_filename.startswith(_OWN):
            called[code.co_filename, code.co_name, code.co_firstlineno] += 1

    # as outside of tests, where so small blocks do not overlap
    small = attribute_replaced(overlap, "OVERLAPPED_FROM", 1 << 20)
    with small, torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(count)
        try:
            # Python 3.13 holds arguments longer for a profile, so that sums would copy what nothing else holds.
            _counts_of_unshared.cache_clear()
            _counts_of_unshared()
            called.clear()
            hfscale.train_step(model, batch)
        finally:
            sys.setprofile(None)
            _counts_of_unshared.cache_clear()
    return called


def test_a_step_runs_little_code(pools: Callable[[int], RankPool]) -> None:
    for called in pools(2).run(_called):
        files = {file for file, *_ in called}
        assert len(files) <= FILES, sorted(files)
        assert len(called) <= FUNCTIONS, sorted(called)
        assert called.total() <= CALLS, called.most_common()
