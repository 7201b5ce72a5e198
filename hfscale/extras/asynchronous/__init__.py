"""Pipelines without a flush: PipeDream (Narayanan et al. 2019) and PipeDream-2BW (Narayanan et al. 2021)."""

from ...extensions import Extension

_SCHEDULES = "hfscale.extras.asynchronous.schedules"
_PIPELINE = "hfscale.extras.asynchronous.pipeline:AsynchronousPipeline"

EXTENSION = Extension(
    name="asynchronous pipelines",
    schedules={
        "pipedream": f"{_SCHEDULES}:PIPEDREAM",
        "pipedream_2bw": f"{_SCHEDULES}:PIPEDREAM_2BW",
    },
    executors={"pipedream": _PIPELINE, "pipedream_2bw": _PIPELINE},
)
