"""``profile: 3 steps`` in a recipe: a trace of torch's profiler, for every rank one."""

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from .._compat.torch_device import accelerators
from .main_process import rank
from .profiled_steps import STEPS_BEFORE_PROFILE


class Profile:
    """Records some steps, behind the first two, and writes ``rank-N.json``, which Perfetto and TensorBoard open."""

    def __init__(self, steps: int, directory: Path) -> None:
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if accelerators().is_available() else [])]
        plan = torch.profiler.schedule(wait=STEPS_BEFORE_PROFILE - 1, warmup=1, active=steps, repeat=1)
        self._target = directory / f"rank-{rank()}.json"
        self._profiler: Any = torch.profiler.profile(activities=kinds, schedule=plan, on_trace_ready=self._write)
        self._profiler.start()

    def step(self) -> None:
        """One step is done."""
        if self._profiler is not None:
            self._profiler.step()

    def stop(self) -> None:
        """No more steps come."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _write(self, profiler: Any) -> None:
        self._target.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._target))
