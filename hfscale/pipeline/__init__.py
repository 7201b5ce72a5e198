"""Pipeline parallelism: schedules as data, what they cost, and how they ran."""

from ..schedules import ASYNCHRONOUS, default_virtual_stages
from .asynchronous import stashed_versions, weight_versions
from .communicators import simulate_communicators
from .formulas import ideal_bubble, peak_formula
from .install import check_stages, install_pipeline
from .orders import order
from .run import Pipeline, stage_places
from .simulate import Costs, simulate
from .stand_in import leave_out
from .table import read_csv, write_csv
from .ties import summed_over_stages
from .timeline import Action, Order, Span, Timeline, peak_live, stage_ranks
from .trace import Record, Recorder, merge_records, read_trace, write_trace
from .unflushed import UnflushedPipeline

__all__ = [
    "ASYNCHRONOUS",
    "Action",
    "Costs",
    "Order",
    "Pipeline",
    "Record",
    "Recorder",
    "Span",
    "Timeline",
    "UnflushedPipeline",
    "check_stages",
    "default_virtual_stages",
    "ideal_bubble",
    "install_pipeline",
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
    "summed_over_stages",
    "weight_versions",
    "write_csv",
    "write_trace",
]
