"""Judge many draws, some at a time, each in a process of its own."""

import gc
import importlib.util
import json
import os
import pkgutil
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import hfscale

from .draw import Draw
from .judge import TIMEOUT, Verdict, judge_in_a_child

_MODULES = (
    "peft",
    "bitsandbytes",
    "transformers.trainer",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
)


def import_everything(families: Iterable[str]) -> None:
    """What draws of these families need, once, before any is forked; no thread of torch's may run before."""
    import torch
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    torch.set_num_threads(1)
    for name in _MODULES:
        if importlib.util.find_spec(name.split(".")[0]):
            importlib.import_module(name, __package__)
    for module in pkgutil.walk_packages(hfscale.__path__, "hfscale."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for family in sorted(families):
        try:
            MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.for_model(family).get_text_config())]
        except Exception:  # a family that needs a package; its draws say so
            continue
    gc.freeze()  # what is imported stays: no child goes through it again, nor copies it


def judge_many(
    draws: Iterable[Draw], jobs: int, timeout: float = TIMEOUT
) -> Iterator[tuple[int, Draw, Verdict]]:
    """Position, draw and verdict of every draw, as they end; ``jobs`` run at a time."""
    waiting = iter(enumerate(draws))
    running: dict[int, tuple[int, Draw, Path, float]] = {}
    with tempfile.TemporaryDirectory(prefix="hfscale-draws-") as name:
        try:
            while True:
                while len(running) < jobs and (following := next(waiting, None)) is not None:
                    path = Path(name) / f"{following[0]}.json"
                    pid = judge_in_a_child(following[1], path, timeout)
                    running[pid] = (*following, path, time.monotonic())
                if not running:
                    return
                for pid in list(running):
                    position, draw, path, begin = running[pid]
                    done, _ = os.waitpid(pid, os.WNOHANG)
                    if not done and time.monotonic() - begin < 12 * timeout:
                        continue
                    if not done:
                        os.kill(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)
                    del running[pid]
                    broken = Verdict(
                        "crash", "the judge ended", "the process that judges the draw ended"
                    )
                    yield (
                        position,
                        draw,
                        Verdict(**json.loads(path.read_text())) if path.exists() else broken,
                    )
                time.sleep(0.01)
        finally:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
