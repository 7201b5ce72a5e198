"""Names of choices, without torch, so that the CLI can list them at once."""

from typing import Any

# How context ranks attend to each other's tokens.
CP_METHODS = (
    "auto",
    "gather",
    "heads",
    "ring",
    "heads_ring",
)

GRADIENT_COMPRESSIONS = ("no", "bf16", "fp16", "powersgd")

V_SCHEDULES = ("zbv", "dualpipev")
"""Schedules that place stages down the ranks and up again (Qi et al. 2023; DeepSeek 2025)."""
_SEVERAL_STAGES = ("interleaved1f1b", "looped_bfs", "interleaved_zero_bubble", *V_SCHEDULES)
ASYNCHRONOUS = ("pipedream", "pipedream_2bw")
"""Schedules with delayed updates: a step does not wait for its own microbatches."""

SCHEDULES = ("gpipe", "1f1b", *_SEVERAL_STAGES, *ASYNCHRONOUS)


def spelled(schedule: Any) -> Any:
    """Return a schedule's name in lower case, ``1F1B`` as ``1f1b``; return anything else unchanged."""
    return (
        schedule.lower()
        if isinstance(schedule, str) and schedule.lower() in SCHEDULES
        else schedule
    )


def default_virtual_stages(schedule: str) -> int:
    """Return the default number of stages per rank: two for a schedule that needs several, else one."""
    return 2 if schedule in _SEVERAL_STAGES else 1
