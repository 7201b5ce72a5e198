"""Pipeline parallelism: schedules as data, their simulation, and their recorded runs."""

import importlib
from typing import TYPE_CHECKING, Any

from ...config.schedules import ASYNCHRONOUS, default_virtual_stages

if TYPE_CHECKING:
    from .asynchronous import AsynchronousPipeline
    from .chrome_trace import Record, Recorder, merge_records, read_trace, write_trace
    from .csv_table import read_csv, write_csv
    from .orders import order
    from .part import PipelineStages
    from .run import Pipeline, check_stages, stage_places
    from .simulation import Costs, simulate
    from .stand_in import leave_out
    from .timeline import Action, Order, Span, Timeline, fullest_live, peak_live, stage_ranks
    from .versions import stashed_versions, weight_versions

__all__ = [
    "ASYNCHRONOUS",
    "Action",
    "AsynchronousPipeline",
    "Costs",
    "Order",
    "Pipeline",
    "PipelineStages",
    "Record",
    "Recorder",
    "Span",
    "Timeline",
    "check_stages",
    "default_virtual_stages",
    "fullest_live",
    "leave_out",
    "merge_records",
    "order",
    "peak_live",
    "read_csv",
    "read_trace",
    "simulate",
    "stage_places",
    "stage_ranks",
    "stashed_versions",
    "weight_versions",
    "write_csv",
    "write_trace",
]

# A schedule is looked at without torch, which what runs it needs.
_MODULES = {
    ".asynchronous": ["AsynchronousPipeline"],
    ".chrome_trace": ["Record", "Recorder", "merge_records", "read_trace", "write_trace"],
    ".csv_table": ["read_csv", "write_csv"],
    ".orders": ["order"],
    ".part": ["PipelineStages"],
    ".run": ["Pipeline", "check_stages", "stage_places"],
    ".simulation": ["Costs", "simulate"],
    ".stand_in": ["leave_out"],
    ".timeline": ["Action", "Order", "Span", "Timeline", "fullest_live", "peak_live", "stage_ranks"],
    ".versions": ["stashed_versions", "weight_versions"],
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name], __name__), name)
