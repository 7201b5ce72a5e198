"""Names of pipeline schedules, without torch, so that a command line can name them at once."""

from typing import Any

SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
    "pipedream",
    "pipedream_2bw",
)
ASYNCHRONOUS = ("pipedream", "pipedream_2bw")
"""Schedules whose updates are delayed: a step does not wait for its own microbatches."""

_SEVERAL_STAGES = ("interleaved1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")


def spelled(schedule: Any) -> Any:
    """A schedule's name as it is written here, however it was: ``1F1B`` is ``1f1b``; anything else stays."""
    return schedule.lower() if isinstance(schedule, str) and schedule.lower() in SCHEDULES else schedule


def default_virtual_stages(schedule: str) -> int:
    """Stages per rank where the user named none: two for a schedule that is about several, else one."""
    return 2 if schedule in _SEVERAL_STAGES else 1
