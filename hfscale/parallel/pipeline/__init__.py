"""Pipeline parallelism: schedules as data, what they cost, and how they ran."""

from ...schedules import ASYNCHRONOUS, default_virtual_stages
from .asynchronous import AsynchronousPipeline
from .chrome_trace import Record, Recorder, merge_records, read_trace, write_trace
from .communicators import simulate_communicators
from .csv_table import read_csv, write_csv
from .formulas import ideal_bubble, peak_formula
from .orders import order
from .part import PipelineStages
from .run import Pipeline, check_stages, stage_places
from .simulate import Costs, simulate
from .stand_in import leave_out
from .timeline import Action, Order, Span, Timeline, fullest_live, peak_live, stage_ranks
from .weight_versions import stashed_versions, weight_versions

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
    "ideal_bubble",
    "leave_out",
    "merge_records",
    "order",
    "peak_formula",
    "peak_live",
    "read_csv",
    "read_trace",
    "simulate",
    "simulate_communicators",
    "stage_places",
    "stage_ranks",
    "stashed_versions",
    "weight_versions",
    "write_csv",
    "write_trace",
]
